"""What scripts/evidence/program_stats.py reads from programs whose products, collectives and copies are known."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scripts.evidence.program_stats import dumped_bundles, instructions, kernels, main, numbered_mesh, statistics
from src.extras.aot.devices import abstract_devices
from src.extras.aot.replay import COMPUTE_REACHED, MEMORY_REACHED, replay
from src.extras.aot.report import gpu_rates
from src.extras.aot.topology import parse_topology
from tests import runs
from tests.compilers import SMALL, needs_cuda, needs_libtpu

ROUNDS, ROWS, WIDTH = 3, 1024, 512


def mesh_of(topology):
    return Mesh(np.array(abstract_devices(parse_topology(topology, 1))), ("fsdp",), axis_types=(AxisType.Auto,))


def text_of(function, mesh, *arguments, flags=None):
    """The program of `function` of arguments (shape, dtype, the mesh axis of each dim)."""
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for shape, dtype, *axes in arguments
    ]
    return jax.jit(function).lower(*given).compile(flags).as_text()


@needs_libtpu
def test_a_loop_of_products_a_quantised_one_and_a_gather_on_a_tpu():
    mesh = mesh_of("v5e-8")

    def step(x, weights, small):
        x = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, weights)[0]
        whole = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
        return whole, jnp.dot(small, small, preferred_element_type=jnp.int32)

    x, weights = ((8 * ROWS, WIDTH), jnp.bfloat16, "fsdp"), ((ROUNDS, WIDTH, WIDTH), jnp.bfloat16)
    text = text_of(step, mesh, x, weights, ((256, 256), jnp.int8))
    result = statistics(text, mesh, "TPU v5 lite")
    assert {each["kind"].partition(": ")[2]: each["executions"] for each in result["matmuls"]} == {
        "bf16 x bf16 -> bf16": ROUNDS,
        "s8 x s8 -> s32": 1,
    }
    (gathered,) = result["collectives"]
    assert (gathered["kind"], gathered["dtype"], gathered["axes"]) == ("all-gather", "bf16", "fsdp")
    assert gathered["sent_bytes"] == 7 * ROWS * WIDTH * 2
    # No product takes less than its operations at the chip's stated peak.
    least = 2 * ROWS * WIDTH * WIDTH * ROUNDS / 197e12
    assert least <= result["seconds"]["matmuls"] < 10 * least
    (without_mesh,) = statistics(text, numbered_mesh(text), "")["collectives"]
    assert without_mesh["sent_bytes"] == gathered["sent_bytes"]


@needs_libtpu
def test_a_file_of_a_program_for_two_slices_has_what_they_send_each_other(tmp_path):
    """A sum over a dim that the slices share: each sends the other as many bytes as it has of the result."""

    def step(x, kernel):
        return x @ kernel

    devices = np.array(abstract_devices(parse_topology("v5e-8", 2))).reshape(2, 8)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    given = ((ROWS, WIDTH), jnp.bfloat16, "fsdp", "data"), ((WIDTH, WIDTH), jnp.bfloat16, "data")
    (tmp_path / "program").write_text(text_of(step, mesh, *given))
    main([str(tmp_path / "program"), "--topology", "v5e-8", "--slices", "2", "--json", str(tmp_path / "j")])
    sent = [each for each in json.loads((tmp_path / "j").read_text())["collectives"] if each["network"] == "dcn"]
    assert sum(each["sent_bytes"] for each in sent) == pytest.approx(ROWS // 8 * WIDTH * 2, rel=0.01)


@needs_libtpu
def test_a_product_laid_out_anew_is_a_copy_with_its_name_and_bytes():
    def step(x, kernel):
        with jax.named_scope("turned"):
            return jax.lax.optimization_barrier(x @ kernel).reshape(ROWS, 2, WIDTH)

    mesh = mesh_of("v5e-8")
    text = text_of(step, mesh, ((ROWS, WIDTH), jnp.bfloat16), ((WIDTH, 2 * WIDTH), jnp.bfloat16))
    copies = [each for each in statistics(text, mesh, "TPU v5 lite")["copies"] if each["bytes"] == ROWS * 2 * WIDTH * 2]
    assert copies
    assert "turned" in copies[0]["name"]


KERNEL = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %twice.1 = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %twice.2 = bf16[8,128]{1,0} custom-call(%twice.1), custom_call_target="tpu_custom_call"
}
"""


