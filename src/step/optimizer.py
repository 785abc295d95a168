"""The optimizer, built inside the step from run-time values, and the learning rate of each step."""

import math
from typing import Any

import jax
import numpy as np
import optax

from src.config.schema import Step
from src.model.params import ADAPTER_DTYPE
from src.step.optimizer_rules import decayed, scaled, where

HParams = dict[str, Any]


def learning_rate(keys: Step, steps: int, step: int) -> float:
    """Learning rate of update number `step`, counted from 0, in a run of `steps`.

    With n = learning_rate_schedule_steps, w = warmup_steps_fraction n and r = learning_rate: r (step + 1) / w while
    step < w; then, for cosine, half a cosine from r (Loshchilov and Hutter 2017, equation 5) to
    learning_rate_final_fraction r at n; for exponential, to the same end by a constant factor per step; for wsd, r
    until the last wsd_decay_steps_fraction of n, then linearly to the same end (Hu et al. 2024, section 4). Zero from n
    on.
    """
    # optax's schedules compute in float32 on a device: they differ in the last bit, and the loop would wait for them.
    total = steps if keys.learning_rate_schedule_steps == -1 else keys.learning_rate_schedule_steps
    warmup = round(keys.warmup_steps_fraction * total)
    peak, final = keys.learning_rate, keys.learning_rate_final_fraction
    if step >= total:
        return 0.0
    if step < warmup:
        return peak * (step + 1) / warmup
    if keys.lr_schedule_type == "wsd":
        decay = round(keys.wsd_decay_steps_fraction * total)
        return peak * min(1.0, final + (1.0 - final) * (total - step) / max(decay, 1))
    progress = (step - warmup) / max(total - warmup, 1)
    if keys.lr_schedule_type == "exponential":
        return peak * final**progress
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def hparams_at(keys: Step, steps: int, step: int) -> HParams:
    """Values of update number `step` (from 0) that may change without recompiling the step."""
    values = {
        "learning_rate": learning_rate(keys, steps, step),
        "b1": keys.adam_b1,
        "b2": keys.adam_b2,
        "muon_beta": keys.muon_beta,
        "eps": keys.adam_eps,
        "weight_decay": keys.adam_weight_decay,
        "clip": keys.gradient_clipping_threshold,
        **({"adam_clip": keys.adam_clip_threshold} if keys.adam_clip_threshold else {}),
        **({"ema_decay": keys.ema_decay} if keys.ema_decay else {}),
        **({"spike_factor": keys.skip_step_scaling_factor} if keys.skip_step_on_spikes else {}),
    }
    return {name: np.float32(value) for name, value in values.items()}


def make_optimizer(
    keys: Step, decays: Any, matrices: Any, shardings: Any, hparams: HParams, rules: Any
) -> optax.GradientTransformation:
    """Builds the optimizer, with decoupled weight decay (Loshchilov and Hutter 2019).

    `decays`, `matrices` (of `Matrix`), `shardings` (of updates) and `rules` (of `Rule`) are trees with an entry for
    each weight. `hparams` may be traced arrays; the state does not depend on them. With muon (Jordan et al. 2024),
    adamw updates all weights except hidden matrices.
    """
    mu_dtype = keys.mu_dtype or (ADAPTER_DTYPE if keys.lora_rank else keys.weight_dtype)
    adam = optax.scale_by_adam(hparams["b1"], hparams["b2"], hparams["eps"], mu_dtype=mu_dtype)
    trace = optax.trace(hparams["muon_beta"], nesterov=True, accumulator_dtype=mu_dtype)
    types = {rule.opt_type for rule in jax.tree.leaves(rules)}
    by_muon = jax.tree.map(lambda rule, it: rule.opt_type == "muon" and it.hidden, rules, matrices)
    by_adam = jax.tree.map(lambda rule, muon: rule.opt_type in ("adamw", "muon") and not muon, rules, by_muon)
    scaling: list[optax.GradientTransformation] = []
    if "muon" in types:
        from src.step.muon import orthogonal_updates

        scaling += [optax.masked(trace, by_muon), orthogonal_updates(matrices, by_muon, shardings)]
    if "adafactor" in types:
        from src.step.adafactor import scale_by_adafactor

        scaling.append(scale_by_adafactor(matrices, where(rules, "opt_type", "adafactor")))
    if types & {"adamw", "muon"}:
        scaling.append(adam if types == {"adamw"} else optax.masked(adam, by_adam))
    if keys.adam_clip_threshold:
        from src.step.adafactor import clip_matrices

        scaling.append(clip_matrices(matrices, where(rules, "opt_type", "adamw"), hparams["adam_clip"]))
    scaling += [*scaled(rules, "by_width"), *decayed(rules, decays, hparams["weight_decay"])]
    rate = optax.scale_by_learning_rate(hparams["learning_rate"])
    return optax.chain(*scaling, rate, *scaled(rules, "learning_rate_scale"))


def clip(gradients: Any, norm: jax.Array, threshold: jax.Array) -> Any:
    """Scales `gradients`, of global norm `norm`, down to `threshold`; 0 disables it (Pascanu et al. 2013)."""
    factor = jax.numpy.where((threshold > 0) & (norm > threshold), threshold / norm, 1.0)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
