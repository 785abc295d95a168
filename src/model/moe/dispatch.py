"""Brings tokens to the experts that they chose, on whichever device those are, and what these make of them back.

All of it runs on one device's parts, within a `shard_map`. P peers, the devices along the mesh axes of `expert`, have
E / P experts each. Letters: X tokens of a device, k experts per token, M = X k choices, R rows of a buffer, P peers,
C rows an expert has in a buffer; the others are in src/model/spec.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SLACK = 1.25  # rows that one exchange has room for on a device, over those that arrive when all experts have as many


@dataclass(frozen=True)
class Peers:
    """The devices that share out the experts among them."""

    axes: tuple[str, ...]  # the mesh axes along which they differ; none: each device has all experts
    count: int  # P
    in_step: tuple[str, ...]  # the mesh axes along which, and along `axes`, devices go through as many windows
    platform: str


class Slices(NamedTuple):
    """What a device sends to its peers, and how much it gets, for each expert: int32 [E] each.

    Those of the first peer's experts come first. On the way back they are P x E / P: what each peer had sent for each
    of this device's experts.
    """

    sent_from: jax.Array  # the first row, here
    sent: jax.Array  # rows
    sent_to: jax.Array  # the first row, there
    received: jax.Array  # rows


Rows = tuple[jax.Array, jax.Array | None]  # of tokens, and what to multiply with on the way; None: with nothing


def dropless(
    tokens: Rows,
    experts_Xk: jax.Array,
    kernels: Any,
    feed: Callable[[Rows, Any, jax.Array], jax.Array],
    peers: Peers,
) -> jax.Array:
    """The sum of what each token's experts make of it, [X, D] to [X, D]; none is lost, however they choose.

    Choices are sorted by expert, so that a device's experts find each its rows in one block. Between peers, the rows
    that a device gets, sorted by expert and then by sender, pass through a buffer of R rows window by window: the first
    R of them, the next R, and so on. R is `SLACK` times the M rows that one gets when all experts are chosen as often,
    or all that could come, P X min(k, E / P), if that is less. So one window does for balanced experts, and its arrays
    are `SLACK` times as large as without peers; tokens that all chose one peer's experts take P / SLACK windows, one
    after the other, and no more memory. Windows after the first are computed again in the backward pass.

    A token moves 2 k D numbers of the compute dtype forward and as many backward, less the 1 / P of them that stay.
    What rematerialisation computes again moves k D, and where more than the residual needs the output, k D more.

    Args:
        tokens: this device's [X, D], and the weights [X, k] of their choices.
        experts_Xk: the experts of each; E: none, and 0 comes back.
        kernels: the weights of this device's experts.
        feed: what those make of rows that are sorted by expert, and of which each has so many.
        peers: who has the other experts.
    """
    X, k = experts_Xk.shape
    chosen_M, experts = experts_Xk.reshape(-1), _expert_count(kernels) * peers.count
    order_R = jnp.argsort(chosen_M)
    rows_E = jnp.bincount(chosen_M, length=experts).astype(jnp.int32)
    # Rows past the last expert's are none's: what comes out of them, and as their gradient, is undefined.
    choice_R = jnp.where(jnp.arange(X * k) < jnp.sum(rows_E), order_R, X * k)
    row_M = jnp.where(chosen_M < experts, jnp.argsort(order_R), X * k)
    rows = _spread_all(tokens, choice_R, row_M, k)
    if peers.count == 1:
        out_RD = feed(rows, kernels, rows_E)
    else:
        most = peers.count * X * min(k, experts // peers.count)
        room = min(most, math.ceil(SLACK * X * k))
        rows_PE = jax.lax.all_gather(rows_E, peers.axes)
        out_RD = _window(rows, kernels, rows_PE, 0, feed, room, peers)
        if room < most:
            out_RD = _later_windows(out_RD, rows, kernels, rows_PE, feed, room, peers)
    return combine(out_RD, row_M, choice_R, k)


def _spread_all(tokens: Rows, choice_R: jax.Array, row_M: jax.Array, k: int) -> Rows:
    x_XD, weights_Xk = tokens
    weights_R1 = None if weights_Xk is None else spread(weights_Xk.reshape(-1, 1), choice_R, row_M, 1)
    return spread(x_XD, choice_R, row_M, k), weights_R1


def _window(
    rows: Rows, kernels: Any, rows_PE: jax.Array, window: jax.Array | int, feed: Callable, room: int, peers: Peers
) -> jax.Array:
    """What experts make of those of this device's sorted rows that are in their devices' windows; 0 of the others."""
    there, back, rows_e = slices(rows_PE, window, room, jax.lax.axis_index(peers.axes))
    arrived = jax.tree.map(lambda each: exchange(each, there, back, room, peers), rows)
    return exchange(feed(arrived, kernels, rows_e), back, there, len(rows[0]), peers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _later_windows(
    out_RD: jax.Array, rows: Rows, kernels: Any, rows_PE: jax.Array, feed: Callable, room: int, peers: Peers
) -> jax.Array:
    """`out_RD` with what the windows after the first add: as many as the device with the most rows needs."""

    def add(window: jax.Array, out_RD: jax.Array) -> jax.Array:
        return out_RD + _window(rows, kernels, rows_PE, window, feed, room, peers)

    return jax.lax.fori_loop(1, _windows(rows_PE, room, peers), add, out_RD)


def _windows_forward(
    out_RD: jax.Array, rows: Rows, kernels: Any, rows_PE: jax.Array, feed: Callable, room: int, peers: Peers
) -> tuple[jax.Array, Any]:
    return _later_windows(out_RD, rows, kernels, rows_PE, feed, room, peers), (rows, kernels, rows_PE)


def _windows_backward(feed: Callable, room: int, peers: Peers, kept: Any, gradient_RD: jax.Array) -> tuple[Any, ...]:
    rows, kernels, rows_PE = kept

    def add(window: jax.Array, sums: Any) -> Any:
        _, to_inputs = jax.vjp(lambda x, w: _window(x, w, rows_PE, window, feed, room, peers), rows, kernels)
        return jax.tree.map(jnp.add, sums, to_inputs(gradient_RD))

    # Of weights too in the compute dtype, as what a window adds is: sums in float32 would take their room without any
    # later window (docs/log.md).
    zeros = jax.tree.map(jnp.zeros_like, (rows, kernels))
    return gradient_RD, *jax.lax.fori_loop(1, _windows(rows_PE, room, peers), add, zeros), None


_later_windows.defvjp(_windows_forward, _windows_backward)


def _windows(rows_PE: jax.Array, room: int, peers: Peers) -> jax.Array:
    """How many windows devices go through together: a slice's meet in collectives, other slices need not wait."""
    most = jnp.max(jnp.sum(rows_PE.reshape(peers.count, peers.count, -1), axis=(0, 2)))
    return jax.lax.pmax(-(-most // room), tuple(dict.fromkeys(peers.axes + peers.in_step)))


def slices(rows_PE: jax.Array, window: jax.Array | int, room: int, here: jax.Array) -> tuple[Slices, Slices, jax.Array]:
    """Who sends which rows whereto in a window.

    Args:
        rows_PE: how many rows each peer has for each expert.
        window: its number.
        room: its rows.
        here: this device's number among its peers.

    Returns:
        The way to the experts, the way back, and the rows [E / P] that this device's experts get.
    """
    P, E = rows_PE.shape
    rows_EP = rows_PE.T
    at_home_PR = rows_EP.reshape(P, -1)  # in the order in which a device's rows stand: by expert, then by sender
    arrives_EP = (jnp.cumsum(at_home_PR, axis=1) - at_home_PR).reshape(E, P)
    leaves_EP = (jnp.cumsum(rows_PE, axis=1) - rows_PE).T
    begin = window * room
    first_EP, end_EP = (jnp.clip(border - arrives_EP, 0, rows_EP) for border in (begin, begin + room))
    sent_EP, from_EP = end_EP - first_EP, leaves_EP + first_EP
    to_EP = jnp.clip(arrives_EP + first_EP - begin, 0, room)

    def sender(x_EP: jax.Array) -> jax.Array:
        return jnp.take(x_EP, here, axis=1)

    def receiver(x_EP: jax.Array) -> jax.Array:
        return jnp.take(x_EP.reshape(P, -1, P), here, axis=0).T.reshape(-1)

    there = Slices(sender(from_EP), sender(sent_EP), sender(to_EP), receiver(sent_EP))
    back = Slices(receiver(to_EP), receiver(sent_EP), receiver(from_EP), sender(sent_EP))
    return there, back, jnp.sum(receiver(sent_EP).reshape(P, -1), axis=0)


def exchange(rows_RD: jax.Array, there: Slices, back: Slices, room: int, peers: Peers) -> jax.Array:
    """The `room` rows that a device gets from its peers when each sends `there`; 0 where it gets none.

    `back` would send each row to where it came from, and so does the gradient.
    """
    return _exchange(rows_RD, there, back, (len(rows_RD), room), peers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _exchange(rows_RD: jax.Array, there: Slices, back: Slices, sizes: tuple[int, int], peers: Peers) -> jax.Array:
    room = sizes[1]
    if peers.platform == "cpu":
        return _exchange_by_gathering(rows_RD, there, room, peers)
    into_RD = jnp.zeros((room, rows_RD.shape[1]), rows_RD.dtype)
    return jax.lax.ragged_all_to_all(rows_RD, into_RD, *there, axis_name=peers.axes)


def _exchange_forward(
    rows_RD: jax.Array, there: Slices, back: Slices, sizes: tuple[int, int], peers: Peers
) -> tuple[jax.Array, tuple[Slices, Slices]]:
    return _exchange(rows_RD, there, back, sizes, peers), (there, back)


def _exchange_backward(
    sizes: tuple[int, int], peers: Peers, kept: tuple[Slices, Slices], gradient_RD: jax.Array
) -> tuple[jax.Array, None, None]:
    there, back = kept
    return _exchange(gradient_RD, back, there, sizes[::-1], peers), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _exchange_by_gathering(rows_RD: jax.Array, there: Slices, room: int, peers: Peers) -> jax.Array:
    """`ragged_all_to_all` where XLA has none, on CPUs: every device sees every row and takes its own."""
    here, rows = jax.lax.axis_index(peers.axes), len(rows_RD)
    all_PRD = jax.lax.all_gather(rows_RD, peers.axes)

    def to_here(each: jax.Array) -> jax.Array:
        return jax.lax.all_gather(each, peers.axes).reshape(peers.count, peers.count, -1, 1)[:, here]

    begin_Pe1, sent_Pe1, to_Pe1 = to_here(there.sent_from), to_here(there.sent), to_here(there.sent_to)
    row_R = jnp.arange(rows)
    in_slice_PeR = (row_R >= begin_Pe1) & (row_R < begin_Pe1 + sent_Pe1)
    moved_PR = row_R + jnp.sum(in_slice_PeR * (to_Pe1 - begin_Pe1), axis=1)
    to_PR = jnp.where(jnp.any(in_slice_PeR, axis=1), moved_PR, room)
    into_RD = jnp.zeros((room, rows_RD.shape[1]), rows_RD.dtype)
    return into_RD.at[to_PR.reshape(-1)].set(all_PRD.reshape(-1, rows_RD.shape[1]), mode="drop")


def with_capacity(
    tokens: Rows, places: "Places", kernels: Any, feed: Callable[[Rows, Any], jax.Array], peers: Peers
) -> jax.Array:
    """The sum of what those of each token's experts make of it where it has a place, [X, D] to [X, D].

    A token moves 2 k D numbers of the compute dtype, times the capacity factor, forward and as many backward, less the
    1 / P of them that stay.
    """

    def to_experts(rows: jax.Array) -> jax.Array:
        rows = rows.reshape(places.experts, -1, rows.shape[1])
        return jax.lax.all_to_all(rows, peers.axes, 0, 1, tiled=True) if peers.count > 1 else rows

    k = len(places.row_M) // len(tokens[0])
    rows = jax.tree.map(to_experts, _spread_all(tokens, places.choice_R, places.row_M, k))
    out_ECD = feed(rows, kernels)
    if peers.count > 1:
        out_ECD = jax.lax.all_to_all(out_ECD, peers.axes, 1, 0, tiled=True)
    return combine(out_ECD.reshape(-1, out_ECD.shape[2]), places.row_M, places.choice_R, k)


class Places(NamedTuple):
    """Which choice has which row of a buffer [E, B, C]."""

    choice_R: jax.Array  # M: none
    row_M: jax.Array  # R: none
    experts: int

    def kept_M(self) -> jax.Array:
        """Whether each choice has one."""
        return self.row_M < len(self.choice_R)


def take_places(experts_BTk: jax.Array, real_BT: jax.Array, experts: int, capacity: int) -> Places:
    """The `capacity` places that each expert has in each row of the batch, given to those who come first.

    First choices come before second ones, and among them tokens in their order (GShard, arXiv:2006.16668, algorithm 1).
    Padding takes none.
    """
    B, T, k = experts_BTk.shape
    by_rank_BM = jnp.where(real_BT[..., None], experts_BTk, experts).swapaxes(1, 2).reshape(B, k * T)
    order_BM = jnp.argsort(by_rank_BM, axis=1)
    chosen_BM = jnp.take_along_axis(by_rank_BM, order_BM, axis=1)
    rows_BE = jnp.sum(jax.nn.one_hot(by_rank_BM, experts, dtype=jnp.int32), axis=1)
    first_BE = jnp.cumsum(rows_BE, axis=1) - rows_BE
    # Of each place, the choice: that many after its expert's first.
    place_C = jnp.arange(capacity)
    sorted_BEC = first_BE[..., None] + place_C
    rank_BEC = jnp.take_along_axis(order_BM, jnp.minimum(sorted_BEC, k * T - 1).reshape(B, -1), axis=1)
    choice_BM = (jnp.arange(B)[:, None] * T + rank_BEC % T) * k + rank_BEC // T
    taken_BEC = place_C < rows_BE[..., None]
    choice_BEC = jnp.where(taken_BEC, choice_BM.reshape(taken_BEC.shape), B * T * k)
    # Of each choice, the place.
    first_BM = jnp.take_along_axis(first_BE, jnp.minimum(chosen_BM, experts - 1), axis=1)
    place_BM = jnp.arange(k * T) - first_BM
    row_BM = (chosen_BM * B + jnp.arange(B)[:, None]) * capacity + place_BM
    row_BM = jnp.where((place_BM < capacity) & (chosen_BM < experts), row_BM, experts * B * capacity)
    row_BM = jnp.take_along_axis(row_BM, jnp.argsort(order_BM, axis=1), axis=1)
    return Places(choice_BEC.swapaxes(0, 1).reshape(-1), row_BM.reshape(B, k, T).swapaxes(1, 2).reshape(-1), experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x_XD: jax.Array, choice_R: jax.Array, row_M: jax.Array, k: int) -> jax.Array:
    """A buffer [R, D] of the tokens whose choices stand in it, k choices each.

    Forward and backward are gathers, for adding to scattered rows is slow on every accelerator.

    Args:
        x_XD: the tokens.
        choice_R: the choice that each row of the buffer is for; M: none, and the row is 0.
        row_M: the inverse: the row of each choice; R: none.
        k: choices of a token, which follow each other.
    """
    return x_XD.at[choice_R // k].get(mode="fill", fill_value=0)


def _spread_forward(
    x_XD: jax.Array, choice_R: jax.Array, row_M: jax.Array, k: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return spread(x_XD, choice_R, row_M, k), (choice_R, row_M)


def _spread_backward(k: int, kept: tuple[jax.Array, jax.Array], gradient_RD: jax.Array) -> tuple[Any, None, None]:
    choice_R, row_M = kept
    return combine(gradient_RD, row_M, choice_R, k), None, None


spread.defvjp(_spread_forward, _spread_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(rows_RD: jax.Array, row_M: jax.Array, choice_R: jax.Array, k: int) -> jax.Array:
    """The sums [X, D] of each token's rows of a buffer [R, D]: `spread`, transposed. The arguments are its."""
    rows_MD = rows_RD.at[row_M].get(mode="fill", fill_value=0)
    return jnp.sum(rows_MD.reshape(-1, k, rows_RD.shape[1]), axis=1)


def _combine_forward(
    rows_RD: jax.Array, row_M: jax.Array, choice_R: jax.Array, k: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return combine(rows_RD, row_M, choice_R, k), (row_M, choice_R)


def _combine_backward(k: int, kept: tuple[jax.Array, jax.Array], gradient_XD: jax.Array) -> tuple[Any, None, None]:
    row_M, choice_R = kept
    return spread(gradient_XD, choice_R, row_M, k), None, None


combine.defvjp(_combine_forward, _combine_backward)


def _expert_count(kernels: Any) -> int:
    return len(jax.tree.leaves(kernels)[0])
