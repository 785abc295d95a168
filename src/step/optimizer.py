"""The optimizer, built inside the step from run-time values."""

from typing import Any

import jax
import numpy as np
import optax

from src.config.optimizer_keys import OPTIMIZERS, learning_rate
from src.config.schema import Step
from src.model.params import ADAPTER_DTYPE
from src.step.matrices import MatrixDims
from src.step.optimizer_rules import HParams, OptimizerInputs, Rule, decayed, scaled, where
from src.system.imports import named


def hparams_at(keys: Step, steps: int, step: int) -> HParams:
    """Values that may change without recompiling the step, for update number `step` (from 0) of `steps`."""
    values = {
        "learning_rate": learning_rate(keys, steps, step),
        "b1": keys.adam_b1,
        "b2": keys.adam_b2,
        "muon_beta": keys.muon_beta,
        "eps": keys.adam_eps,
        "weight_decay": keys.adam_weight_decay,
        "clip": keys.gradient_clipping_threshold,
    }
    optional = {
        "adam_clip": keys.adam_clip_threshold,
        "ema_decay": keys.ema_decay,
        "spike_factor": keys.skip_step_on_spikes and keys.skip_step_scaling_factor,
    }
    values |= {name: value for name, value in optional.items() if value}
    return {name: np.float32(value) for name, value in values.items()}


def make_optimizer(
    keys: Step, decays: Any, matrices: Any, shardings: Any, hparams: HParams, rules: Any
) -> optax.GradientTransformation:
    """Builds the optimizer, with decoupled weight decay (Loshchilov and Hutter 2019).

    `decays`, `matrices` (of `MatrixDims`), `shardings` (of updates) and `rules` (of `Rule`) are trees with an entry for
    each weight. `hparams` may be traced arrays; the initial state does not depend on them.
    """
    used = {rule.opt_type for rule in jax.tree.leaves(rules)}
    if any(OPTIMIZERS[name].hidden_only for name in used):
        used.add("adamw")
    mu_dtype = keys.mu_dtype or (ADAPTER_DTYPE if keys.lora_rank else keys.weight_dtype)
    inputs = OptimizerInputs(matrices, shardings, hparams, mu_dtype, used == {"adamw"})
    scaling: list[optax.GradientTransformation] = []

    def name_of(rule: Rule, matrix: MatrixDims) -> str:
        return "adamw" if OPTIMIZERS[rule.opt_type].hidden_only and not matrix.hidden else rule.opt_type

    names = jax.tree.map(name_of, rules, matrices)
    for name in reversed(OPTIMIZERS):  # this is also the order of their states in checkpoints: adamw is last
        if name in used and OPTIMIZERS[name].scaling:
            chosen = jax.tree.map(name.__eq__, names)
            scaling += named(OPTIMIZERS[name].scaling)(chosen, inputs)
    if keys.adam_clip_threshold:
        from src.step.adafactor import clip_matrices

        scaling.append(clip_matrices(matrices, where(rules, "opt_type", "adamw"), hparams["adam_clip"]))
    scaling += [*scaled(rules, "by_width"), *decayed(rules, decays, hparams["weight_decay"])]
    rate = optax.scale_by_learning_rate(hparams["learning_rate"])
    return optax.chain(*scaling, rate, *scaled(rules, "learning_rate_scale"))


def adamw(chosen: Any, inputs: OptimizerInputs) -> list[optax.GradientTransformation]:
    """Divides Adam's first moment by the root of its second moment, for `chosen` weights (Kingma and Ba 2015)."""
    hparams = inputs.hparams
    adam = optax.scale_by_adam(hparams["b1"], hparams["b2"], hparams["eps"], mu_dtype=inputs.mu_dtype)
    return [adam if inputs.only_adamw else optax.masked(adam, chosen)]


def clip(gradients: Any, norm: jax.Array, threshold: jax.Array) -> Any:
    """Scales `gradients`, of global norm `norm`, down to `threshold`; 0 disables it (Pascanu et al. 2013)."""
    factor = jax.numpy.where((threshold > 0) & (norm > threshold), threshold / norm, 1.0)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
