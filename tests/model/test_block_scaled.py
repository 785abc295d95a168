"""Products in MXFP8 against the same ones in float64 of operands that numpy rounds in blocks of 32."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from src.model import params
from src.model.block_scaled import BLOCK, BlockMatmuls, encode
from src.model.quantization import Quantized, select
from src.parallel.mesh import make_layout
from src.system.errors import UserError
from tests.tiny import assert_close, load, loss_and_gradients, make, packed_rows, random_weights

QUERY = ("BTD,DNH->BTNH", ("embed", "heads", "head_dim"))
OUT = ("BTNH,NHD->BTD", ("heads", "head_dim", "embed"))
SIZES = {"B": 4, "T": 64, "D": 64, "N": 4, "H": 32}


def layout_of(devices, **mesh):
    return make_layout(load(**mesh).mesh, jax.devices()[:devices])


def product(einsum, axes, layout):
    """The product by `matmul` and its gradients, compiled: x, w, gradient -> out, to x, to w."""
    products = BlockMatmuls(layout)

    @jax.jit
    def run(x, w, gradient):
        out, transpose = jax.vjp(lambda x, w: params.matmul(x, Quantized(w, None, products, axes), einsum), x, w)
        return out, *transpose(gradient)

    return run


def operands(einsum, seed=0):
    """x, w and the gradient of their product, whose blocks differ in size by up to 2^8."""
    rng = np.random.default_rng(seed)
    shapes = ([SIZES[dim] for dim in dims] for dims in einsum.replace("->", ",").split(","))
    return [(rng.normal(size=shape) * 2.0 ** rng.integers(-4, 5, shape)).astype(np.float32) for shape in shapes]


def rounded(x, dims, summed):
    """What x stands for in MXFP8 with blocks along the last of the summed dims, float64."""
    axis = dims.index(summed[-1])
    blocks = np.moveaxis(x.astype(np.float64), axis, -1)
    blocks = blocks.reshape(*blocks.shape[:-1], -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.max(np.abs(blocks), axis=-1, keepdims=True) / 448))
    values = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return np.moveaxis(values.reshape(*values.shape[:-2], -1), -1, axis)


def reference(left, right, einsum):
    a, b, out = einsum.replace("->", ",").split(",")
    summed = [dim for dim in a if dim in b and dim not in out]  # in the order that both have them in
    return np.einsum(einsum, rounded(left, a, summed), rounded(right, b, summed))


@pytest.mark.parametrize(("einsum", "axes"), [QUERY, OUT], ids=["query", "out"])
def test_products_and_gradients_are_those_of_blocks(einsum, axes):
    x, w, gradient = operands(einsum)
    x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")
    made = product(einsum, axes, layout_of(1))(x, w, gradient)
    to_x, to_w = f"{out_dims},{w_dims}->{x_dims}", f"{x_dims},{out_dims}->{w_dims}"
    operands_of = [(x, w, einsum), (gradient, w, to_x), (x, gradient, to_w)]
    for array, (left, right, of) in zip(made, operands_of, strict=True):
        expected = reference(left, right, of)
        assert_close(array, expected, 1e-6)
        plain = np.einsum(of, left, right)
        assert np.max(np.abs(plain - expected)) > 1e-3 * np.max(np.abs(expected))  # they are rounded


@pytest.mark.parametrize(
    "mesh",
    [
        {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
        {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
    ],
    ids=["fsdp 4 x tensor 2: a device's part of a weight has no whole block", "fsdp 2 x context 2 x tensor 2"],
)
@pytest.mark.parametrize(("einsum", "axes"), [QUERY, OUT], ids=["query", "out"])
def test_a_mesh_makes_the_products_of_one_device(einsum, axes, mesh):
    """Blocks are the same wherever they lie: only sums over devices are of another order."""
    arrays = operands(einsum)
    whole = product(einsum, axes, layout_of(1))(*arrays)
    for array, expected in zip(product(einsum, axes, layout_of(8, **mesh))(*arrays), whole, strict=True):
        assert_close(array, expected, 1e-6)


def test_codes_with_their_scales_stand_for_what_a_cpu_multiplies():
    """What a GPU gets, decoded by ml_dtypes, is what this CPU's products are made of."""
    (x, _, _) = operands("BTD,DNH->BTNH")
    x[0, 0, :32], x[0, 1, :32] = 0, np.finfo(np.float32).tiny
    codes, scales = jax.jit(encode, static_argnums=1)(x, False)
    assert (codes.dtype, scales.dtype) == (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
    assert scales.shape == (4, 64, 64 // BLOCK)
    values = np.asarray(codes, np.float64) * np.repeat(np.asarray(scales, np.float64), BLOCK, axis=-1)
    np.testing.assert_array_equal(values, np.asarray(jax.jit(encode, static_argnums=1)(x, True).qvalue))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_block_that_is_not_finite_stays_so(value, on_cpu):
    x = np.ones((2, 64), np.float32)
    x[0, 5] = value
    codes, scales = jax.jit(encode, static_argnums=1)(x, on_cpu)
    values = np.asarray(codes, np.float64)
    if not on_cpu:
        values = values * np.repeat(np.asarray(scales, np.float64), BLOCK, axis=-1)
    assert not np.isfinite(values[0, 5])
    np.testing.assert_array_equal(values[0, 32:], np.ones(32))
    np.testing.assert_array_equal(values[1], np.ones(64))


def test_a_models_gradients_are_near_those_of_wide_products():
    sizes = {"max_target_length": 32, "base_emb_dim": 64, "base_mlp_dim": 96, "head_dim": 32}
    (_, wide), (_, plan) = make(**sizes), make(quantization="mxfp8", **sizes)
    assert plan.quantization.description.startswith("mxfp8 in ")
    weights, batch = random_weights(plan), packed_rows(0, length=32)
    (loss, grads), (expected, wide_grads) = (loss_and_gradients(each, weights, batch) for each in (plan, wide))
    assert 0 < abs(loss - expected) < 0.02 * expected
    for path, gradient in params.by_path(grads).items():
        reference = params.by_path(wide_grads)[path]
        cosine = np.vdot(gradient, reference) / np.linalg.norm(gradient) / np.linalg.norm(reference)
        assert cosine > 0.9, path


def test_other_gpus_of_the_generation_make_them_too():
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA B300", compute_capability="10.3")
    layout = SimpleNamespace(device=device)
    with pytest.raises(UserError, match="leaves no weight"):  # and not that the device makes none
        select(load(quantization="mxfp8").step, {}, layout)


@pytest.mark.parametrize(
    ("length", "width", "message"),
    [
        (32, 48, r"together: 48 of a weight's dim on a device are not a multiple .* quantization_exclude"),
        (40, 64, r"together: 40 tokens of a sequence on a device .* Change max_target_length or ici_context"),
    ],
)
def test_parts_without_whole_blocks_are_refused(length, width, message):
    run = product("BTD,DF->BTF", ("embed", "mlp"), layout_of(1))
    with pytest.raises(UserError, match=message):
        run(jnp.ones((2, length, width)), jnp.ones((width, 64)), jnp.ones((2, length, 64)))


@pytest.mark.parametrize(("einsum", "axes"), [QUERY, OUT], ids=["query", "out"])
def test_a_gpu_is_given_matrices_of_codes_with_their_scales(einsum, axes, monkeypatch):
    """XLA for CPUs has no such product: in its place stands one of what ml_dtypes reads in codes and scales."""

    def scaled_matmul(a, b, a_scales, b_scales, preferred_element_type):
        a, b = (
            codes.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=-1)
            for codes, scales in ((a, a_scales), (b, b_scales))
        )
        return jnp.einsum("BMK,BNK->BMN", a, b).astype(preferred_element_type)

    arrays = operands(einsum)
    expected = product(einsum, axes, layout_of(1))(*arrays)
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(BlockMatmuls, "on_cpu", False)
    for array, value in zip(product(einsum, axes, layout_of(1))(*arrays), expected, strict=True):
        assert_close(array, value, 1e-6)
