"""Computes digests of arrays, which reveal that a checkpoint's bits have changed."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PIECE = 2**18  # elements that `_digest_in_pieces` holds as uint32 at a time
_GOLDEN = np.uint32(0x9E3779B1)  # 2**32 / golden ratio, odd: spreads positions over all bits


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Digests each array as uint32[], independent of its device, memory and sharding."""
    found: dict[str, jax.Array] = {}
    on_devices: dict[str, jax.Array] = {}
    for name, x in arrays.items():
        is_whole = isinstance(x, jax.Array) and len(x.sharding.device_set) == 1
        if is_whole and next(iter(x.devices())).platform == "cpu":
            found[name] = _digest_in_pieces(np.asarray(x))
        elif isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
            # One after the other, because the devices may lack the memory for all of them.
            found[name] = jax.block_until_ready(digest_from_host(x))
        else:
            on_devices[name] = x
    return found | _digests_on_devices(on_devices)


@jax.jit
def _digests_on_devices(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: digest(array) for name, array in arrays.items()}


@jax.jit
def digest_from_host(x: jax.Array) -> jax.Array:
    """Digests an array in pinned host memory: devices compute nothing there, so it is copied to them."""
    return digest(jax.device_put(x, jax.memory.Space.Device))


def _digest_in_pieces(x: np.ndarray) -> jax.Array:
    """Computes `digest` with NumPy, because XLA's CPU backend would hold all bits of `x` at once, as uint32."""
    flat, total = x.reshape(-1), 0
    for start in range(0, x.size, PIECE):
        piece = flat[start : start + PIECE]
        bits = piece.view(f"u{x.dtype.itemsize}").astype(np.uint32)
        position = np.arange(start, start + piece.size).astype(np.uint32)  # modulo 2**32
        total += int(np.sum(_scramble(bits ^ (position * _GOLDEN)), dtype=np.uint64))
    return jnp.uint32(total % 2**32)


def digest(x: jax.Array) -> jax.Array:
    """Sums, modulo 2**32, a hash of (bits, position) over the elements of `x`: uint32[].

    The sum does not depend on the order in which devices add; the position in the hash reveals swapped elements. At a
    given position different bits have different hashes, so a change of one element is always detected; any other change
    is missed with a probability of about 2**-32. Elements have 8, 16 or 32 bits.
    """
    bits = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    position = jnp.zeros(x.shape, jnp.uint32)  # row-major, modulo 2**32, from iotas, which XLA shards for free
    for dim in range(x.ndim):
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    return jnp.sum(_scramble(bits.astype(jnp.uint32) ^ (position * _GOLDEN)), dtype=jnp.uint32)


def _scramble(x: Any) -> Any:
    """Applies MurmurHash3's finalizer, a bijection of uint32: an input bit flips each output bit half of the time."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
