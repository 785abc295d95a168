"""The roofline against arithmetic by hand, and its predictions against what was published."""

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from src.extras.aot.hlo import Collective
from src.extras.aot.roofline import Work, layer_share, predict, product_widths, step_work, work_of
from src.model.execution import Execution
from src.model.flops import FlopsPerToken, flops_per_token
from src.run import resolve_config
from src.step.trace import trace_train_step
from tests.tiny import BASE, LENGTH, load, make, spec_of

CHIP = SimpleNamespace(memory_bandwidth=1e12, ici_bandwidth=1e11, dcn_bandwidth=1e9)
PEAK = 1e14
WORK = Work(FlopsPerToken(3e14, 4e14), FlopsPerToken(1e14, 2e14), whole_scores=False, memory_bytes=1e12)


def sent(network, bytes_, links=1.0, times=1):
    return Collective("all-gather", ("fsdp",), network, times, bytes_, bytes_, links)


def test_each_resource_by_itself():
    moved = [sent("ici", 1e10, links=0.5, times=5), sent("ici", 2e10), sent("dcn", 3e8)]
    prediction = predict(WORK, CHIP, PEAK, moved)
    # 4e14 operations at 85% of 1e14 per second, 1e12 bytes at 90% of 1e12; 5e10 bytes over half of the links.
    assert prediction.compute_seconds == pytest.approx(4 / 0.85)
    assert prediction.memory_seconds == pytest.approx(1 / 0.9)
    assert prediction.ici_seconds == pytest.approx(1.0 + 0.2)
    assert prediction.dcn_seconds == pytest.approx(0.3)
    # Half of the communication is hidden.
    assert prediction.step_seconds == pytest.approx(4 / 0.85 + 1 / 0.9 + 1.5 / 2)
    assert prediction.bound == "compute"
    assert prediction.mfu == pytest.approx(3 / prediction.step_seconds)
    assert prediction.mfu_palm == pytest.approx(4 / prediction.step_seconds)


def test_scores_that_are_masked_cost_time_where_the_kernel_computes_them():
    whole = WORK._replace(whole_scores=True)
    assert predict(whole, CHIP, PEAK, []).compute_seconds == pytest.approx(6 / 0.85)


def test_a_step_is_never_shorter_than_its_communication():
    prediction = predict(WORK, CHIP, PEAK, [sent("dcn", 1e12)])
    assert prediction.bound == "dcn"
    assert prediction.step_seconds >= prediction.dcn_seconds == pytest.approx(1000)


def test_what_a_step_asks_of_a_device_is_its_share_of_the_mesh():
    """Eight devices share one device's products; those that share tokens each hold what is as wide as the embedding."""
    keys = {"remat_policy": "full", "num_vocab_tiling": 2}
    many = load(per_device_batch_size=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2, **keys)
    shared = work_of(trace_train_step(many, jax.devices()))
    whole = work_of(trace_train_step(load(per_device_batch_size=8, **keys), jax.devices()[:1]))
    assert shared.model_flops.palm * 8 == whole.model_flops.palm
    assert shared.recomputed_flops.causal * 8 == whole.recomputed_flops.causal
    assert whole.memory_bytes / 8 < shared.memory_bytes < whole.memory_bytes / 2
    assert whole.whole_scores  # dot_product, the kernel of CPUs


def test_what_is_computed_again_moves_through_memory_again():
    spec = spec_of(load())
    arguments = {"tokens": 64, "length": 16, "sharing": 1, "state_bytes": 0}
    kept = step_work(spec, Execution(remat_policy="none"), "flash", **arguments)
    again = step_work(spec, Execution(remat_policy="full"), "flash", **arguments)
    scores = step_work(spec, Execution(remat_policy="none"), "dot_product", **arguments)
    # Of 2 layers: 6 arrays of 32, queries and values of 4 and 2 heads of 8, twice, 3 of 64 hidden units...
    widths = 2 * (6 * 32 + (4 + 2) * 2 * 8 + 3 * 64)
    assert again.memory_bytes - kept.memory_bytes == 2 * 64 * widths * 4
    # ... and two of 16 keys for each of 4 heads.
    assert scores.memory_bytes - kept.memory_bytes == 5 * 64 * 2 * (2 * 4 * 16) * 4


