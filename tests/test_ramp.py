"""Runs whose batch grows: interrupted at any size, on another mesh, beside SGD by hand, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.data.loader import train_batches
from src.data.open import open_sources
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.preferences import train_dpo
from src.model.params import Weights, by_path
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.run.metrics import StepPrinter
from src.step.loss import hidden_states
from src.step.trace import plan_step
from src.system.errors import UserError
from tests import runs

STEPS = 8
SIZES = [4, 4, 4, 6, 6, 8, 8, 8]
T = runs.TINY["max_target_length"]
MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4, "base_num_query_heads": 4, "base_num_kv_heads": 4}
RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 0.5,
    "per_device_batch_size_increment": 0.25,
    "global_rampup_samples": 24,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def keys_of(folder, corpus, **changes):
    keys = {
        "base_output_directory": folder.parent,
        "dataset_path": corpus,
        "steps": STEPS,
        "checkpoint_period": 1,
        "max_num_checkpoints_to_keep": -1,
        "dropout_rate": 0.1,
    }
    return {**keys, **MESH, **RAMP, **changes}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The folder of a run with a checkpoint after each step, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    runs.run_here(**keys_of(folder, corpus))
    return folder


def killed_after(step, whole, tmp_path):
    """The run's folder as it was when the checkpoint of `step` was the last."""
    folder = shutil.copytree(whole, tmp_path / "run")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / str(later))
    return folder


def meta_of(folder, step):
    return json.loads((folder / "checkpoints" / str(step) / "meta" / "metadata").read_text())["meta"]


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 3, 5, 6))])
def test_a_run_killed_at_any_size_goes_on_as_if_nothing_had_happened(step, whole, corpus, tmp_path, capsys):
    folder = killed_after(step, whole, tmp_path)
    runs.run_here(**keys_of(folder, corpus))
    assert f"resumed from step {step}" in capsys.readouterr().out
    assert runs.losses(folder) == runs.losses(whole)
    assert runs.bits(runs.saved_arrays(folder, STEPS)) == runs.bits(runs.saved_arrays(whole, STEPS))
    assert meta_of(folder, STEPS) == meta_of(whole, STEPS)
    assert meta_of(whole, step)["rows_taken"] == sum(SIZES[:step])


@pytest.mark.long
def test_on_another_mesh_it_goes_on_with_the_same_rows(whole, corpus, tmp_path):
    folder = killed_after(4, whole, tmp_path)
    mesh = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "ici_context_parallelism": 4}
    runs.run_here(**keys_of(folder, corpus, **mesh))
    np.testing.assert_allclose(*(np.array(runs.losses(each)) for each in (folder, whole)), rtol=1e-4)
    for step in range(5, STEPS + 1):
        ours, theirs = (runs.saved_arrays(each, step)["data_position"] for each in (folder, whole))
        np.testing.assert_array_equal(ours, theirs)


def test_the_header_has_the_ramp_and_each_step_the_tokens_of_its_size(whole):
    facts = json.loads((whole / "environment.json").read_text())
    ramp = "4 rows to step 3, 6 rows to step 5, 8 from step 6 on, after 24 rows"
    assert facts["batch ramp"] == ramp
    assert facts["step"] == "8 rows x 64 = 512 tokens"
    tokens = [line["tokens_per_second"] * line["step_time_seconds"] for line in runs.lines(whole)]
    np.testing.assert_allclose(tokens, [size * T for size in SIZES])


