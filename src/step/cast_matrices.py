"""Casts the layers' matrices to the compute dtype once per step, before the loop over layers."""

from src.model.params import Tree, by_path, nested
from src.step.plan import StepPlan


def cast_in_layers(trainable: Tree, plan: StepPlan) -> Tree:
    """Casts the layers' trainable matrices to `dtype`, to stack their gradients in `dtype`.

    Matmuls cast their weights and produce gradients in `dtype` in any case, but the loop over layers would otherwise
    stack the gradients in the weights' dtype. XLA's TPU compiler makes all layers' casts before the loop anyway; other
    compilers do not, and would need memory for the copies. Not cast: weights that layers share, because their gradients
    are summed, and the router's weight, which is multiplied in float32.
    """
    flat, matrices, groups = by_path(trainable), by_path(plan.matrices), plan.spec.layer_groups
    in_layers = [path for path in flat if path[0] == "segments" and not groups[int(path[1])].shared]
    cast = [path for path in in_layers if matrices[path].hidden and path[-1] != "router"]
    return nested(flat | {path: flat[path].astype(plan.spec.dtype) for path in cast})