UPDATE = """HloModule jit_step, is_scheduled=true

%put (kept: bf16[80,128,8], new: bf16[8,128], at: s32[]) -> bf16[80,128,8] {
  %kept = bf16[80,128,8]{2,1,0} parameter(0)
  %new = bf16[8,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %turned = bf16[128,8]{1,0} transpose(%new), dimensions={1,0}
  %row = bf16[1,128,8]{2,1,0} bitcast(%turned)
  ROOT %updated = bf16[80,128,8]{2,1,0} dynamic-update-slice(%kept, %row, %at, %zero, %zero)
}

ENTRY %main (kept: bf16[80,128,8], new: bf16[8,128], at: s32[]) -> bf16[80,128,8] {
  %kept.1 = bf16[80,128,8]{2,1,0} parameter(0)
  %new.1 = bf16[8,128]{1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  ROOT %fusion = bf16[80,128,8]{2,1,0} fusion(%kept.1, %new.1, %at.1), kind=kLoop, calls=%put
}
"""


SLICED = """HloModule jit_step, is_scheduled=true

%sliced (all: bf16[6,256,512], at: s32[], x: bf16[1024,256]) -> (bf16[1024,512], s8[33554432]) {
  %all = bf16[6,256,512]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %x = bf16[1024,256]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %one = bf16[1,256,512]{2,1,0} dynamic-slice(%all, %at, %zero, %zero), dynamic_slice_sizes={1,256,512}
  %kernel = bf16[256,512]{1,0} bitcast(%one)
  ROOT %call = (bf16[1024,512]{1,0}, s8[33554432]{0}) custom-call(%x, %kernel), custom_call_target="TARGET", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}

ENTRY %main (all: bf16[6,256,512], at: s32[], x: bf16[1024,256]) -> (bf16[1024,512], s8[33554432]) {
  %all.1 = bf16[6,256,512]{2,1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %x.1 = bf16[1024,256]{1,0} parameter(2)
  ROOT %fusion = (bf16[1024,512]{1,0}, s8[33554432]{0}) fusion(%all.1, %at.1, %x.1), kind=kCustom, calls=%sliced
}
"""  # noqa: E501


def test_a_librarys_product_in_the_fusion_that_slices_its_operand_is_a_product():
    """As XLA of JAX 0.11 has the gradients of a scan's weights."""
    text, chip = SLICED.replace("TARGET", "__cublas$lt$matmul"), parse_topology("a3", 1).chip
    found = statistics(text, numbered_mesh(text), chip.kind)
    assert found["matmuls"] == [{"kind": "__cublas$lt$matmul: bf16 x bf16 -> bf16", "places": 1, "executions": 1}]
    peak = 1e9  # so slow that its operations take longer than its bytes
    replayed = replay(text, numbered_mesh(text), chip, {16: peak})
    assert replayed.compute_seconds == pytest.approx(2 * 1024 * 256 * 512 / peak / COMPUTE_REACHED)
    moved = replay(text, numbered_mesh(text), chip, {16: 1e18}).compute_seconds * chip.memory_bandwidth * MEMORY_REACHED
    assert moved == pytest.approx(2 * (256 * 512 + 1024 * 256 + 1024 * 512) + 4)  # its slice, and no scratch space


def test_a_matmul_takes_the_time_of_its_dtype_and_precision():
    text, chip = SLICED.replace("TARGET", "__cublas$lt$matmul"), parse_topology("a3", 1).chip
    for dtype, precision, rate in (
        ("bf16", "default", 989.4e12),  # H100 SXM: NVIDIA's white paper, dense
        ("f32", "default", 494.7e12),  # tensorfloat32
        ("f32", "highest", 66.9e12),
    ):
        slow = {bits: peak / 1e6 for bits, peak in gpu_rates(chip.kind, precision, None).items()}  # not bound by bytes
        replayed = replay(text.replace("bf16", dtype), numbered_mesh(text), chip, slow)
        assert replayed.compute_seconds == pytest.approx(2 * 1024 * 256 * 512 / (rate / 1e6) / COMPUTE_REACHED)


AT_ONCE = "ROOT %fusion = bf16[80,128,8]{2,1,0} fusion(%kept.1, %new.1, %at.1), kind=kLoop, calls=%put"
BESIDE = """%fusion-start = ((bf16[80,128,8]{2,1,0}, bf16[8,128]{1,0}, s32[]), bf16[80,128,8]{2,1,0}, u32[]) fusion-start(%kept.1, %new.1, %at.1), kind=kLoop, calls=%put
  ROOT %fusion-done = bf16[80,128,8]{2,1,0} fusion-done(%fusion-start)"""  # noqa: E501


