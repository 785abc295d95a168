"""The optimizer, built inside the step from run-time values, and the learning rate of each step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from src.model.params import by_path
from src.step.adafactor import scale_by_adafactor
from src.step.muon import orthogonal_updates

Hyper = dict[str, Any]


def learning_rate(config: Mapping[str, Any], step: int) -> float:
    """The rate of update number `step`, counted from 0.

    With n = learning_rate_schedule_steps, w = warmup_steps_fraction n and r = learning_rate: r (step + 1) / w while
    step < w; then, for cosine, from r down half a cosine (Loshchilov and Hutter 2017, equation 5) to
    learning_rate_final_fraction r at n; for wsd, r until the last wsd_decay_steps_fraction of n, then a straight line
    to that end (Hu et al. 2024, section 4). Zero from n on.
    """
    schedule_steps = config["learning_rate_schedule_steps"]
    total = config["steps"] if schedule_steps == -1 else schedule_steps
    warmup = round(config["warmup_steps_fraction"] * total)
    peak, final = config["learning_rate"], config["learning_rate_final_fraction"]
    if step >= total:
        return 0.0
    if step < warmup:
        return peak * (step + 1) / warmup
    if config["lr_schedule_type"] == "wsd":
        decay = round(config["wsd_decay_steps_fraction"] * total)
        return peak * min(1.0, final + (1.0 - final) * (total - step) / max(decay, 1))
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def hyper_parameters(config: Mapping[str, Any], step: int) -> Hyper:
    """The values of update number `step` (from 0) that may change without compiling the step again."""
    values = {
        "learning_rate": learning_rate(config, step),
        "b1": config["adam_b1"],
        "b2": config["adam_b2"],
        "muon_beta": config["muon_beta"],
        "eps": config["adam_eps"],
        "weight_decay": config["adam_weight_decay"],
        "clip": config["gradient_clipping_threshold"],
    }
    return {name: np.float32(value) for name, value in values.items()}


def transform(
    opt_type: str, mu_dtype: str, decays: Any, matrices: Any, shardings: Any, hyper: Hyper
) -> optax.GradientTransformation:
    """The optimizer, with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        opt_type: `adamw`; `adafactor` (Shazeer and Stern 2018), without a first moment; `muon` (Jordan et al. 2024),
            which is adamw for what is no hidden matrix; or `sgd`, which has no state.
        mu_dtype: of first moments.
        decays, matrices, shardings: of each weight whether it decays, its `Matrix`, and where its update is made.
        hyper: may hold traced arrays; the state depends on none of them.
    """
    adam = optax.scale_by_adam(hyper["b1"], hyper["b2"], hyper["eps"], mu_dtype=mu_dtype)
    hidden = jax.tree.map(lambda matrix: matrix.hidden, matrices)
    rules = {
        "adamw": [adam],
        "adafactor": [scale_by_adafactor(matrices)],
        "muon": [
            optax.masked(optax.trace(hyper["muon_beta"], nesterov=True, accumulator_dtype=mu_dtype), hidden),
            orthogonal_updates(matrices, shardings),
            optax.masked(adam, jax.tree.map(lambda is_hidden: not is_hidden, hidden)),
        ],
        "sgd": [optax.identity()],
    }
    return optax.chain(
        *rules[opt_type],
        optax.add_decayed_weights(hyper["weight_decay"], decays),
        optax.scale_by_learning_rate(hyper["learning_rate"]),
    )


def state_shardings(opt: Any, shardings: Any, copy: NamedSharding) -> Any:
    """Where an optimizer's state lies: what is of a weight as its `shardings` say, the rest as `copy` does.

    A dim of size 1, of which the weight has more, is not cut.
    """
    weights = by_path(shardings)

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        weight = tuple(entry.key for entry in path if isinstance(entry, DictKey))
        if not weight:
            return copy
        at = weights[weight]
        axes = (axes if size > 1 else None for size, axes in zip(leaf.shape, at.spec, strict=True))
        return at.update(spec=PartitionSpec(*axes))

    return jax.tree.map_with_path(place, opt)


def clip(gradients: Any, norm: jax.Array, threshold: jax.Array) -> Any:
    """Scales `gradients`, of global norm `norm`, down to `threshold`; 0 leaves them (Pascanu et al. 2013)."""
    factor = jax.numpy.where((threshold > 0) & (norm > threshold), threshold / norm, 1.0)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
