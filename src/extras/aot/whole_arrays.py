"""Reports weights and optimizer state that are not sharded, if they take much of a device's memory."""

import math
from collections import Counter
from typing import Any

import jax

from src.parallel.mesh import MeshLayout, mesh_axes_of
from src.step.plan import StepPlan
from src.step.state import TrainState

SHARE = 0.05  # of a device's memory: replicated arrays are reported above it


def whole_arrays(state: Any, layout: MeshLayout) -> Counter[str]:
    """Sums the bytes on a device of arrays that no axis of `_row_axes` shards, by the last two parts of their names.

    `state` is a pytree of arrays with shardings, with the weights in nested dicts by name. Arrays in host memory, and
    counts of updates, are left out.
    """
    axes, sizes = _row_axes(layout), Counter[str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        at = leaf.sharding
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]  # empty for a count
        if axes and names and not mesh_axes_of(at.spec).intersection(axes) and at.memory_kind != "pinned_host":
            sizes[".".join(names[-2:])] += math.prod(at.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sizes


def whole_lines(plan: StepPlan, state: TrainState, capacity: int | None) -> list[str]:
    """Returns lines for the user about replicated arrays.

    Latent attention's weights are reported in any case; all replicated arrays, only if they take more than `SHARE` of
    `capacity`, a device's memory in bytes (None: unknown).
    """
    layout, lines = plan.layout, []
    if any(layer.attention_type == "mla" for layer in plan.spec.layers):
        from src.model.latent_attention import undivided_latents

        problems = undivided_latents(layout, plan.spec)
        lines += [f"{'; '.join(problems)}: these weights of latent attention are whole on every device"] * bool(
            problems
        )
    sizes = whole_arrays((state.weights, state.opt, state.ema), layout)
    total = sum(sizes.values())
    if capacity and total > SHARE * capacity:
        largest = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.most_common(4))
        lines.append(
            f"{total / 2**30:.2f} GiB of weights and optimizer state, {total / capacity:.0%} of a device's memory, are "
            f"whole on every device along {', '.join(_row_axes(layout))}, the largest {largest}: shard a dim of each "
            "(logical_axis_rules), or raise ici_fsdp_parallelism"
        )
    return lines


def _row_axes(layout: MeshLayout) -> list[str]:
    """Returns the mesh axes longer than 1 that split the tokens; if there are none, all axes longer than 1."""
    axes = [name for name, size in layout.mesh.shape.items() if size > 1]
    return [name for name in axes if name in layout.rules["batch"] + layout.rules["length"]] or axes
