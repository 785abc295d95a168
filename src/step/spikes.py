"""Detects updates whose loss or gradient norm is far above the recent ones, so that they can be skipped."""

import jax
import jax.numpy as jnp

from src.model.params import Tree


def empty_window(interval: int) -> Tree:
    """Makes an empty window for the losses and gradient norms of `interval` steps.

    It also counts the steps that entered it so far, and the skipped updates.
    """
    values = {"loss": jnp.zeros(interval), "grad_norm": jnp.zeros(interval)}
    return values | {"count": jnp.zeros((), jnp.int32), "skipped": jnp.zeros((), jnp.int32)}


def skip_spikes(
    window: Tree, loss: jax.Array, grad_norm: jax.Array, finite: jax.Array, factor: jax.Array
) -> tuple[jax.Array, Tree, dict[str, jax.Array]]:
    """Decides whether to make an update; returns that, the window including this step, and metrics.

    The metrics are `spike`, whether this step is one, and `updates_skipped`, the number so far. The update is skipped
    if loss or gradient norm exceeds the window's mean by more than `factor` times its standard deviation (of a sample,
    over N - 1), once half of the window is filled: the rule of OLMo-core and MaxText. A spike itself enters the window,
    so that a loss that stays high soon stops counting as one. Without `finite` the update is skipped too, and its
    values do not enter.
    """
    interval = window["loss"].size
    filled = jnp.minimum(window["count"], interval)
    is_filled = jnp.arange(interval) < filled
    new, spike = {}, jnp.bool_(False)
    for name, value in (("loss", loss), ("grad_norm", grad_norm)):
        mean = jnp.mean(window[name], where=is_filled)
        deviation = jnp.std(window[name], where=is_filled, ddof=1)
        spike |= value > mean + factor * deviation  # false if either is NaN, as for an empty window
        entered = window[name].at[window["count"] % interval].set(value)
        new[name] = jnp.where(finite, entered, window[name])
    spike &= finite & (filled >= max(2, interval // 2))
    accepted = finite & ~spike
    new |= {"count": window["count"] + finite, "skipped": window["skipped"] + ~accepted}
    return accepted, new, {"spike": spike, "updates_skipped": new["skipped"]}
