"""The roofline against arithmetic by hand."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from src.extras.aot.hlo import Collective
from src.extras.aot.roofline import (
    Constants,
    Operations,
    Work,
    computed_keys,
    constants_of,
    operations,
    predict,
    product_widths,
    step_work,
    work_of,
)
from src.extras.aot.topology import parse_topology
from src.extras.plan.estimate import step_costs
from src.model.attention_kernels.scores import ScoreSpec
from src.model.execution import Execution
from src.model.flops import FlopsPerToken
from src.step.trace import trace_train_step
from tests.tiny import LENGTH, load, make, spec_of

CHIP = SimpleNamespace(kind="some GPU", memory_bandwidth=1e12, ici_bandwidth=1e11, dcn_bandwidth=1e9)
PEAK = 1e14
WORK = Work(FlopsPerToken(3e14, 4e14), FlopsPerToken(1e14, 2e14), Operations(4e14), memory_bytes=1e12)
HALVES = Constants(
    matmul=0.5, low_precision=0.5, experts=0.5, attention=0.25, memory=0.5, rounding=0.5, exposed=0.5, blocking=0.75,
    narrow=100.0, waiting=0.1,
)  # fmt: skip


def sent(network, bytes_, links=1.0, times=1, asynchronous=True):
    return Collective("all-gather", ("fsdp",), network, times, bytes_, bytes_, links, asynchronous=asynchronous)


def test_each_resource_by_itself():
    moved = [sent("ici", 1e10, links=0.5, times=5), sent("ici", 2e10, asynchronous=False), sent("dcn", 3e8)]
    prediction = predict(WORK, CHIP, PEAK, moved, constants=HALVES)
    # 4e14 operations at half of 1e14 per second, 1e12 bytes at half of 1e12; 5e10 bytes over half of the links.
    assert prediction.compute_seconds == pytest.approx(4 / 0.5)
    assert prediction.memory_seconds == pytest.approx(1 / 0.5)
    assert prediction.ici_seconds == pytest.approx(1.0 + 0.2)
    assert prediction.dcn_seconds == pytest.approx(0.3)
    # Half of the weights' communication is hidden, and a quarter of what the next matmul waits for.
    assert prediction.step_seconds == pytest.approx(8 + 2 + 1.3 * 0.5 + 0.2 * 0.75)
    assert prediction.bound == "compute"
    assert prediction.mfu == pytest.approx(3 / prediction.step_seconds)
    assert prediction.mfu_palm == pytest.approx(4 / prediction.step_seconds)


@pytest.mark.parametrize(
    ("operations", "seconds"),
    [
        (Operations(0, low=2e14), 2 / 2 / 0.5 / 0.5),  # at twice the peak
        (Operations(0, experts=1e14), 1 / 0.5 / 0.5),
        (Operations(0, attention=1e14), 1 / 0.25 / 0.5),
        (Operations(1e14, narrow=1e12), 2 / 0.5),  # 1 / m + 1 / k + 1 / n is a hundredth
        (Operations(0, low=2e14, narrow_low=2e12), 2 * 2 / 2 / 0.5 / 0.5),
    ],
)
def test_operations_take_as_long_as_what_computes_them(operations, seconds):
    work = WORK._replace(operations=operations)
    assert predict(work, CHIP, PEAK, [], 2 * PEAK, HALVES).compute_seconds == pytest.approx(seconds)


def test_a_pipeline_idles_and_rounding_is_partly_fused():
    work = WORK._replace(bubble=0.2, rounding_bytes=1e12)
    prediction = predict(work, CHIP, PEAK, [], constants=HALVES)
    assert prediction.compute_seconds == pytest.approx(8 / 0.8)
    assert prediction.memory_seconds == pytest.approx(1.5 / 0.5)


def test_a_job_waits_for_the_slowest_of_its_slices():
    one, eight = (predict(WORK, CHIP, PEAK, [], constants=HALVES, slices=n).step_seconds for n in (1, 8))
    assert eight == pytest.approx(one * 1.3)


def test_a_step_is_never_shorter_than_its_communication():
    prediction = predict(WORK, CHIP, PEAK, [sent("dcn", 1e12)], constants=HALVES)
    assert prediction.bound == "dcn"
    assert prediction.step_seconds >= prediction.dcn_seconds == pytest.approx(1000)


def test_chips_without_published_runs_have_their_platforms_constants():
    assert constants_of("TPU v5").matmul != constants_of("TPU v5 lite").matmul
    assert constants_of("TPU v5")._replace(matmul=0) == constants_of("TPU v99")._replace(matmul=0)
    assert constants_of("NVIDIA L40S") == constants_of("some GPU")


def test_what_a_step_asks_of_a_device_is_its_share_of_the_mesh():
    """Eight devices share one device's products; those that share tokens each hold what is as wide as the embedding."""
    keys = {"remat_policy": "full", "num_vocab_tiling": 2}
    many = load(per_device_batch_size=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2, **keys)
    shared = work_of(trace_train_step(many, jax.devices()))
    whole = work_of(trace_train_step(load(per_device_batch_size=8, **keys), jax.devices()[:1]))
    assert shared.model_flops.palm * 8 == whole.model_flops.palm
    assert shared.recomputed_flops.causal * 8 == whole.recomputed_flops.causal
    assert whole.memory_bytes / 8 < shared.memory_bytes < whole.memory_bytes / 2
    # dot_product, the kernel of CPUs, computes all scores: the operations are those of PaLM's count.
    assert sum(whole.operations[:4]) == pytest.approx(whole.model_flops.palm + whole.recomputed_flops.palm)


