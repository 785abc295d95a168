"""Changes that make a step fit: their estimates beside traced and compiled steps of the changed configs."""

import itertools

import jax
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.memory import memory
from src.extras.aot.topology import parse_topology
from src.extras.plan import advice
from src.extras.plan.advice import changes
from src.extras.plan.estimate import absent_step, estimate_memory
from src.step.trace import trace_train_step
from tests.compilers import needs_libtpu
from tests.runs import build_once
from tests.tiny import TINY, VOCAB, load

CPUS, ONE = parse_topology("cpu-8", 1), parse_topology("cpu-1", 1)
EVEN = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 4, "per_device_batch_size": 2}
LAYERS = TINY["base_num_decoder_layers"]
LATENT = {
    **{"attention_type": "mla", "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
PLENTY = 10**12
MUCH_STATE = {"remat_policy": "full", "base_mlp_dim": 512, "per_device_batch_size": 1}
PASSES = ("per_device_batch_size", "gradient_accumulation_steps")


def configured(**overrides):
    return load(**{**EVEN, **overrides})


def traced(config, devices=8):
    return build_once(config, jax.devices()[:devices], {})


def needed(config, topology=CPUS):
    return estimate_memory(absent_step(config, topology)).total


def offer(keys, config, total, capacity, topology=CPUS):
    """The first change of just these keys, or of one with this name."""
    for change in changes(config, topology, total, capacity):
        if tuple(change.keys) == keys or keys in change.keys:
            return change
    return None


def test_a_change_is_estimated_like_its_traced_step_and_scaled_like_the_compiled_one():
    config = configured(remat_policy="minimal", dtype="bfloat16")
    before = memory(traced(config))
    held = sum(before.arguments.values())
    halved = offer(PASSES, config, held + 3 * (before.total - held), PLENTY)
    assert halved.keys == {"per_device_batch_size": 1.0, "gradient_accumulation_steps": 2}
    step = traced(halved.config)
    after = memory(step)
    assert (step.rows, step.plan.accumulation.micro_batches) == (traced(config).rows, 2)
    assert halved.estimated == pytest.approx(held + 3 * (after.total - held), rel=0.05)


def test_no_estimate_is_below_the_arguments():
    config = configured(remat_policy="none", per_device_batch_size=8)
    # A compiler may need little beside the arguments.
    total = sum(memory(traced(config)).arguments.values()) + 1000
    found = list(itertools.islice(changes(config, CPUS, total, total - 1), 3))
    assert found
    for change in found:
        arguments = memory(traced(change.config)).arguments
        assert total > change.estimated >= arguments["weights"] + arguments["optimizer"]


@pytest.mark.parametrize(("vocab_size", "offered"), [(VOCAB, False), (8192, True)])
def test_what_is_not_live_at_the_peak_is_not_changed(vocab_size, offered):
    """The logits of the tiny vocabulary are small."""
    config = configured(remat_policy="full", vocab_size=vocab_size)
    found = changes(config, CPUS, needed(config), PLENTY)
    cheaper = itertools.takewhile(lambda change: tuple(change.keys) != PASSES, found)
    assert ({"num_vocab_tiling": 8} in [change.keys for change in cheaper]) == offered


def test_the_state_is_made_smaller_if_it_takes_most():
    config = configured(**MUCH_STATE)
    total = needed(config, ONE)
    rounded = offer("mu_dtype", config, total, total - 1, ONE)
    assert rounded.keys == {"mu_dtype": "bfloat16"}
    steps = [traced(each, 1).jax_traced.lower().compile() for each in (config, rounded.config)]
    before, after = (step.memory_analysis().argument_size_in_bytes for step in steps)
    assert total - rounded.estimated == before - after


@needs_libtpu
def test_each_of_two_slices_has_half_of_the_state():
    topology = parse_topology("v5e-1", 1)
    config = configured(**MUCH_STATE, compile_topology="v5e-1")
    total = needed(config, topology)
    more = next(one for one in changes(config, topology, total, total - 1) if "compile_topology_num_slices" in one.keys)
    assert more.keys["compile_topology_num_slices"] == 2
    two = parse_topology("v5e-1", 2)
    step = trace_train_step(more.config, abstract_devices(two))
    assert step.plan.layout.mesh.shape["fsdp"] == 2
    before, after = (estimate_memory(absent_step(*each)) for each in ((config, topology), (more.config, two)))
    assert after.arguments["weights"] == pytest.approx(memory(step).arguments["weights"], rel=0.01)
    # Norms are not sharded.
    assert after.arguments["weights"] == pytest.approx(before.arguments["weights"] / 2, rel=0.05)


def test_the_batch_of_a_pass_is_halved_until_it_fits():
    config = configured(per_device_batch_size=8, remat_policy="none")
    total = needed(config)
    found = offer(PASSES, config, total, total - 1)
    assert found.keys == {"per_device_batch_size": 4.0, "gradient_accumulation_steps": 2}
    found = offer(PASSES, config, total, found.estimated - 1)
    assert found.keys == {"per_device_batch_size": 2.0, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("axis", "rules"), [("context", {}), ("tensor", {"logical_axis_rules.norm_length": ["context", "tensor"]})]
)
def test_a_sequence_that_is_too_long_for_a_device_is_shared(axis, rules):
    """By its tokens, or by heads and then between blocks too; the step has the same sequences, in two passes."""
    config = configured(per_device_batch_size=1, remat_policy="full")
    total, key = needed(config), f"ici_{axis}_parallelism"
    change = offer(key, config, total, total - 1)
    passes = {"per_device_batch_size": 0.5, "gradient_accumulation_steps": 2}
    assert change.keys == {key: 2, **passes, **rules}
    before, after = traced(config), traced(change.config)
    assert after.batch["tokens"].shape == before.batch["tokens"].shape
    assert after.plan.layout.mesh.shape[axis] == 2
    kept = "kept for the backward pass"
    assert memory(after).temporaries[kept] == memory(before).temporaries[kept] / 2


@pytest.mark.parametrize(
    ("sizes", "offered"),
    [
        (
            {"ici_expert_parallelism": -1, "ici_fsdp_parallelism": 4},
            {"ici_expert_parallelism": 4, "ici_fsdp_parallelism": -1},
        ),
        ({"ici_data_parallelism": -1, "ici_fsdp_parallelism": 1}, {"ici_expert_parallelism": 2}),
    ],
)
def test_an_axis_that_takes_the_rest_is_still_a_number_of_devices(sizes, offered):
    """If another one takes the rest, it takes what experts leave."""
    experts = {"num_experts": 8, "base_moe_mlp_dim": 512, "weight_dtype": "bfloat16"}
    config = configured(**experts, **sizes, opt_type="sgd")
    total = needed(config)
    change = offer("ici_expert_parallelism", config, total, total - 1)
    assert change.keys == offered
    mesh = traced(change.config).plan.layout.mesh.shape
    assert mesh["expert"] == offered["ici_expert_parallelism"]
    assert mesh["expert"] * max(mesh["fsdp"], mesh["data"]) == 8


def test_keys_of_fewer_heads_than_devices_are_copied():
    config = configured(per_device_batch_size=1, base_num_kv_heads=1)
    total = needed(config)
    change = offer("ici_tensor_parallelism", config, total, total - 1)
    assert change.keys["logical_axis_rules.kv_heads"] == []
    assert memory(traced(change.config)).total < memory(traced(config)).total


def test_devices_that_share_heads_share_the_tokens_between_blocks_too():
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    config = configured(**mesh, remat_policy="full")
    total = needed(config)
    change = offer("logical_axis_rules.norm_length", config, total, total - 1)
    assert change.keys == {"logical_axis_rules.norm_length": ["context", "tensor"]}
    before, after = (memory(traced(each)).temporaries["kept for the backward pass"] for each in (config, change.config))
    assert after == before / 2
    config = configured(**mesh, remat_policy="full", logical_axis_rules__norm_length="[context, tensor]")
    first = next(changes(config, CPUS, needed(config), needed(config) - 1))
    assert "logical_axis_rules.norm_length" not in first.keys


def test_experts_whose_weights_are_gathered_stay_on_their_devices():
    """Over eight devices a device gathers none of its part; the batch is the same."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 512}
    config, apart = configured(**experts), configured(**experts, ici_expert_parallelism=8)
    change = offer("ici_expert_parallelism", config, needed(config), needed(apart))
    assert change.keys == {"ici_expert_parallelism": 8}
    step = traced(change.config)
    # The exchange's buffers are estimated.
    assert change.estimated == pytest.approx(memory(step).total, rel=0.15)
    assert step.rows == traced(config).rows


def test_weights_of_which_each_device_has_a_copy_are_sharded():
    config = load(**LATENT, logical_axis_rules__latent="[]")
    total = needed(config)
    change = offer("logical_axis_rules.latent", config, total, total - 1)
    assert list(change.keys) == ["logical_axis_rules.latent"]
    whole, sharded = (memory(traced(each)).arguments["weights"] for each in (config, change.config))
    down, up = (LATENT[rank] * TINY["base_num_query_heads"] for rank in ("q_lora_rank", "kv_lora_rank"))
    assert whole - sharded == LAYERS * 4 * 7 / 8 * (down * (8 + 4) + up * (8 + 8))


def test_what_no_change_makes_fit_fits_with_shorter_sequences():
    config = configured(per_device_batch_size=1, max_target_length=1024)
    total = needed(config)
    first, *_, last = changes(config, CPUS, total, total // 20)
    assert first.cost == "all of these"
    assert {"ici_context_parallelism", "ici_tensor_parallelism"} & first.keys.keys()
    assert last.keys["max_target_length"] == 128
    assert last.estimated <= total // 20
    state = sum(memory(traced(config)).arguments.values())
    *_, last = changes(config, CPUS, total, state // 2)
    assert last.cost == "all of these", "shorter sequences help no state that is too large"


def test_tiles_divide_a_sequence():
    config = configured(max_target_length=12, vocab_size=8192)
    assert offer("num_vocab_tiling", config, needed(config) + 10**6, PLENTY).keys == {"num_vocab_tiling": 4}


def test_changes_are_compiled_until_one_fits(monkeypatch, capsys):
    config = configured()
    tried = [advice.Change({"remat_policy": policy}, policy, config, 60) for policy in ("a", "b", "c", "d")]
    monkeypatch.setattr(advice, "changes", lambda *arguments: iter(tried))
    answers = {"a": None, "b": {"needed": 70, "fits": False}, "c": {"needed": 40, "fits": True}}
    found = advice.advise(config, CPUS, 90, 50, lambda config, keys: answers[keys["remat_policy"]])
    listed = [(each["cost"], each["estimated"], each["compiled"], each["fits"]) for each in found]
    assert listed == [("c", 60, 40, True), ("b", 60, 70, False)]
    assert "compiling with remat_policy=c, estimated at 60 B" in capsys.readouterr().out
