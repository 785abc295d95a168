"""The caches of a whole decoder, nested as its layers are."""

import jax.numpy as jnp

from src.model.block import mixer
from src.model.cache import Cache, CacheArray
from src.model.spec import LayerSpec, ModelSpec


def cache_arrays(spec: ModelSpec, rows: int, length: int) -> list[list[dict[str, CacheArray]]]:
    """Declares the caches for `rows` texts of up to `length` tokens, by layer group and pattern position.

    Each array has a first dim of the group's repeats.
    """

    def declare(layer: LayerSpec, repeats: int) -> dict[str, CacheArray]:
        arrays = mixer(layer).cache_arrays(layer, rows, length)
        return {name: CacheArray((repeats, *shape), (None, *axes)) for name, (shape, axes) in arrays.items()}

    return [[declare(layer, group.repeats) for layer in group.pattern] for group in spec.layer_groups]


def empty_caches(spec: ModelSpec, rows: int, length: int) -> list[list[Cache]]:
    """Makes the caches that `cache_arrays` declares, of zeros in the compute dtype."""
    return [
        [{name: jnp.zeros(array.shape, spec.dtype) for name, array in layer.items()} for layer in pattern]
        for pattern in cache_arrays(spec, rows, length)
    ]
