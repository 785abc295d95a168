"""Settings that have no effect on a mesh or a model are listed, and change nothing; others change the step."""

import jax
import pytest

from src.extras.idle_settings import idle_settings
from src.parallel.mesh import make_layout
from src.run import run as src_run
from src.step.trace import plan_step, trace_train_step
from tests.runs import run_here
from tests.tiny import load

DATA = {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1, "dcn_data_parallelism": 1}
TENSOR = {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 4, "base_num_kv_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "ici_expert_parallelism": 2, "ici_fsdp_parallelism": 4}
ROUTER = {"num_experts": 4, "num_experts_per_tok": 2, "routed_bias": "true"}
FROZEN = {"trainable_parameters": "[attention.query]"}


def step_of(devices, keys):
    """What the step computes and how its arrays are sharded, as text, and the lines about idle settings."""
    config = load(**keys)
    traced = trace_train_step(config, jax.devices()[:devices])
    shardings = jax.tree.map(lambda leaf: str(leaf.sharding.spec), (traced.state, traced.batch))
    return f"{traced.jax_traced.jaxpr}{shardings}", idle_settings(config.mesh, traced.plan)


@pytest.mark.parametrize(
    ("devices", "keys", "typed", "why"),
    [
        (1, {}, {"shard_optimizer_over_data": "true"}, "no replicas of weights"),
        (8, {}, {"shard_optimizer_over_data": "true"}, "no replicas of weights"),
        (8, DATA, {"shard_optimizer_over_data": "true"}, ""),
        (8, TENSOR, {"logical_axis_rules__expert": "[data]"}, "no array of this model has a dim expert"),
        (8, TENSOR, {"logical_axis_rules__expert_embed": "[]"}, "no array of this model has a dim expert_embed"),
        (8, TENSOR, {"logical_axis_rules__latent": "[]"}, "no array of this model has a dim latent"),
        (8, TENSOR, {"logical_axis_rules__position": "[tensor]"}, "no array of this model has a dim position"),
        (8, TENSOR, {"logical_axis_rules__other_layers": "[tensor]"}, "no array of this model has a dim other_layers"),
        (8, {}, {"logical_axis_rules__mlp": "[]"}, "only in mesh axes of one device"),
        (1, {}, {"logical_axis_rules__vocab": "[]"}, "only in mesh axes of one device"),
        (8, TENSOR, {"logical_axis_rules__mlp": "[]"}, ""),
        (8, TENSOR, {"logical_axis_rules__norm_length": "[tensor]"}, ""),
        (8, TENSOR, {"logical_axis_rules__kv_heads": "[]"}, ""),
        (8, {"position_type": "learned", **TENSOR}, {"logical_axis_rules__position": "[tensor]"}, ""),
        (8, EXPERTS, {"logical_axis_rules__expert_embed": "[]"}, ""),
        (1, ROUTER, {"routed_bias_update_rate": 0.1}, ""),
        (1, {**ROUTER, **FROZEN}, {"routed_bias_update_rate": 0.1}, "leave the bias of no router to move"),
        (1, {}, {"jax_distributed_heartbeat_timeout_seconds": 5}, "there is one process"),
    ],
)
def test_what_is_listed_changes_nothing(devices, keys, typed, why):
    plain, none = step_of(devices, keys)
    changed, lines = step_of(devices, {**keys, **typed})
    assert none == []
    assert (changed == plain) == bool(why)
    (key,) = typed
    assert [line.partition("=")[0] for line in lines] == [key.replace("__", ".")] * bool(why)
    assert all(line.endswith(why) or why in line for line in lines)


@pytest.mark.parametrize(("trained", "listed"), [("[*norm.scale]", True), ("[*norm.scale, output]", False)])
def test_a_decay_of_weights_that_do_not_decay_is_listed(trained, listed):
    keys = {"trainable_parameters": trained.replace("*norm.scale", "'*norm.scale'"), "adam_weight_decay": 0.3}
    (_, lines), config = step_of(1, keys), load(**keys)
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:1]))
    assert (
        bool(jax.tree.leaves(jax.tree.map(lambda decays: decays or None, plan.split(plan.decays).trainable))) != listed
    )
    assert lines == ["adam_weight_decay=0.3 has no effect: no weight that is trained decays"] * listed


def test_an_order_of_axes_matters_if_two_of_them_have_devices():
    order = {"mesh_axes": "[tensor, data, stage, fsdp, context, expert]"}
    for keys, listed in (({}, True), (TENSOR, False)):
        (_, lines), devices = step_of(8, {**keys, **order}), []
        assert bool(lines) == listed
        for each in ({}, order):
            config = load(**keys, **each)
            mesh = trace_train_step(config, jax.devices()).plan.layout.mesh
            names = {name: size for name, size in mesh.shape.items() if size > 1}
            devices.append((mesh.devices.ravel().tolist(), sorted(names.items()), [*names]))
        assert (devices[0] == devices[1]) == listed


def test_a_run_lists_them_and_without_the_extra_still_runs(tmp_path, capsys, monkeypatch):
    keys = {"base_output_directory": tmp_path, "steps": 1, "logical_axis_rules.expert": "[tensor]"}
    line = "logical_axis_rules.expert=[tensor] has no effect: no array of this model has a dim expert\n"
    run_here(**keys)
    assert capsys.readouterr().out.count(line) == 1
    monkeypatch.setattr(src_run, "optional", lambda module: None)
    run_here(**keys, run_name="again")
    assert line not in capsys.readouterr().out
