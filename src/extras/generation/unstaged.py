"""Reshards the weights of pipeline stages for decoding, in which each token goes through all layers."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from src.model.params import Weights
from src.parallel.mesh import axes_of_dim
from src.parallel.replicas import add_mesh_axes
from src.step.plan import StepPlan


def unstaged_weights(plan: StepPlan, weights: Weights) -> Weights:
    """Reshards the weights that are split over pipeline stages, by `unstaged`; other weights are not copied."""
    leaves, structure = jax.tree.flatten(weights)
    axes = structure.flatten_up_to(plan.split(plan.axes))
    staged = {index: leaves[index] for index, dims in enumerate(axes) if dims[:1] == ("layers",)}
    shardings = {index: unstaged(leaf.sharding, leaf.shape) for index, leaf in staged.items()}
    # Pass only these weights to jit, which copies its inputs. (`device_put` would move them through the host.)
    moved = jax.jit(lambda staged: staged, out_shardings=shardings)(staged)
    return structure.unflatten(moved.get(index, leaf) for index, leaf in enumerate(leaves))


def unstaged(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Moves the stages' mesh axes from the layer dim to another dim; without a divisible one, drops them."""
    # Every token needs all layers: if the layer dim stayed sharded, every device would gather all layers.
    unsplit = sharding.update(spec=PartitionSpec(None, *sharding.spec[1:]))
    return add_mesh_axes(unsplit, (1, *shape[1:]), axes_of_dim(sharding.spec[0]))
