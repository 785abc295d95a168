"""Casts layers' matrices to the dtype of products before the loop over layers, and so stacks their gradients in it."""

import jax.numpy as jnp

from src.model.params import Tree, by_path, nested
from src.step.plan import StepPlan


def cast_matrices(trainable: Tree, plan: StepPlan) -> Tree:
    """Returns the trainable weights with those matrices of layers in `dtype` that enter products in it once a step.

    A product casts its weight in any case, and XLA for TPUs casts all layers' before the loop (others do not, and would
    hold the copies for this). Then the loop also stacks their gradients in `dtype`, in which products make them, and
    not in the weights'. What is left as it is: a weight whose gradients are added up, because layers share it or
    micro-batches pass a pipeline, the router's, which is multiplied in float32, and weights to be rounded to 8 bits.
    """
    if plan.quantization.kind or plan.execution.schedule or not plan.execution.early_gradients:
        return trainable
    matrices, groups = by_path(plan.matrices), plan.spec.layer_groups

    def is_cast(path: tuple) -> bool:
        in_layer = path[0] == "segments" and not groups[int(path[1])].shared
        return in_layer and matrices[path].hidden and path[-1] != "router"

    flat = by_path(trainable)
    return nested({path: w.astype(jnp.dtype(plan.spec.dtype)) if is_cast(path) else w for path, w in flat.items()})