@pytest.fixture(scope="module")
def published():
    """scripts/evidence/predict_published.py"""
    path = Path(__file__).parents[2] / "scripts" / "evidence" / "predict_published.py"
    spec = importlib.util.spec_from_file_location("predict_published", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_predictions_are_near_what_was_published(published):
    """Every cell, by the same constants; more slices are never predicted faster."""
    rows = list(published.predicted())
    assert len(rows) == 46
    assert published.median_error(rows) < 4
    for fewer, more in pairwise(rows):
        if more.run == fewer.run:
            assert more.slices > fewer.slices
            assert more.predicted <= fewer.predicted


# GB that a device sends in programs that XLA's TPU compiler made (jax 0.10.2), read by `collectives`.
COMPILED = [
    # 16B, 2 x v5e-256. Between slices it sums gradients on every device, for each to keep its part of them, which
    # sends twice what a reduce-scatter does; on one slice it scatters.
    (
        {"global_parameter_scale": 16, "per_device_batch_size": 6, "remat_policy": "full"},
        {"data": 1, "fsdp": 256, "tensor": 1},
        2,
        {("all-gather", "fsdp"): 62.69, ("all-reduce", "fsdp"): 63.08, ("all-reduce", "data"): 0.1248},
    ),
    # 32B, v5p-128. Gathers and scatters of weights that are fused with products send 17 parts for 15: left out.
    (
        {"global_parameter_scale": 32, "per_device_batch_size": 1, "remat_policy": "minimal"},
        {"data": 1, "fsdp": 16, "tensor": 4},
        1,
        {("all-reduce", "tensor"): 26.17},
    ),
]


@pytest.mark.parametrize(("keys", "mesh", "slices", "compiled"), COMPILED)
def test_the_closed_form_is_what_compiled_programs_move(published, keys, mesh, slices, compiled):
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in keys.items())])
    execution = Execution(remat_policy=config.step.remat_policy)
    tokens = config.batch.per_device_batch_size * 2048
    moved = published.step_collectives(spec_of(config), execution, tokens, mesh, {}, slices)
    sums = dict.fromkeys(compiled, 0.0)
    for each in moved:
        kind, times = (each.kind, 1) if each.kind != "reduce-scatter" or slices == 1 else ("all-reduce", 2)
        if (kind, each.axes[0]) in sums:
            sums[kind, each.axes[0]] += times * each.times * each.sent_bytes / 1e9
    assert sums == pytest.approx(compiled, rel=0.01)


def test_products_in_8_bits_take_the_time_of_their_own_peak():
    """In a model whose layers' weights make all operations but a known part, half of them in 8 bits."""
    work = WORK._replace(model_flops=FlopsPerToken(3e14, 4e14, 2e14), low_precision=0.5)
    wide = predict(work, CHIP, PEAK, []).compute_seconds
    assert wide == predict(WORK, CHIP, PEAK, []).compute_seconds
    assert predict(work, CHIP, PEAK, [], 2 * PEAK).compute_seconds == pytest.approx(wide * (4 - 0.5) / 4)


@pytest.mark.parametrize(("kind", "gradients"), [("int8", 2), ("fp8", 1)])
def test_what_is_rounded_moves_through_memory(kind, gradients):
    """Read twice and written as codes, in float32 and 8 bits: inputs once or twice, and gradients of outputs."""
    _, plan = make(quantization=kind, quantization_exclude="[output,attention.out]")
    arguments = {"tokens": 64, "length": 16, "sharing": 1, "state_bytes": 0}
    for policy, times in (("none", 1), ("full", 2)):
        execution = Execution(remat_policy=policy)
        wide = step_work(plan.spec, execution, "flash", **arguments)
        rounded = step_work(plan.spec, execution, "flash", **arguments, quantization=plan.quantization)
        # Of 2 layers: what query, key and value take, and wi and wo; what these make, of 4, 2 and 2 heads of 8, ...
        taken, made = 2 * (32 + 32 + 64), 2 * (8 * 8 + 2 * 64 + 32)
        assert rounded.memory_bytes - wide.memory_bytes == 64 * (times * taken + gradients * made) * (4 + 4 + 1)
        assert 0 < rounded.low_precision < 1


def test_what_experts_take_is_rounded_for_each():
    _, plan = make(quantization="int8", num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=24)
    experts = {("feed_forward", "wi"), ("feed_forward", "wo")}
    assert product_widths(plan.spec, experts) == (2 * 2 * (32 + 24), 2 * 2 * (2 * 24 + 32))


def test_the_share_in_8_bits_is_of_what_a_token_meets():
    _, plan = make(quantization="int8", quantization_exclude="[output,attention.*]")
    attention, feed_forward = 32 * 8 * (4 + 2 + 2) + 4 * 8 * 32, 32 * 2 * 64 + 64 * 32
    share = layer_share(plan.spec, {path[3:] for path in plan.quantization.matmuls})
    assert share == feed_forward / (attention + feed_forward)
    tokens = flops_per_token(plan.spec, LENGTH)
    assert tokens.layers == 6 * 2 * (attention + feed_forward)
