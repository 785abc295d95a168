"""Experts' products in int8 against a loop over groups in float64 of operands that numpy rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.low_precision import FORMATS, EightBitMatmuls, QTensor, largest
from src.model.moe.grouped_matmul import GroupedCodes, batched_matmul, encoded, grouped_matmul
from src.model.quantization import Quantized
from src.parallel.mesh import make_layout
from tests.tiny import Trainer, assert_close, load, loss_and_gradients, make, packed_rows, random_weights

ROWS, X, Y = 300, 40, 72
# Rows of each of five groups; what is left of 300 is no group's.
SIZES = {"all": [100, 28, 72, 1, 99], "empty groups": [0, 130, 0, 20, 0]}
MOST = 127 / 32  # the largest magnitudes: all scales are powers of two, and numbers rounded alike in any precision


def operands(groups):
    """x [R, X], weights [G, X, Y] and a gradient [R, Y], whose rows and channels differ in size."""
    rng = np.random.default_rng(0)

    def clipped(*shape, most=MOST):
        return np.clip(rng.normal(size=shape), -most, most)

    x, kernel, gradient = clipped(ROWS, X), clipped(groups, X, Y), clipped(ROWS, Y, most=3)
    x[:, 0] = kernel[:, 0] = gradient[:, 0] = gradient[0] = MOST
    x[1:] *= 2.0 ** rng.integers(-3, 1, [ROWS - 1, 1])
    kernel[:, :, 1:] *= 2.0 ** rng.integers(-3, 1, [groups, 1, Y - 1])
    return [array.astype(np.float32) for array in (x, kernel, gradient)]


def codes(array, dims):
    scales = np.max(np.abs(array.astype(np.float64)), axis=dims, keepdims=True) / 127
    return np.rint(array / scales), scales


def reference(x, kernel, gradient, sizes):
    """The product and its gradients, each group's rows after the other."""
    (x8, x_scales), (kernel8, kernel_scales) = codes(x, 1), codes(kernel, 1)
    out, dx, dw = np.zeros((ROWS, Y)), np.zeros((ROWS, X)), np.zeros(kernel.shape)
    used = sum(sizes)
    to_kernel8, to_kernel_scales = codes(gradient[:used] * x_scales[:used], 0)
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        out[rows] = x8[rows] @ kernel8[group] * x_scales[rows] * kernel_scales[group]
        if size:
            to_x8, to_x_scales = codes(gradient[rows] * kernel_scales[group], 1)
            dx[rows] = to_x8 @ kernel8[group].T * to_x_scales
        dw[group] = x8[rows].T @ to_kernel8[rows] * to_kernel_scales
    return out, dx, dw


def coded(kernel, dtype, transposed):
    codes8, scales = codes(kernel, 1)
    arrays = [np.swapaxes(array, 1, 2) if transposed else array for array in (codes8, scales, np.zeros_like(kernel))]
    products = EightBitMatmuls(FORMATS["int8"], make_layout(load().mesh, jax.devices()[:1]))
    parts = QTensor(jnp.asarray(arrays[0], dtype), jnp.asarray(arrays[1], jnp.float32))
    return GroupedCodes(jnp.asarray(arrays[2], jnp.float32), parts, products)


def with_gradients(product, x, kernel, gradient, transposed):
    """The product and its gradients to x and the weights."""

    @jax.jit
    def run(x, wide, gradient):
        out, transpose = jax.vjp(lambda x, wide: product(x, GroupedCodes(wide, kernel.coded, kernel.products)), x, wide)
        return out, *transpose(gradient)

    out, dx, dw = run(x, kernel.wide, gradient)
    return out, dx, dw.swapaxes(1, 2) if transposed else dw


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("tpu", "int8")])
@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_rows_are_multiplied_as_rounded(transposed, platform, dtype, sizes):
    x, kernel, gradient = operands(len(sizes))
    used, rows_G = sum(sizes), jnp.asarray(sizes, jnp.int32)
    expected = reference(x, kernel, gradient, sizes)
    x[used:] = gradient[used:] = np.nan  # undefined past the last group, and nothing comes of it

    def product(x, kernel):
        return grouped_matmul(x, kernel, rows_G, platform, transposed, interpret=True)

    made = with_gradients(product, x, coded(kernel, dtype, transposed), gradient, transposed)
    for array, of_groups in zip(made, expected, strict=True):
        rows = used if len(of_groups) == ROWS else None
        assert_close(array[:rows], of_groups[:rows], 1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_batches_of_rows_are_multiplied_as_rounded(transposed):
    """As many rows for each group, whose channels' gradients then have scales of their own."""
    x, kernel, gradient = operands(1)
    expected = reference(x, kernel, gradient, [ROWS])
    two = [np.stack([array, array / 2]) for array in (x, kernel[0], gradient)]
    made = with_gradients(
        lambda x, kernel: batched_matmul(x, kernel, transposed),
        two[0],
        coded(two[1], "float32", transposed),
        two[2],
        transposed,
    )
    for array, of_group in zip(made, expected, strict=True):
        of_group = of_group.reshape(array.shape[1:])
        assert_close(array, np.stack([of_group, of_group / 4]), 1e-6)


def test_weights_scales_are_exact_in_bfloat16():
    """As they are looked up backward; codes reach to 126 at least, and none is clipped."""
    _, kernel, _ = operands(3)
    kernel *= np.random.default_rng(1).uniform(0.5, 2, [3, 1, Y]).astype(np.float32)
    products = EightBitMatmuls(FORMATS["int8"], make_layout(load().mesh, jax.devices()[:1]))
    weight = Quantized(jnp.asarray(kernel), largest(jnp.asarray(kernel), (1,)), products, ("expert", None, None))
    codes, scales = map(np.asarray, encoded(weight, jnp.float32).coded)
    np.testing.assert_allclose(scales, scales.astype(jnp.bfloat16).astype(np.float32), rtol=1e-6)
    assert np.all(np.abs(codes * scales - kernel) <= scales * 0.501)
    assert 126 <= np.min(np.max(np.abs(codes), axis=1)) <= np.max(np.abs(codes)) <= 127


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "remat_policy": "full"}
MESH = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}


@pytest.mark.parametrize("settings", [{}, pytest.param({"capacity_factor": 1.5}, marks=pytest.mark.long)])
def test_a_step_of_experts_on_a_mesh_is_near_that_on_one_device(settings):
    facts = {"quantization": "int8", **EXPERTS, **settings}
    batch = packed_rows(0, rows=16)
    one, many = Trainer(1, initial=False, **facts), Trainer(8, initial=False, **facts, **MESH)
    expected, made = one.step(batch, 1), many.step(batch, 1)
    assert made["finite"]
    assert made["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    assert made["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


def test_experts_gradients_are_near_those_of_wide_products():
    (_, wide), (_, plan) = make(**EXPERTS), make(quantization="int8", **EXPERTS)
    weights, batch = random_weights(plan), packed_rows(0)
    (loss, grads), (expected, wide_grads) = (loss_and_gradients(each, weights, batch) for each in (plan, wide))
    assert 0 < abs(loss - expected) < 0.01 * expected
    for name in ("wi", "wo"):
        made, near = (tree["segments"][0][0]["feed_forward"][name] for tree in (grads, wide_grads))
        assert np.vdot(made, near) / np.linalg.norm(made) / np.linalg.norm(near) > 0.99
