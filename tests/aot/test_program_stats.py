"""What scripts/program_stats.py reads from programs whose products, collectives and copies are known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scripts.program_stats import numbered_mesh, statistics
from src.aot.devices import abstract_devices
from src.parallel.topology import parse_topology
from tests.compilers import needs_cuda, needs_libtpu

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
    assert {each["kind"].partition(": ")[2]: each["executions"] for each in result["products"]} == {
        "bf16 x bf16 -> bf16": ROUNDS,
        "s8 x s8 -> s32": 1,
    }
    (gathered,) = result["collectives"]
    assert (gathered["kind"], gathered["dtype"], gathered["axes"]) == ("all-gather", "bf16", "fsdp")
    assert gathered["sent_bytes"] == 7 * ROWS * WIDTH * 2
    # No product takes less than its operations at the chip's stated peak.
    least = 2 * ROWS * WIDTH * WIDTH * ROUNDS / 197e12
    assert least <= result["seconds"]["products"] < 10 * least
    (without_mesh,) = statistics(text, numbered_mesh(text), "")["collectives"]
    assert without_mesh["sent_bytes"] == gathered["sent_bytes"]


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
    (product,) = statistics(text, mesh, "NVIDIA H100 80GB HBM3")["products"]
    assert re.fullmatch(kind, product["kind"])
    assert product["executions"] == 1