def test_shared_layers_read_their_weights_as_often_as_layers_apart():
    experts = "{num_experts: 8, base_moe_mlp_dim: 64}"
    moved = []
    for shared in ("true", "false"):
        segments = f"[{{repeats: 4, shared: {shared}, pattern: [{experts}]}}]"
        mesh = {"ici_expert_parallelism": 8, "ici_fsdp_parallelism": 1}
        _, plan = make(8, base_num_decoder_layers=4, decoder_segments=segments, **mesh)
        work = step_work(plan.spec, plan.execution, plan.kernel, plan.layout, tokens=128, length=LENGTH, state_bytes=0)
        moved.append(work.memory_bytes)
    assert moved[0] == moved[1]


def test_what_is_computed_again_moves_through_memory_again():
    spec = spec_of(load())
    arguments = {"layout": make()[1].layout, "tokens": 64, "length": 16, "state_bytes": 0}
    kept = step_work(spec, Execution(remat_policy="none"), "flash", **arguments)
    again = step_work(spec, Execution(remat_policy="full"), "flash", **arguments)
    scores = step_work(spec, Execution(remat_policy="none"), "dot_product", **arguments)
    # Of 2 layers: 6 arrays of 32, queries and values of 4 and 2 heads of 8, twice, 3 of 64 hidden units...
    widths = 2 * (6 * 32 + (4 + 2) * 2 * 8 + 3 * 64)
    assert again.memory_bytes - kept.memory_bytes == 2 * 64 * widths * 4
    # ... and two of 16 keys for each of 4 heads.
    assert scores.memory_bytes - kept.memory_bytes == 5 * 64 * 2 * (2 * 4 * 16) * 4


