"""Muon's orthogonal updates of matrices, each computed unsharded on one of the devices that shard its weight."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from src.parallel.mesh import axes_of_dim
from src.step.matrices import MatrixDims
from src.step.optimizer_rules import OptimizerInputs

# A quintic: five rounds map singular values of about 0.002 to 1 to about 0.7 to 1.2, and multiply much smaller ones by
# about 480, which is 3.4445**5 (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
COEFFICIENTS, ROUNDS = (3.4445, -4.7750, 2.0315), 5
MeshAxes = tuple[str, ...]  # names of mesh axes
UPDATE_RMS = 0.2  # about that of AdamW's updates, so that one learning rate suits both (Liu et al. 2025, section 2.2)


def muon(chosen: Any, inputs: OptimizerInputs) -> list[optax.GradientTransformation]:
    """Replaces the momentum of each `chosen` matrix by roughly the nearest orthogonal matrix (Jordan et al. 2024).

    It is scaled by 0.2 and the root of its longer side, so that updates have the root mean square 0.2 (Liu et al. 2025,
    equation 4). All other weights' updates pass unchanged. On a mesh, all-to-alls turn the shards into an equal number
    of complete matrices per device, and back; otherwise XLA would compute all matrices on each device.
    """
    trace = optax.trace(inputs.hparams["muon_beta"], nesterov=True, accumulator_dtype=inputs.mu_dtype)

    def update(matrix: MatrixDims, is_chosen: bool, at: NamedSharding, x: jax.Array) -> jax.Array:
        if not is_chosen:
            return x
        groups = (matrix.batch, matrix.reduction, matrix.output)
        order = sum(groups, ())
        stacks, inputs, outputs = ([x.shape[dim] for dim in dims] for dims in groups)
        axes = [[axes_of_dim(at.spec[dim]) for dim in dims] for dims in groups]
        rows, columns = math.prod(inputs), math.prod(outputs)
        x_SIO = x.astype(jnp.float32).transpose(order).reshape(*stacks, rows, columns)
        if not stacks:  # a matrix outside the layers
            x_SIO = x_SIO[None]
        x_SIO = _on_whole_matrices(x_SIO, axes[0] or [()], sum(axes[1], ()), sum(axes[2], ()), at.mesh)
        x_SIO *= UPDATE_RMS * math.sqrt(max(rows, columns))
        back = sorted(range(x.ndim), key=order.__getitem__)
        return x_SIO.reshape(*stacks, *inputs, *outputs).transpose(back).astype(x.dtype)

    orthogonal = optax.stateless(
        lambda updates, _: jax.tree.map(update, inputs.matrices, chosen, inputs.shardings, updates)
    )
    return [optax.masked(trace, chosen), orthogonal]


def _on_whole_matrices(
    x_SIO: jax.Array, stack_axes: list[MeshAxes], row_axes: MeshAxes, column_axes: MeshAxes, mesh: Any
) -> jax.Array:
    """Orthogonalises matrices [..., I, O], with a stack dim sharded by the mesh axes of rows and columns meanwhile."""
    cut_by = (*row_axes, *column_axes)
    parts = [math.prod(mesh.shape[name] for name in (*axes, *cut_by)) for axes in stack_axes]
    dim = min(range(len(parts)), key=lambda dim: -x_SIO.shape[dim] % parts[dim] / x_SIO.shape[dim])
    # Pad with zero matrices to a multiple of the shards: devices without a real matrix would have nothing to do.
    filled = [(0, -size % parts[dim] if each == dim else 0) for each, size in enumerate(x_SIO.shape)]

    def placed(moved: MeshAxes, rows: MeshAxes, columns: MeshAxes) -> NamedSharding:
        stacks = [axes + moved if each == dim else axes for each, axes in enumerate(stack_axes)]
        return NamedSharding(mesh, PartitionSpec(*(names or None for names in (*stacks, rows, columns))))

    # Move one dim's axes at a time: XLA would move two at once by gathering the whole array.
    way = [placed((), row_axes, column_axes), placed(row_axes, (), column_axes), placed(cut_by, (), ())]
    y_SIO = jnp.pad(x_SIO, filled)
    for at in way:
        y_SIO = jax.lax.with_sharding_constraint(y_SIO, at)
    y_SIO = orthogonalise(y_SIO)
    for at in reversed(way):
        y_SIO = jax.lax.with_sharding_constraint(y_SIO, at)
    return y_SIO[tuple(map(slice, x_SIO.shape))]


def orthogonalise(x_SIO: jax.Array) -> jax.Array:
    """Makes roughly U V^T from each U S V^T [..., I, O].

    Singular values above about 0.002 of the matrix's Frobenius norm become about 0.7 to 1.2; 0 remains 0, and those
    between become less than 0.7.
    """
    if x_SIO.shape[-2] > x_SIO.shape[-1]:  # the matmuls below have the size of the shorter side
        return orthogonalise(x_SIO.swapaxes(-2, -1)).swapaxes(-2, -1)
    a, b, c = COEFFICIENTS
    x_SIO /= jnp.linalg.norm(x_SIO, axis=(-2, -1), keepdims=True) + 1e-7
    for _ in range(ROUNDS):
        square_SII = x_SIO @ x_SIO.swapaxes(-2, -1)
        x_SIO = a * x_SIO + (b * square_SII + c * square_SII @ square_SII) @ x_SIO
    return x_SIO
