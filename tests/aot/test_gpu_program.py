"""The step's program for GPUs that are not here: what computes its products, and what its schedule hides."""

import re
from collections import Counter
from functools import cache

import pytest

from scripts.evidence.program_stats import statistics
from src.extras.aot.devices import abstract_devices
from src.extras.aot.replay import replay
from src.extras.aot.report import gpu_rates
from src.extras.aot.topology import parse_topology
from src.run import resolve_config
from src.step.compiler_flags import compiler_options
from src.step.trace import trace_train_step
from tests.compilers import NO_AUTOTUNING, SMALL, needs_cuda
from tests.tiny import BASE

pytestmark = needs_cuda
LAYERS = 6
SIZES = (*SMALL, f"base_num_decoder_layers={LAYERS}", "remat_policy=minimal_with_context", "dcn_fsdp_parallelism=2")


@cache
def compiled(flags):
    """A step of two hosts of H100s whose weights are sharded over all: its program's text, mesh and chip."""
    return compiled_for(parse_topology("a3", 2), flags, *SIZES, "dcn_data_parallelism=1")


def compiled_for(topology, flags, *keys):
    devices = abstract_devices(topology)
    config = resolve_config.load([BASE, *keys, "dataset_type=synthetic"])
    traced = trace_train_step(
        config, devices, {**compiler_options(flags, devices[0], topology.slices), **NO_AUTOTUNING}
    )
    return traced.jax_traced.lower().compile().as_text(), traced.plan.layout.mesh, topology.chip


def products(flags):
    """How often a step runs the products of each kind."""
    text, mesh, chip = compiled(flags)
    found = Counter()
    for each in statistics(text, mesh, chip.kind)["matmuls"]:
        found[each["kind"].partition(":")[0]] += each["executions"]  # of each kind in every pair of dtypes
    return found


def replayed(flags):
    text, mesh, chip = compiled(flags)
    return replay(text, mesh, chip, gpu_rates(chip.kind, "default", None))


# q, k, v, out, the two factors of the feed-forward and its output; the logits. Each forward, and two gradients; but XLA
# joins small ones of one operand: q, k and v, the two factors, and the gradients of their weights. None is computed
# again: with xla_gpu_enable_dynamic_slice_fusion, a matmul whose output is saved for the backward pass would be.
PRODUCTS = (3 * 7 - 2 * (2 + 1)) * LAYERS + 3


@pytest.mark.parametrize("flags", [pytest.param("", marks=pytest.mark.long), "auto"])
def test_every_product_is_cublas(flags):
    """Without a device nothing tunes XLA's own kernels."""
    assert products(flags) == {"__cublas$lt$matmul": PRODUCTS}


def test_attention_skips_what_comes_later_in_packed_rows_too():
    assert set(re.findall(r'"mask_type": ?"(\w+)"', compiled("auto")[0])) == {"CAUSAL", "PADDING_CAUSAL"}


def test_attentions_time_is_that_of_one_list_of_segments_and_not_of_many_segments_or_the_mask():
    text, mesh, chip = compiled_for(parse_topology("a3:1", 1), "", *SMALL, "max_target_length=1024")

    def seconds(branch):
        """With one branch of attention's choice in place of all three."""
        branches = r"branch_computations=\{(%\S+), (%\S+), (%\S+)\}"
        changed, count = re.subn(branches, rf"branch_computations={{\g<{branch}>, \g<{branch}>, \g<{branch}>}}", text)
        assert count >= 2, "forward and backward"
        return replay(changed, mesh, chip, gpu_rates(chip.kind, "default", None)).compute_seconds

    chosen = replay(text, mesh, chip, gpu_rates(chip.kind, "default", None)).compute_seconds
    one, by_length, in_pieces = map(seconds, (1, 2, 3))
    assert chosen == one
    assert one < by_length
    assert one != in_pieces


@pytest.mark.long
def test_a_user_may_ask_for_xlas_own_kernels():
    assert products("--xla_gpu_enable_triton_gemm=true") == {"triton gemm fusion": PRODUCTS}


@pytest.mark.long
def test_the_preset_hides_communication_that_is_seen_without_it():
    plain, preset = replayed(""), replayed("auto")
    assert preset.communication_seconds == pytest.approx(plain.communication_seconds, rel=0.02)  # the same is sent
    assert preset.exposed_seconds < 0.95 * plain.exposed_seconds  # 0.82 of it with JAX 0.10, 0.91 with 0.11


def test_gradients_of_unrolled_layers_are_stacked_once():
    """Not in each of the optimizer's kernels, which then took 170 of a step's 410 ms on an H200."""
    text, _, _ = compiled_for(parse_topology("a3:1", 1), "", *SMALL, "scan_layers=false")
    computations = re.split(r"\n(?=%|ENTRY)", text)
    stacks = [each for each in computations if re.search(r"f32\[2,256,\S* concatenate\(", each)]
    assert stacks
    assert not [each for each in stacks if " reduce(" in each]