def test_updates_are_those_of_sgd_by_hand_on_the_rows_of_a_run_without_a_ramp(corpus, tmp_path):
    """With two micro-batches a step; the batches are of 8, 8, 12, 12 and then 16 rows."""
    rate = 0.3
    sgd = {"opt_type": "sgd", "learning_rate": rate, "warmup_steps_fraction": 0, "learning_rate_final_fraction": 1}
    sgd |= {"adam_weight_decay": 0, "gradient_clipping_threshold": 0, "dropout_rate": 0, "checkpoint_period": 5}
    sizes = {"gradient_accumulation_steps": 2, "global_rampup_samples": 32}
    keys = keys_of(tmp_path / "run", corpus, steps=5, **sgd, **sizes)
    result = runs.run_here(**keys)

    config = resolve_config.load(runs.arguments(**keys))
    inputs = InputSpec.of(config, ByteTokenizer())
    batches = train_batches(inputs, open_sources(inputs, config.evaluation)[0], range(16), 16)
    rows = [next(batches).arrays for _ in range(4)]
    batches.close()
    rows = {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}
    one = resolve_config.load(runs.arguments(devices=1, **{k: v for k, v in keys.items() if not k.startswith("ici_")}))
    plan = plan_step(one, make_layout(one.mesh, jax.devices()[:1]))
    weights = plan.init_weights()

    @jax.jit
    def loss_and_gradient(weights, batch):
        def loss(trainable):
            model = plan.decoder(Weights(trainable, weights.frozen, weights.stats))
            hidden, context, _ = hidden_states(model, batch, plan)
            log_probs = jax.nn.log_softmax(model.logits(hidden, context), axis=-1)
            of_targets = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
            return -jnp.sum(of_targets * batch["loss_mask"]) / jnp.sum(batch["loss_mask"])

        return jax.value_and_grad(loss)(weights.trainable)

    losses = []
    for first, last in ((0, 8), (8, 16), (16, 28), (28, 40), (40, 56)):
        loss, gradient = loss_and_gradient(weights, {name: array[first:last] for name, array in rows.items()})
        trainable = jax.tree.map(lambda w, g: w - rate * g, weights.trainable, gradient)
        weights = Weights(trainable, weights.frozen, weights.stats)
        losses.append(loss.item())
    np.testing.assert_allclose([loss for _, loss in runs.losses(tmp_path / "run")], losses, rtol=1e-5)
    updated, expected = (by_path(jax.device_get(each.trainable)) for each in (result.state.weights, weights))
    for name, weight in expected.items():
        np.testing.assert_allclose(updated[name], weight, rtol=1e-4, atol=1e-6, err_msg=str(name))


def test_the_remaining_time_is_reckoned_by_rows(capsys):
    clock = iter([0.0, 2.0])
    printer = StepPrinter(4, rows_before=[0, 1, 3, 7, 15].__getitem__)
    printer._clock = lambda: next(clock)
    entry = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "step_time_seconds": 1, "tokens_per_second": 1}
    for step in (1, 2):
        printer.train({"step": step, **entry})
    # Two rows in two seconds, and twelve to come.
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 0:12")


# ---- What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_device_batch_size_start": 0.125, "per_device_batch_size_increment": 0.875},
            "per_device_batch_size_start=0.125 on 8 devices is 1 rows a micro-batch, which does not divide into 2",
        ),
        (
            {"per_device_batch_size_increment": 0.125},
            "per_device_batch_size_start + 1 x per_device_batch_size_increment=0.625 on 8 devices is 5 rows",
        ),
        (
            {"per_device_batch_size_start": 1},
            "per_device_batch_size_start=1 does not grow to per_device_batch_size=1 by ",
        ),
        ({"per_device_batch_size_increment": 0.2}, "let the increment divide the difference"),
        ({"pgle": "collect"}, "pgle=collect is for one program, but enable_rampup_batch_size has one for each size"),
        ({"enable_rampup_batch_size": False}, "has no effect: it needs enable_rampup_batch_size=true"),
        (
            {"ici_pipeline_parallelism": 2, "ici_tensor_parallelism": 2, "base_num_decoder_layers": 2},
            "per_device_batch_size_increment=0.75 on 8 devices is 6 rows, which do not divide into 2 micro-batches of "
            "the pipeline",
        ),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_before_the_run(changes, message, corpus, tmp_path, monkeypatch, capsys):
    keys = keys_of(tmp_path / "run", corpus, **changes)
    assert message in runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert not (tmp_path / "run").exists()


def test_train_dpo_refuses_it():
    with pytest.raises(UserError, match=r"src.train_dpo does not support .*enable_rampup_batch_size=true"):
        train_dpo.main(["configs/quickstart.yml", "enable_rampup_batch_size=true"])


def test_another_ramp_in_mid_run_is_refused_until_it_is_accepted(whole, corpus, tmp_path, monkeypatch, capsys):
    folder = killed_after(4, whole, tmp_path)
    keys = keys_of(folder, corpus, global_rampup_samples=48)
    message = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert "batch ramp: 4 rows in 3 steps, 6 rows in 2 steps -> 4 rows in 6 steps, 6 rows in 4 steps" in message
    assert "accept_changes=[enable_rampup_batch_size]" in message
    without = {key: value for key, value in keys.items() if key not in RAMP}
    runs.run_here(**without, accept_changes="[enable_rampup_batch_size]")
    assert [step for step, _ in runs.losses(folder)] == list(range(1, STEPS + 1))
    # Each of the eight streams goes on from its own place.
    assert meta_of(folder, STEPS)["rows_taken"] == (STEPS - 4) * 8
