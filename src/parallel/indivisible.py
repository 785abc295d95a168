"""Makes the errors for sizes that do not divide over a mesh."""

from collections.abc import Mapping, Sequence

from src.config.schema import size_key
from src.parallel.slices import any_of
from src.system.errors import Unsupported


def indivisible_weights(problems: Mapping[str, str], mesh_axes: Sequence[str]) -> Unsupported:
    """Names all indivisible dims: `problems` maps a description of each to its logical axis; `mesh_axes` shard them."""
    keys = list(dict.fromkeys(size_key(kind, name) for name in mesh_axes for kind in ("ici", "dcn")))
    rules = dict.fromkeys(f"logical_axis_rules.{axis}=[]" for axis in problems.values())
    return Unsupported(
        f"Weights do not divide over the mesh: {'; '.join(problems)}. Change these sizes, or {any_of(keys)}, "
        f"or do not shard these dims: {', '.join(rules)}."
    )


def indivisible_batch(key: str, per_device: float, devices: int, shards: int, by: str) -> Unsupported:
    """Names the batch size `key`, whose rows are not whole or not divisible by the `shards` shards of the axes `by`."""
    into = f"does not divide into {shards} shards ({by})" if shards > 1 else "is not whole"
    return Unsupported(
        f"{key}={per_device:g} on {devices} device{'s' * (devices > 1)} is {per_device * devices:g} rows a "
        f"micro-batch, which {into}. Use a multiple of {shards / devices:g}."
    )


def indivisible_length(length: int, tiles: int, shards: int, by: str, keys: str) -> Unsupported:
    """Says which lengths divide into `tiles` on each of the `shards` shards of the mesh axes `by`, set by `keys`."""
    return Unsupported(
        f"max_target_length={length} is not divisible by num_vocab_tiling={tiles} times the number of devices that "
        f"share a sequence between blocks ({by}): use a multiple of {tiles * shards}, or another {keys}"
    )