@pytest.mark.parametrize("fusion", [AT_ONCE, BESIDE])  # as XLA of JAX 0.11 has many
def test_a_copy_into_a_larger_array_moves_its_own_bytes(fusion):
    text, chip = UPDATE.replace(AT_ONCE, fusion), parse_topology("a3", 1).chip
    (copy,) = statistics(text, numbered_mesh(text), "")["copies"]
    assert copy["bytes"] == 128 * 8 * 2
    seconds = replay(text, numbered_mesh(text), chip, {16: 1e15}).compute_seconds
    # Read once, written once, and where it goes.
    assert seconds * chip.memory_bandwidth * MEMORY_REACHED == pytest.approx(2 * 128 * 8 * 2 + 4)


def test_a_kernel_has_the_most_bundles_of_its_calls_as_they_were_compiled_last(tmp_path):
    for time, name, total in [(1, "twice.1", 900), (2, "twice.1", 300), (1, "twice.2", 400), (1, "fusion", 9)]:
        text = f"Schedule analysis:\n\ttotal scheduled bundles:    {total}\n\tempty scheduled bundles:    8\n"
        (tmp_path / f"{time}-{name}-71-schedule-analysis_final_bundles.txt").write_text(text)
    bundles = dumped_bundles(tmp_path)
    assert bundles == {"twice.1": 300, "twice.2": 400, "fusion": 9}
    (kernel,) = kernels(list(instructions(KERNEL)), bundles)
    assert (kernel["executions"], kernel["bundles"]) == (2, 400)


@needs_libtpu
@pytest.mark.long
def test_the_bundles_of_attention_are_as_many_as_its_products_take_at_least(tmp_path):
    """A process of its own, as libtpu reads flags once. Of 128 x 128 units a v5e has four: 2 x 512^2 x 128 a tile."""
    keys = [*SMALL, "head_dim=128", "max_target_length=512", "remat_policy=none", "compile_topology=v5e-1"]
    command = [sys.executable, "scripts/evidence/program_stats.py", "configs/base.yml", *keys]
    command += ["per_device_batch_size=1", "--bundles"]
    subprocess.run([*command, "--json", tmp_path / "j"], cwd=runs.ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "j").read_text())["kernels"]
    (forward,) = (kernel["bundles"] for kernel in found if "mha_fwd" in kernel["kind"])
    least = 2 * 512 * 512 * 128 / (4 * 128 * 128)
    assert least <= forward < 4 * least


@needs_cuda
@pytest.mark.long
def test_a_step_for_gpus_is_read_as_one_for_tpus_is(tmp_path):
    keys = [*SMALL, "head_dim=64", "max_target_length=128", "per_device_batch_size=1", "compile_topology=a3"]
    keeps = jax.config.jax_enable_compilation_cache
    try:
        main(["configs/base.yml", "--json", str(tmp_path / "j"), *keys, "compile_xla_flags=auto"])
    finally:
        jax.config.update("jax_enable_compilation_cache", keeps)
    found = json.loads((tmp_path / "j").read_text())
    assert found["memory"].keys() == {"arguments", "temporaries", "at once"}
    assert any(product["kind"].startswith("__cublas$lt$matmul") for product in found["matmuls"])


@needs_cuda
@pytest.mark.parametrize(
    ("dtypes", "triton", "kind"),
    [
        (("float8_e4m3fn", "float8_e5m2"), False, r"__cublas\$lt\$matmul\$f8: f8e4m3fn x f8e5m2 -> bf16"),
        (("bfloat16", "bfloat16"), False, r"__cublas\$lt\$matmul: bf16 x bf16 -> bf16"),
        (("bfloat16", "bfloat16"), True, r"triton gemm fusion: bf16 x bf16 -> \w+"),
    ],
)
def test_what_computes_a_product_on_a_gpu(dtypes, triton, kind):
    def step(x, kernel):
        return jax.lax.dot(x, kernel, preferred_element_type=jnp.bfloat16)

    flags, mesh = {"xla_gpu_enable_triton_gemm": str(triton)}, mesh_of("a3")
    text = text_of(step, mesh, *(((ROWS, ROWS), dtype) for dtype in dtypes), flags=flags)
    (product,) = statistics(text, mesh, "NVIDIA H100 80GB HBM3")["matmuls"]
    assert re.fullmatch(kind, product["kind"])
    assert product["executions"] == 1
