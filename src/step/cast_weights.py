"""Casts layers' matrices to the matmul dtype before the loop over layers, so that it stacks gradients in that dtype."""

import jax.numpy as jnp

from src.model.params import Tree, by_path, nested
from src.step.plan import StepPlan


def cast_matrices(trainable: Tree, plan: StepPlan) -> Tree:
    """Casts to `dtype` the layers' trainable matrices that are used in matmuls of `dtype` once per step.

    A matmul casts its weight in any case, and XLA's TPU compiler casts all layers' weights before the loop (others do
    not, and would hold the copies for this). The loop then also stacks their gradients in `dtype`, in which matmuls
    produce them, instead of the weights' dtype. Not cast: weights whose gradients are summed because layers share them
    or micro-batches pass a pipeline; the router's weight, which is multiplied in float32; and weights to be rounded to
    8 bits.
    """
    if plan.quantization.kind or plan.execution.schedule or not plan.execution.early_gradients:
        return trainable
    matrices, groups = by_path(plan.matrices), plan.spec.layer_groups

    def is_cast(path: tuple) -> bool:
        in_layer = path[0] == "segments" and not groups[int(path[1])].shared
        return in_layer and matrices[path].hidden and path[-1] != "router"

    flat = by_path(trainable)
    return nested({path: w.astype(jnp.dtype(plan.spec.dtype)) if is_cast(path) else w for path, w in flat.items()})
