"""The loss against PyTorch's cross-entropy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from src.step.loss import cross_entropy
from tests.tiny import assert_close

ROWS, LENGTH, WIDTH, VOCAB = 3, 12, 8, 50


def problem():
    """Hidden states, an output projection, targets and a mask of zeros and ones."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    output = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
    return hidden, output, rng.integers(0, VOCAB, (ROWS, LENGTH)), rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("z_loss", "tiles"))
def value_and_gradients(hidden, output, targets, mask, z_loss, tiles):
    def total(hidden, output):
        loss, squares = cross_entropy(lambda h: h @ output, hidden, targets, mask, tiles)
        return loss + z_loss * squares

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, output)


@pytest.mark.parametrize("tiles", [1, 3, 12])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_and_gradients_equal_pytorchs_in_any_number_of_tiles(z_loss, tiles):
    hidden, output, targets, mask = problem()
    our_value, our_gradients = value_and_gradients(hidden, output, targets, mask, z_loss=z_loss, tiles=tiles)

    hidden_t, output_t = torch.tensor(hidden, requires_grad=True), torch.tensor(output, requires_grad=True)
    counted = torch.tensor(mask) == 1
    logits = (hidden_t @ output_t)[counted]
    value = torch.nn.functional.cross_entropy(logits, torch.tensor(targets)[counted], reduction="sum")
    value = value + z_loss * logits.logsumexp(-1).square().sum()
    value.backward()
    assert_close(our_value, value.detach().numpy(), 1e-5)
    assert_close(our_gradients, (hidden_t.grad.numpy(), output_t.grad.numpy()), 1e-5)


def test_uniform_logits_cost_the_log_of_the_vocabulary():
    _, _, targets, mask = problem()
    zeros = jnp.zeros((ROWS, LENGTH, VOCAB))
    loss, squares = cross_entropy(lambda h: h, zeros, targets, mask, tiles=1)
    np.testing.assert_allclose(loss, mask.sum() * np.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(squares, mask.sum() * np.log(VOCAB) ** 2, rtol=1e-6)
