"""What Pax's C4 models have beside others': a learned scale of each query dim, and a bias of the logits."""

import jax
import numpy as np

from src.model.flops import count_params
from src.model.params import Weights, by_path, nested
from src.step.loss import hidden_states
from tests import tiny

KEYS = {"position_type": "sinusoidal", "attn_logits_soft_cap": 50, "logits_via_embedding": True}
FACTS = {"query_dim_scale": True, "logits_bias": True}


def logits(plan, tree):
    batch = tiny.packed_rows(0)
    model = plan.decoder(Weights(tree))
    hidden_BTD, context, _ = hidden_states(model, batch, plan)
    return np.asarray(model.logits(hidden_BTD, context))[..., : tiny.VOCAB]


def test_both_are_what_praxis_computes():
    """PerDimScale: queries times softplus(w) / log 2, dim by dim; a bias is added to the logits before their cap."""
    _, plan = tiny.make(**KEYS, **FACTS)
    _, plain = tiny.make(**KEYS)
    flat = by_path(tiny.random_weights(plan))
    bias = np.asarray(flat.pop(("output_bias",)))[: tiny.VOCAB]
    scaled = dict(flat)
    for path in [path for path in flat if path[-1] == "query_dim_scale"]:
        factor_LH = np.log1p(np.exp(flat[path])) / np.log(2)
        query = (*path[:-1], "query")
        scaled[query] = flat[query] * factor_LH[:, None, None, :]
        del scaled[path]
    with_facts = logits(plan, nested({**flat, ("output_bias",): tiny.random_weights(plan)["output_bias"]}))
    np.testing.assert_allclose(with_facts, logits(plain, nested(scaled)) + bias, rtol=1e-4, atol=1e-4)


def test_at_first_they_change_nothing_and_are_counted_without_padding():
    config, plan = tiny.make(**KEYS, **FACTS)
    initial = jax.jit(plan.init_weights)().trainable
    assert not np.any(initial["output_bias"])
    assert not np.any(initial["segments"][0][0]["attention"]["query_dim_scale"])
    without = tiny.spec_of(tiny.load(**KEYS))
    assert count_params(tiny.spec_of(config)) - count_params(without) == tiny.VOCAB + 2 * config.model.head_dim
    decays = by_path(plan.decays)
    assert not decays["output_bias",]
    matrix = by_path(plan.matrices)["output_bias",]
    assert (matrix.reduction, matrix.hidden) == ((), False)
