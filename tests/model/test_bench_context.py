"""The ring that bench_context.py compiles beside the gather of the model, against PyTorch's attention."""

import jax
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from scripts.evidence.bench_context import ring
from src.parallel.mesh import make_layout
from src.parallel.sequence import zigzag_order
from tests.tiny import assert_close, load

LENGTH, SCALE = 1024, 0.1  # of four devices each has two of the kernel's least blocks


def test_a_ring_of_four_devices_attends_and_differentiates_as_one_does():
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.normal(size=(2, LENGTH, heads, 128)), np.float32) for heads in (4, 2, 2, 4)]
    *inputs, direction = (torch.tensor(x.swapaxes(1, 2)) for x in arrays)
    inputs = [x.requires_grad_() for x in inputs]
    wanted = scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE, enable_gqa=True)
    wanted.backward(direction)

    layout = make_layout(load(ici_context_parallelism=4, ici_fsdp_parallelism=2).mesh, jax.devices())
    order = zigzag_order(LENGTH, layout)
    q, k, v, cotangent = (x[:, order] for x in arrays)

    @jax.jit
    def computed(q, k, v, cotangent):
        out, back = jax.vjp(lambda q, k, v: ring(q, k, v, layout, SCALE, interpret=True), q, k, v)
        return out, *back(cotangent)

    for ours, theirs in zip(computed(q, k, v, cotangent), [wanted, *(x.grad for x in inputs)], strict=True):
        assert_close(ours, theirs.detach().numpy().swapaxes(1, 2)[:, order], 1e-5)
