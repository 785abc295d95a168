"""Which weights are cast before the loop over layers, and that gradients are what they are without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.params import by_path
from src.step import train_step
from src.step.loss import count_tokens, next_token_loss
from tests.tiny import make, packed_rows, random_weights

BFLOAT16 = {"dtype": "bfloat16", "matmul_precision": "default"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SHARED = "[{pattern: [{}]}, {repeats: 2, shared: true, pattern: [{base_mlp_dim: 48}]}]"


def plan_on_tpus(devices, early=True, **keys):
    """A plan that runs as on TPUs, on CPUs."""
    _, plan = make(devices, **{**BFLOAT16, **keys})
    return dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, grad_barriers=early))


def cast(**keys):
    """The names of a model's weights that are cast."""
    plan = plan_on_tpus(8, **keys)
    weights = plan.split(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), plan.shapes)).trainable
    flat = by_path(jax.eval_shape(lambda tree: train_step.cast_matrices(tree, plan), weights))
    return {".".join(map(str, path)) for path, leaf in flat.items() if leaf.dtype == jnp.bfloat16}


def test_matrices_of_layers_are_cast_and_nothing_that_is_used_in_float32():
    attention = {f"segments.0.0.attention.{name}" for name in ("query", "key", "value", "out")}
    feed_forward = {f"segments.0.0.feed_forward.{name}" for name in ("wi", "wo")}
    assert cast() == cast(attention_bias="true", logits_via_embedding="true") == attention | feed_forward
    assert cast(**EXPERTS) == attention | feed_forward  # without the router
    assert cast(dtype="float32") == cast(early=False) == set()


def test_a_weight_whose_gradients_add_up_is_not():
    by_layer = cast(base_num_decoder_layers=3, decoder_segments=SHARED)
    assert {name.split(".")[1] for name in by_layer} == {"0"}
    assert cast(ici_pipeline_parallelism=2, per_device_batch_size=2) == set()
    assert cast(quantization="int8") == set()


@pytest.mark.parametrize("keys", [{}, EXPERTS, {"gradient_accumulation_steps": 2}], ids=str)
def test_gradients_are_in_the_weights_dtype_and_what_they_are_without(keys, monkeypatch):
    """To bfloat16's last bit, as XLA may leave a rounding out in the one program and not in the other."""
    plan = plan_on_tpus(1, **keys)
    batch, weights = packed_rows(0), plan.split(random_weights(plan))

    def gradients():
        step = jax.jit(
            lambda weights: train_step.loss_gradient(
                (weights, count_tokens(batch, plan)), batch, plan, next_token_loss
            )[0]
        )
        return by_path(jax.device_get(step(weights)))

    found = gradients()
    monkeypatch.setattr(train_step, "cast_matrices", lambda trainable, plan: trainable)
    for path, expected in gradients().items():
        assert found[path].dtype == expected.dtype == np.float32
        np.testing.assert_allclose(found[path], expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())
