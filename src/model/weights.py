"""One declaration a weight, and all that derives from it: initial values, abstract shapes, axes, parameter counts.

Weights live in `flax.nnx` modules; the training step sees them as a plain nested dict of arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Arrays are placed by src/mesh.py's rules alone, not by Flax from a Variable's axis names.
nnx.use_eager_sharding(False)

Tree = dict[str, Any]


class Statistic(nnx.Variable):
    """A value that the forward pass reads and no gradient changes."""


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: str,
    *,
    fan_in: tuple[int, ...] = (),
    scale: float = 1.0,
    constant: float | None = None,
    decays: bool = True,
) -> nnx.Param:
    """Declares one weight.

    Args:
        rngs: the source of randomness of the module that owns it.
        shape: its dims, without the layers that share its declaration (`stack` prepends those).
        axes: the logical axis of each dim, or None for one that is never sharded.
        dtype: of the stored weight.
        fan_in: the dims it is summed over. Values are normal, cut at two standard deviations, with variance
            `scale**2` over the product of these dims (LeCun et al., Efficient BackProp, section 4.6).
        scale: multiplies the standard deviation.
        constant: every value, in place of random ones.
        decays: whether weight decay applies to it.
    """
    if constant is not None:
        value = jnp.full(shape, constant, dtype)
    else:
        # 0.8796 is the standard deviation of a unit normal cut at two.
        deviation = scale / 0.87962566 / math.sqrt(math.prod(shape[dim] for dim in fan_in))
        value = deviation * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value.astype(dtype), out_sharding=axes, fan_in=fan_in, decays=decays)


def matmul(x: jax.Array, kernel: jax.Array, einsum: str) -> jax.Array:
    """Every projection of the model: `x` times a weight in `x`'s dtype, as `einsum` says."""
    return jnp.einsum(einsum, x, kernel.astype(x.dtype))


def grouped_matmul(x_MX: jax.Array, kernel: jax.Array, rows_E: jax.Array) -> jax.Array:
    """Rows of `x` times the weight of their expert: [M, X] and [E, X, ...] to [M, ...].

    The first rows_E[0] rows are expert 0's, the next rows_E[1] expert 1's, and so on.
    """
    kernel_EXY = kernel.astype(x_MX.dtype).reshape(*kernel.shape[:2], -1)
    return jax.lax.ragged_dot(x_MX, kernel_EXY, rows_E).reshape(-1, *kernel.shape[2:])


def stack(make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, repeats: int) -> nnx.Module:
    """`repeats` modules as one, each of whose weights has a first dim of the logical axis "layers"."""
    keys = jax.random.split(rngs.params(), repeats)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys)

    def prepend_layers(variable: nnx.Variable) -> nnx.Variable:
        metadata = variable.get_metadata()
        axes, fan_in = metadata["out_sharding"], metadata["fan_in"]
        return variable.copy(out_sharding=("layers", *axes), fan_in=tuple(dim + 1 for dim in fan_in))

    state = jax.tree.map(prepend_layers, state, is_leaf=_is_variable)
    graphdef, _ = abstract(make)
    return nnx.merge(graphdef, state)


def abstract(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of `make`'s module and its weights' declarations, without a single array."""
    return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))


def initial(make: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Tree:
    """The initial weights as a nested dict; the same values on every mesh."""
    return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=jax.random.key(seed)))))


def field(declarations: nnx.State, name: str) -> Tree:
    """A nested dict of one field of each declaration: `out_sharding` (the logical axes), `decays`, `fan_in`."""
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()[name], declarations, is_leaf=_is_variable))


def parts(declarations: nnx.State) -> Tree:
    """A nested dict of the part of the state that each weight belongs to: `trainable`, or `stats` for statistics."""
    part = {nnx.Param: "trainable", Statistic: "stats"}
    return nnx.to_pure_dict(jax.tree.map(lambda v: part[type(v)], declarations, is_leaf=_is_variable))


def select(tree: Tree, parts: Tree, part: str) -> Tree:
    """The entries of a nested dict that belong to a part; what has none is left out."""
    chosen = {}
    for name, entry in tree.items():
        if isinstance(entry, dict):
            if below := select(entry, parts[name], part):
                chosen[name] = below
        elif parts[name] == part:
            chosen[name] = entry
    return chosen


def join(*trees: Tree) -> Tree:
    """One nested dict of several that have no entry in common: what `select` took apart."""
    joined: Tree = {}
    for tree in trees:
        for name, entry in tree.items():
            joined[name] = join(joined.get(name, {}), entry) if isinstance(entry, dict) else entry
    return joined


def shapes(declarations: nnx.State) -> Tree:
    """A nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(declarations)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
