"""Sends tokens to the experts that they chose, on any device, and combines the experts' outputs.

Everything here runs on one device's arrays, within a `shard_map`. The P devices of an expert group, along the mesh axes
of `expert`, have E / P experts each. Letters: X tokens of a device, k experts per token, M = X k choices, R rows of a
buffer, C rows that an expert has in a buffer; the others are in src/model/spec.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from src.model.matmul import with_gradient

BUFFER_SLACK = 1.25  # rows of an exchange buffer, relative to the rows that arrive under balanced load


class ExpertGroup(NamedTuple):
    """Devices that hold all experts between them."""

    axes: tuple[str, ...]  # the mesh axes along which they differ; empty: each device has all experts
    count: int  # P
    in_step: tuple[str, ...]  # mesh axes: devices along these and `axes` run the same number of windows
    platform: str


class ExchangePlan(NamedTuple):
    """The rows that a device sends to its group and the rows that it receives: int32 [E] each, device 0 first."""

    sent_from: Array  # first row, on this device
    sent: Array  # number of rows
    sent_to: Array  # first row, on the receiver
    received: Array  # number of rows


# Tokens [X, D] with router weights [X, k], or buffer rows [..., D] with theirs [..., 1]. Experts multiply their hidden
# units by the weights; None: unweighted.
Rows = tuple[Array, Array | None]


@jax.named_scope("dispatch")
def dropless(
    tokens: Rows, experts_Xk: Array, kernels: Any, feed: Callable[[Rows, Any, Array], Array], group: ExpertGroup
) -> Array:
    """Sums the outputs of each token's experts, [X, D] to [X, D]; no choice is dropped, however uneven the load.

    With several devices, the rows that a device receives, sorted by expert and then by sender, pass through a buffer of
    R rows, one window at a time. R is `BUFFER_SLACK` times M, the rows received under balanced load, or P X min(k, E /
    P), the most that could arrive, if that is less: balanced experts need one window, and uneven ones take more time
    but no more memory. Windows after the first are recomputed in the backward pass. A token moves 2 k D numbers of the
    compute dtype forward and as many backward, except for the 1 / P of them that stay on their device.

    `tokens` includes the weights [X, k] of the choices; id E in `experts_Xk` means no expert, with output 0.
    `feed(rows, kernels, rows per expert)` computes the experts' outputs for rows sorted by expert.
    """
    X, k = experts_Xk.shape
    chosen_M, experts = experts_Xk.reshape(-1), len(jax.tree.leaves(kernels)[0]) * group.count
    order_R = jnp.argsort(chosen_M)
    rows_E = jnp.bincount(chosen_M, length=experts).astype(jnp.int32)
    # Rows past the last expert's belong to no expert: their outputs and gradients are undefined.
    choice_R = jnp.where(jnp.arange(X * k) < jnp.sum(rows_E), order_R, X * k)
    row_M = jnp.where(chosen_M < experts, jnp.argsort(order_R), X * k)
    rows = _fill_buffers(tokens, choice_R, row_M, k)
    if group.count == 1:
        out_RD = feed(rows, kernels, rows_E)
    else:
        max_rows = group.count * X * min(k, experts // group.count)
        windows = Windows(feed, min(max_rows, math.ceil(BUFFER_SLACK * X * k)), group)
        rows_PE = jax.lax.all_gather(rows_E, group.axes)
        out_RD = windows.run(rows, kernels, rows_PE, 0)
        if windows.room < max_rows:
            out_RD = _later_windows(windows, out_RD, rows, kernels, rows_PE)
    return combine(out_RD, row_M, choice_R, k)


def _fill_buffers(tokens: Rows, choice_R: Array, row_M: Array, k: int) -> Rows:
    x_XD, weights_Xk = tokens
    weights_R1 = None if weights_Xk is None else fill_buffer(weights_Xk.reshape(-1, 1), choice_R, row_M, 1)
    return fill_buffer(x_XD, choice_R, row_M, k), weights_R1


@dataclass(frozen=True)
class Windows:
    """Sends rows to a group's experts and back in windows of `room` rows; `rows_PE`: each device's rows per expert."""

    feed: Callable[[Rows, Any, Array], Array]
    room: int
    group: ExpertGroup

    def run(self, rows: Rows, kernels: Any, rows_PE: Array, window: Array | int) -> Array:
        """Computes the experts' outputs for this device's sorted rows inside the window; 0 for others."""
        device = jax.lax.axis_index(self.group.axes)
        send_plan, return_plan, rows_e = exchange_plans(rows_PE, window, self.room, device)
        sizes = len(rows[0]), self.room
        arrived = jax.tree.map(lambda each: exchange(each, send_plan, return_plan, sizes, self.group), rows)
        return exchange(self.feed(arrived, kernels, rows_e), return_plan, send_plan, sizes[::-1], self.group)

    def count(self, rows_PE: Array) -> Array:
        """Number of windows to run: the same on all devices of a slice, because they meet in collectives."""
        max_rows = jnp.max(jnp.sum(rows_PE.reshape(self.group.count, self.group.count, -1), axis=(0, 2)))
        return jax.lax.pmax(-(-max_rows // self.room), tuple(dict.fromkeys(self.group.axes + self.group.in_step)))


def _later_windows(windows: Windows, out_RD: Array, rows: Rows, kernels: Any, rows_PE: Array) -> Array:
    """Adds the later windows to `out_RD`, as many as the device with the most rows needs."""

    def run(out_RD: Array, rows: Rows, kernels: Any, rows_PE: Array) -> tuple[Array, tuple]:
        def add(window: Array, out_RD: Array) -> Array:
            return out_RD + windows.run(rows, kernels, rows_PE, window)

        return jax.lax.fori_loop(1, windows.count(rows_PE), add, out_RD), (rows, kernels, rows_PE)

    def gradients(residuals: tuple, gradient_RD: Array) -> tuple[Any, ...]:
        rows, kernels, rows_PE = residuals

        def add(window: Array, sums: Any) -> Any:
            _, to_inputs = jax.vjp(lambda x, w: windows.run(x, w, rows_PE, window), rows, kernels)
            # Quantized weights are integers and have no gradient.
            return jax.tree.map(lambda x, y: x if y.dtype == jax.dtypes.float0 else x + y, sums, to_inputs(gradient_RD))

        # Weight gradients are summed in the compute dtype too, the dtype of a window's gradients: float32 sums would
        # take memory even without later windows (docs/log.md).
        zeros = jax.tree.map(jnp.zeros_like, (rows, kernels))
        return gradient_RD, *jax.lax.fori_loop(1, windows.count(rows_PE), add, zeros), None

    return with_gradient(run, gradients)(out_RD, rows, kernels, rows_PE)


def exchange_plans(
    rows_PE: Array, window: Array | int, room: int, device: Array
) -> tuple[ExchangePlan, ExchangePlan, Array]:
    """Plans which rows each device sends where in a window of `room` rows; `device` is this device's number.

    Returns the plan to the experts, the plan back, and the rows [E / P] that this device's experts receive.
    """
    P, E = rows_PE.shape
    rows_EP = rows_PE.T
    by_receiver_PR = rows_EP.reshape(P, -1)  # in the order of a receiver's rows: by expert, then by sender
    arrives_EP = (jnp.cumsum(by_receiver_PR, axis=1) - by_receiver_PR).reshape(E, P)
    leaves_EP = (jnp.cumsum(rows_PE, axis=1) - rows_PE).T
    begin = window * room
    first_EP, end_EP = (jnp.clip(border - arrives_EP, 0, rows_EP) for border in (begin, begin + room))
    sent_EP, from_EP = end_EP - first_EP, leaves_EP + first_EP
    to_EP = jnp.clip(arrives_EP + first_EP - begin, 0, room)

    def sender(x_EP: Array) -> Array:
        return jnp.take(x_EP, device, axis=1)

    def receiver(x_EP: Array) -> Array:
        return jnp.take(x_EP.reshape(P, -1, P), device, axis=0).T.reshape(-1)

    send_plan = ExchangePlan(sender(from_EP), sender(sent_EP), sender(to_EP), receiver(sent_EP))
    return_plan = ExchangePlan(receiver(to_EP), receiver(sent_EP), receiver(from_EP), sender(sent_EP))
    return send_plan, return_plan, jnp.sum(receiver(sent_EP).reshape(P, -1), axis=0)


def _linear(transpose: Callable, static: tuple[int, ...]) -> Callable[[Callable], Callable]:
    """Makes transpose(., inverse, indices, *static) the derivative of f(x, indices, inverse, *static), linear in x."""

    def decorate(function: Callable) -> Callable:
        differentiable: Any = functools.wraps(function)(jax.custom_vjp(function, nondiff_argnums=static))

        def forward(*arguments: Any) -> tuple[Array, Any]:
            return differentiable(*arguments), arguments[1:3]

        def backward(*arguments: Any) -> tuple[Any, None, None]:
            *more, (indices, inverse), gradient = arguments
            return transpose(gradient, inverse, indices, *more), None, None

        differentiable.defvjp(forward, backward)
        return differentiable

    return decorate


@_linear(lambda x, plan, reverse, sizes, group: exchange(x, plan, reverse, sizes[::-1], group), static=(3, 4))
def exchange(
    rows_RD: Array, plan: ExchangePlan, reverse: ExchangePlan, sizes: tuple[int, int], group: ExpertGroup
) -> Array:
    """Exchanges rows by `plan`; returns the device's buffer, with 0 in the rows that receive none.

    `reverse` sends each row back to its origin, as the gradient does. `sizes` are the numbers of rows that a device has
    before and after.
    """
    if group.platform == "cpu":
        return _exchange_by_gathering(rows_RD, plan, sizes[1], group)
    into_RD = jnp.zeros((sizes[1], rows_RD.shape[1]), rows_RD.dtype)
    return jax.lax.ragged_all_to_all(rows_RD, into_RD, *plan, axis_name=group.axes)


def _exchange_by_gathering(rows_RD: Array, plan: ExchangePlan, room: int, group: ExpertGroup) -> Array:
    """Emulates `ragged_all_to_all` on CPUs, where XLA lacks it: every device gathers all rows and takes its own."""
    device = jax.lax.axis_index(group.axes)
    all_PRD = jax.lax.all_gather(rows_RD, group.axes)

    def to_device(each: Array) -> Array:
        return jax.lax.all_gather(each, group.axes).reshape(group.count, group.count, -1, 1)[:, device]

    begin_Pe1, sent_Pe1, to_Pe1 = to_device(plan.sent_from), to_device(plan.sent), to_device(plan.sent_to)
    row_R = jnp.arange(len(rows_RD))
    in_slice_PeR = (row_R >= begin_Pe1) & (row_R < begin_Pe1 + sent_Pe1)
    moved_PR = row_R + jnp.sum(in_slice_PeR * (to_Pe1 - begin_Pe1), axis=1)
    to_PR = jnp.where(jnp.any(in_slice_PeR, axis=1), moved_PR, room)
    into_RD = jnp.zeros((room, rows_RD.shape[1]), rows_RD.dtype)
    return into_RD.at[to_PR.reshape(-1)].set(all_PRD.reshape(-1, rows_RD.shape[1]), mode="drop")


@jax.named_scope("dispatch")
def with_capacity(
    tokens: Rows, slots: "CapacitySlots", kernels: Any, feed: Callable[[Rows, Any], Array], group: ExpertGroup
) -> Array:
    """Sums the outputs of each token's experts, counting only those in which it has a slot: [X, D] to [X, D].

    `feed(rows, kernels)` computes the experts' outputs for rows grouped by expert, [E / P, ..., D].
    """

    def to_experts(rows: Array) -> Array:
        rows = rows.reshape(slots.experts, -1, rows.shape[1])
        return jax.lax.all_to_all(rows, group.axes, 0, 1, tiled=True) if group.count > 1 else rows

    k = len(slots.row_M) // len(tokens[0])
    rows = jax.tree.map(to_experts, _fill_buffers(tokens, slots.choice_R, slots.row_M, k))
    out_ECD = feed(rows, kernels)
    if group.count > 1:
        out_ECD = jax.lax.all_to_all(out_ECD, group.axes, 1, 0, tiled=True)
    return combine(out_ECD.reshape(-1, out_ECD.shape[2]), slots.row_M, slots.choice_R, k)


class CapacitySlots(NamedTuple):
    """Assignment of choices to the rows of a buffer [E, B, C]."""

    choice_R: Array  # the choice in each row; M: none
    row_M: Array  # the row of each choice; R: none
    experts: int

    def kept_M(self) -> Array:
        """Mask of the choices that have a row."""
        return self.row_M < len(self.choice_R)


def assign_slots(experts_BTk: Array, non_padding_BT: Array, experts: int, capacity: int) -> CapacitySlots:
    """Assigns each expert's `capacity` slots per sequence to the choices that come first.

    First choices come before second ones, and within each, tokens in their order (GShard, arXiv:2006.16668, algorithm
    1). Padding gets no slots.
    """
    B, T, k = experts_BTk.shape
    by_rank_BM = jnp.where(non_padding_BT[..., None], experts_BTk, experts).swapaxes(1, 2).reshape(B, k * T)
    order_BM = jnp.argsort(by_rank_BM, axis=1)
    chosen_BM = jnp.take_along_axis(by_rank_BM, order_BM, axis=1)
    rows_BE = jnp.sum(jax.nn.one_hot(by_rank_BM, experts, dtype=jnp.int32), axis=1)
    first_BE = jnp.cumsum(rows_BE, axis=1) - rows_BE
    # The choice in each slot: slot c of an expert holds its c-th choice in sorted order.
    slot_C = jnp.arange(capacity)
    sorted_BEC = first_BE[..., None] + slot_C
    rank_BEC = jnp.take_along_axis(order_BM, jnp.minimum(sorted_BEC, k * T - 1).reshape(B, -1), axis=1)
    choice_BM = (jnp.arange(B)[:, None] * T + rank_BEC % T) * k + rank_BEC // T
    taken_BEC = slot_C < rows_BE[..., None]
    choice_BEC = jnp.where(taken_BEC, choice_BM.reshape(taken_BEC.shape), B * T * k)
    # The slot of each choice.
    first_BM = jnp.take_along_axis(first_BE, jnp.minimum(chosen_BM, experts - 1), axis=1)
    slot_BM = jnp.arange(k * T) - first_BM
    row_BM = (chosen_BM * B + jnp.arange(B)[:, None]) * capacity + slot_BM
    row_BM = jnp.where((slot_BM < capacity) & (chosen_BM < experts), row_BM, experts * B * capacity)
    row_BM = jnp.take_along_axis(row_BM, jnp.argsort(order_BM, axis=1), axis=1)
    choice_R = choice_BEC.swapaxes(0, 1).reshape(-1)
    return CapacitySlots(choice_R, row_BM.reshape(B, k, T).swapaxes(1, 2).reshape(-1), experts)


@_linear(lambda *arguments: combine(*arguments), static=(3,))
def fill_buffer(x_XD: Array, choice_R: Array, row_M: Array, k: int) -> Array:
    """Fills a buffer [R, D] with tokens; each token has k consecutive choices.

    `choice_R` is the choice that fills each row (M: none, and the row is 0), `row_M` the inverse (R: none). Forward and
    backward are gathers, because scatter-add is slow on accelerators.
    """
    return x_XD.at[choice_R // k].get(mode="fill", fill_value=0)


@_linear(fill_buffer, static=(3,))
def combine(rows_RD: Array, row_M: Array, choice_R: Array, k: int) -> Array:
    """Sums each token's rows of a buffer, [R, D] to [X, D]: `fill_buffer`'s transpose, with its indices swapped."""
    rows_MD = rows_RD.at[row_M].get(mode="fill", fill_value=0)
    return jnp.sum(rows_MD.reshape(-1, k, rows_RD.shape[1]), axis=1)