def test_operations_are_counted_by_what_computes_them():
    """A layer of experts with room for half more, in a model of known sizes, with blocks computed again."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "capacity_factor": 1.5}
    spec = spec_of(load(**experts))
    full = Execution(remat_policy="full")
    dense, low, of_experts, attention, narrow, _ = operations(spec, 16, full, 1, "dot_product", (), 64, 1)
    # Of 2 layers: query, key, value and output; the router; three products of two experts, the last not again.
    in_attention, router, wi, wo = 32 * 8 * (4 + 2 + 2 + 4), 32 * 4, 2 * 32 * 2 * 24, 2 * 24 * 32
    assert low == 0
    assert of_experts == pytest.approx(2 * 1.5 * (8 * wi + 6 * wo))
    assert dense == pytest.approx(2 * (8 * (in_attention + router)) + 6 * 32 * spec.vocab_size)
    assert attention == 2 * 4 * 2 * 4 * (8 + 8) * 16
    fewer = operations(spec, 16, full, 1, "dot_product", (), 32, 1).narrow
    # Half the rows: 1 / 64 more for dense matmuls, and for experts, which each get half of the rows, 2 / 64.
    assert fewer - narrow == pytest.approx((dense + 2 * of_experts) / 64)


def test_kernels_compute_whole_blocks():
    scores = ScoreSpec(num_heads=1, head_dim=64, value_dim=64, scale=1.0)
    assert computed_keys(scores, 8192, "dot_product") == 8192
    assert computed_keys(scores, 8192, "flash") == pytest.approx(8193 / 2 + 512)
    window = replace(scores, window=128)
    assert 128 + 256 <= computed_keys(window, 8192, "flash") <= 128 + 1024
    assert computed_keys(window, 8192, "cudnn_flash") < computed_keys(window, 8192, "flash")


CHUNKS = {"attention_type": "chunk", "chunk_attn_window_size": 1024}


@pytest.mark.parametrize(
    ("topology", "length", "keys", "expected"),
    [
        ("a3:1", 8192, {"head_dim": 128}, 4096.5 + 64),  # by segments, which need no mask
        ("a3:1", 8192, {"head_dim": 256, "packing": "false"}, 4096.5 + 64),
        ("a3:1", 2048, {"head_dim": 256}, 2048),  # one mask for the whole sequence
        ("a3:1", 8192, {"head_dim": 256}, 4096.5 + 512),  # a mask for each block of 1,024
        ("a100:1", 2048, {"head_dim": 128}, 2048),  # no segments before Hopper
        ("a3:1", 2048, {"head_dim": 256, "packing": "false", **CHUNKS}, 2048),
        ("a3", 8192, {"head_dim": 128, "ici_context_parallelism": 8}, 4096.5 + 256),  # 16 parts of 512
    ],
)
def test_attention_with_a_mask_counts_whole_blocks(topology, length, keys, expected):
    given = {"dtype": "bfloat16", "max_target_length": length, "remat_policy": "none"}
    config = load(base_num_query_heads=1, base_num_kv_heads=1, **given | keys)
    costs = step_costs(config, parse_topology(topology, 1))
    per_key = 2 * 3 * 2.0 * 2 * keys["head_dim"]  # 2 layers, forward and twice backward, scores and outputs
    devices = config.mesh.ici_context_parallelism
    assert costs.work.operations.attention == pytest.approx(costs.tokens_per_step / devices * per_key * expected)


@pytest.mark.parametrize(("kind", "gradients"), [("int8", 2), ("fp8", 1)])
def test_what_is_rounded_moves_through_memory(kind, gradients):
    """Read twice and written as codes, in float32 and 8 bits: inputs once or twice, and gradients of outputs."""
    _, plan = make(quantization=kind, quantization_exclude="[output,attention.out]")
    arguments = {"layout": plan.layout, "tokens": 64, "length": 16, "state_bytes": 0}
    for policy, times in (("none", 1), ("full", 2)):
        execution = Execution(remat_policy=policy)
        wide = step_work(plan.spec, execution, "flash", **arguments)
        rounded = step_work(plan.spec, execution, "flash", **arguments, quantization=plan.quantization)
        # Of 2 layers: what query, key and value take, and wi and wo; what these make, of 4, 2 and 2 heads of 8, ...
        taken, made = 2 * (32 + 32 + 64), 2 * (8 * 8 + 2 * 64 + 32)
        assert rounded.rounding_bytes == 64 * (times * taken + gradients * made) * (4 + 4 + 1)
        assert wide.operations.low == wide.rounding_bytes == 0 < rounded.operations.low < rounded.operations.dense * 99


def test_what_experts_take_is_rounded_for_each():
    _, plan = make(quantization="int8", num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=24)
    experts = {("feed_forward", "wi"), ("feed_forward", "wo")}
    assert product_widths(plan.spec, experts) == (2 * 2 * (32 + 24), 2 * 2 * (2 * 24 + 32))


def test_the_operations_in_8_bits_are_those_of_the_chosen_weights():
    _, plan = make(quantization="int8", quantization_exclude="[output,attention.*]")
    feed_forward = 32 * 2 * 64 + 64 * 32
    chosen = {path[3:] for path in plan.quantization.matmuls}
    counted = operations(plan.spec, LENGTH, Execution(), 1, "dot_product", chosen, 64, 1)
    assert counted.low == 6 * 2 * feed_forward
