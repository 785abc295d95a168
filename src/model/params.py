"""Declares each weight once, and derives initial values, abstract shapes, logical axes and roles.

Weights live in `flax.nnx` modules; the training step sees them as a plain nested dict of arrays.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array

from src.model.matmul import weight_matmul

# Only the rules in src/parallel/mesh.py shard arrays; Flax must not do so from a Variable's axis names.
nnx.use_eager_sharding(False)

Tree = dict[str, Any]
Axes = tuple[str | None, ...]  # logical axis of each dim; None: never sharded

STACKED = ("layers", "other_layers", "expert")  # logical axes of dims that stack several weights in one array
ADAPTER_DTYPE = "float32"  # also if weights are bfloat16, which rounds small updates away; adapters are small

# Flattens a nested dict to a dict by path, such as ("segments", 0, 0, "attention", "query"), and back.
by_path: Callable[[Mapping[str, Any]], dict[Any, Any]] = traverse_util.flatten_dict
nested = traverse_util.unflatten_dict


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """A model's weights, or one property of each, by their role in training: nested dicts with no entry in common."""

    trainable: Tree = dataclasses.field(default_factory=dict)
    frozen: Tree = dataclasses.field(default_factory=dict)  # no gradient and no optimizer state
    stats: Tree = dataclasses.field(default_factory=dict)  # updated from counts of the forward pass, not by a gradient

    @classmethod
    def split(cls, tree: Tree, roles: Tree) -> Self:
        """Sorts the entries of a nested dict of all weights by their roles."""
        by_role: dict[str, Tree] = {role: {} for role in ROLES}
        role_of = by_path(roles)
        for path, leaf in by_path(tree).items():
            by_role[role_of[path]][path] = leaf
        return cls(**{role: nested(flat) for role, flat in by_role.items()})

    def merged(self) -> Tree:
        """Merges all weights into one nested dict."""
        return join(self.trainable, self.frozen, self.stats)


ROLES = tuple(field.name for field in dataclasses.fields(Weights))


class Buffer(nnx.Variable):
    """A value that the forward pass reads, and a step may update, but not by a gradient (PyTorch's term)."""


class Fixed(nnx.Variable):
    """A value of the model that training leaves unchanged."""


class Rngs:
    """Makes a key for each weight in turn, as `nnx.Rngs` does; without a key, weights are declared, not sampled.

    `nnx.Rngs` keeps its count in a JAX array, and incrementing that takes longer than sampling a weight.
    """

    def __init__(self, key: Any = None) -> None:
        self.key = key
        self.count = 0

    def params(self) -> Array:
        """Makes the next weight's key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)


def weight(
    rngs: Rngs,
    shape: tuple[int, ...],
    axes: Axes,
    dtype: str,
    *,
    fan_in: tuple[int, ...] = (),
    scale: float = 1.0,
    constant: Any = None,
    decays: bool = True,
    trained: bool = True,
) -> nnx.Variable:
    """Declares one weight of one layer; `stack` prepends the dim of stacked layers.

    Values are `constant` (a number or an array), or normal, truncated at two standard deviations, with variance
    `scale**2` divided by the product of the sizes of `fan_in`, the dims that matmuls sum over (LeCun et al., Efficient
    BackProp, section 4.6). `axes` are the dims' logical axes (None: never sharded); `decays`: weight decay applies;
    `trained`: it is an `nnx.Param` that training may change, otherwise it is `Fixed`.
    """
    if constant is not None or rngs.key is None:
        value = jnp.full(shape, 0.0 if constant is None else constant, dtype)
    else:
        # 0.8796 is the standard deviation of a unit normal truncated at two.
        deviation = scale / 0.87962566 / math.sqrt(math.prod(shape[dim] for dim in fan_in))
        value = deviation * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    facts = {"out_sharding": axes, "fan_in": fan_in, "decays": decays}
    return nnx.Param(value.astype(dtype), **facts) if trained else Fixed(value.astype(dtype), **facts)


def matmul(x: Array, kernel: Any, einsum: str, precision: str | None = None) -> Array:
    """Computes the einsum of `x` and a plain, adapted or quantized weight, in `x`'s dtype; every projection uses it."""
    # Rename dims so that the weight's are in alphabetic order: einsum sums over letters in that order, and would
    # transpose the weight if its dims were in another.
    x_dims, _, others = einsum.partition(",")
    letters = dict.fromkeys(others.partition("->")[0] + x_dims)
    einsum = einsum.translate(str.maketrans(dict(zip(letters, string.ascii_lowercase, strict=False))))
    if hasattr(kernel, "multiply"):  # an adapted or a quantized weight
        return kernel.multiply(x, einsum, functools.partial(matmul, precision=precision))
    return weight_matmul(x, kernel.astype(x.dtype), einsum, precision)


