"""Updates by our optimizers and by PyTorch's, of small weights."""

import jax
import numpy as np
import optax
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from src.step.matrices import MatrixDims
from src.step.optimizer import clip, hparams_at, learning_rate, make_optimizer
from src.step.optimizer_rules import assign_rules
from tests.tiny import load

SETTINGS = {"adam_weight_decay": 0.3, "gradient_clipping_threshold": 1.0, "learning_rate": 0.1}
ADAM = {"adam_eps": 1e-6}
MATRICES = {"bias": MatrixDims((), (), (0,), hidden=False), "kernel": MatrixDims((), (0,), (1,), hidden=True)}
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def problem(steps=5):
    """Weights that decay and a bias that does not, and gradients of which some must be clipped."""
    rng = np.random.default_rng(0)
    weights = {"bias": rng.normal(size=4), "kernel": rng.normal(size=(3, 4))}
    weights = jax.tree.map(lambda w: w.astype(np.float32), weights)
    scales = np.linspace(0.05, 2.0, steps)
    gradients = [
        jax.tree.map(lambda w, scale=scale: (scale * rng.normal(size=w.shape)).astype(np.float32), weights)
        for scale in scales
    ]
    return weights, {"bias": False, "kernel": True}, gradients


def our_updates(opt_type, weights, decays, gradients, matrices=MATRICES, **overrides):
    adam = ADAM if opt_type in ("adamw", "muon") else {}
    config = load(opt_type=opt_type, **{**SETTINGS, **adam, **overrides})
    whole = jax.tree.map(lambda w: NamedSharding(MESH, PartitionSpec(*(None,) * w.ndim)), weights)
    given = config.step, decays, matrices, whole
    rules = assign_rules(config.step, weights)

    @jax.jit
    def update(weights, state, gradient, hparams):
        optimizer = make_optimizer(*given, hparams, rules)
        clipped = clip(gradient, optax.tree.norm(gradient), hparams["clip"])
        updates, state = optimizer.update(clipped, state, weights)
        return optax.apply_updates(weights, updates), state

    state = make_optimizer(*given, hparams_at(config.step, config.run.steps, 0), rules).init(weights)
    for step, gradient in enumerate(gradients):
        weights, state = update(weights, state, gradient, hparams_at(config.step, config.run.steps, step))
    return weights, state


def pytorchs_updates(make, weights, gradients, threshold, given=("kernel", "bias")):
    config = load(**SETTINGS, **ADAM)
    parameters = {name: torch.nn.Parameter(torch.tensor(weight)) for name, weight in weights.items()}
    optimizer = make(*(parameters[name] for name in given))
    for step, gradient in enumerate(gradients):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        if threshold:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), threshold)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.step, config.run.steps, step)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}