def stack(make: Callable[[Rngs], nnx.Module], rngs: Rngs, repeats: int, axis: str) -> nnx.Module:
    """Makes `repeats` modules as one, whose weights get a first dim with the logical axis `axis`."""
    keys = None if rngs.key is None else jax.random.split(rngs.params(), repeats)
    graphdef, state = jax.vmap(lambda key: nnx.split(make(Rngs(key))), axis_size=repeats)(keys)

    def prepend_axis(variable: nnx.Variable) -> nnx.Variable:
        fan_in = tuple(dim + 1 for dim in variable.fan_in)
        return variable.copy(out_sharding=(axis, *variable.out_sharding), fan_in=fan_in)

    return nnx.merge(graphdef, _map(prepend_axis, state))


def abstract(make: Callable[[Rngs], nnx.Module]) -> tuple[nnx.GraphDef, Tree]:
    """Structure of `make`'s module, and its declarations: nested `nnx.Variable`s without arrays."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(Rngs())))
    return graphdef, nnx.to_pure_dict(state, lambda variable: variable)


def values(variables: Tree) -> Tree:
    """Arrays of a nested dict of `nnx.Variable`s; for declarations, their `jax.ShapeDtypeStruct`s."""
    return _map(lambda v: v.get_value(), variables)


def initial(make: Callable[[Rngs], nnx.Module], seed: int) -> Tree:
    """Initial weights as a nested dict; the values are the same on every mesh."""
    return nnx.to_pure_dict(nnx.state(make(Rngs(jax.random.key(seed)))))


def random_stream(seed: int, stream: int) -> Array:
    """Key for DROPOUT or ADAPTERS, independent of the keys of the initial weights."""
    return jax.random.fold_in(jax.random.key(seed), stream)


# Counted from the end, because `Rngs` gives the weights the keys fold_in(key(seed), 0), 1, 2 and so on.
DROPOUT, ADAPTERS = 2**32 - 1, 2**32 - 2


def dotted(path: tuple[Any, ...]) -> str:
    """Writes a weight's path as users type it: segments.0.0.attention.query."""
    return ".".join(map(str, path))


def matches(path: tuple[Any, ...], patterns: Sequence[str]) -> bool:
    """True if an fnmatch pattern matches a weight's dotted path or its last components; * matches dots too."""
    name = dotted(path)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)


def join(*trees: Tree) -> Tree:
    """Merges nested dicts; later ones win."""
    return nested({path: leaf for tree in trees for path, leaf in by_path(tree).items()})


def roles(declarations: Tree) -> Tree:
    """Role of each declared weight: `trainable`, `stats` for buffers, or `frozen` for fixed values."""
    role = {nnx.Param: "trainable", Buffer: "stats", Fixed: "frozen"}
    return _map(lambda v: role[type(v)], declarations)


def field(declarations: Tree, name: str) -> Tree:
    """One field of each declaration, nested: `out_sharding` (the logical axes), `decays` or `fan_in`."""
    return _map(lambda v: v.get_metadata()[name], declarations)


# Maps a function over a nested dict of `nnx.Variable`s.
_map = functools.partial(jax.tree.map, is_leaf=lambda node: isinstance(node, nnx.Variable))
