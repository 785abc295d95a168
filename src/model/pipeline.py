"""Pipeline stages: each device of the mesh axis `stage` runs its part of a segment's layers on one micro-batch a time.

The schedule is circular (interleaved 1F1B's forward order; Narayanan et al. 2021, arXiv:2104.04473, section 2.2): the
layers are cut into R x P chunks of equal length, of which stage s of P runs number r P + s in its turn r of R. Each
micro-batch goes through the stages R times. The backward pass is the schedule's derivative: the same in reverse.

Tensor letters: src/model/spec.py, but M counts micro-batches here, and B the rows of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from src.errors import UserError
from src.model.forward_context import Context
from src.model.spec import ModelSpec, Segment, longest
from src.parallel.mesh import Layout, any_of, divisors

AXIS = "stage"


@dataclass(frozen=True)
class Schedule:
    """Which turn of which micro-batch each stage works on, iteration by iteration.

    Stage s takes the same items as stage 0, s iterations later. Item u is a turn of a micro-batch: P micro-batches in a
    row make their first turn, then their second and so on, then the next P come. So what the last stage hands back to
    the first is wanted there at once.
    """

    stages: int  # P
    repeats: int  # R, turns of a micro-batch
    micro_batches: int  # M, a multiple of P where R > 1

    @property
    def items(self) -> int:
        """Of a stage."""
        return self.micro_batches * self.repeats

    @property
    def iterations(self) -> int:
        """Of the whole."""
        return self.items + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of the iterations in which a stage has nothing to work on."""
        return (self.stages - 1) / self.iterations

    def describe(self) -> str:
        """In words, such as `2 stages x 1 turn, 8 micro-batches: idle 11% of the time`."""
        turns = "1 turn" if self.repeats == 1 else f"{self.repeats} turns"
        idle = f"idle {self.bubble:.0%} of the time"
        return f"{self.stages} stages x {turns}, {self.micro_batches} micro-batches: {idle}"

    def turn(self, item: Any) -> Any:
        """The turn that an item is, an integer or an array of them."""
        return item // self.stages % self.repeats

    def micro_batch(self, item: Any) -> Any:
        """The micro-batch that an item is of."""
        return item // (self.stages * self.repeats) * self.stages + item % self.stages

    def item(self, turn: Any, micro_batch: Any) -> Any:
        """The item that is this turn of this micro-batch."""
        group, place = micro_batch // self.stages, micro_batch % self.stages
        return (group * self.repeats + turn) * self.stages + place


def make_schedule(config: Mapping[str, Any], spec: ModelSpec, layout: Layout) -> Schedule | None:
    """The schedule of `num_pipeline_microbatches` and `num_pipeline_repeats`; None where there is one stage.

    Raises:
        UserError: these, the mesh and the segment with the most layers do not fit each other.
    """
    stages, segment = layout.mesh.shape[AXIS], spec.plan[longest(spec.plan)]
    micro_batches, repeats = config["num_pipeline_microbatches"], config["num_pipeline_repeats"]
    if stages == 1:
        if (micro_batches, repeats) != (-1, 1):
            raise UserError(
                "num_pipeline_microbatches and num_pipeline_repeats need more than one pipeline stage: set "
                "ici_pipeline_parallelism or dcn_pipeline_parallelism"
            )
        return None
    if layout.rules["layers"] != (AXIS,):
        raise UserError(f"{stages} pipeline stages need logical_axis_rules.layers=[{AXIS}]")
    if segment.shared:
        raise UserError(
            f"the segment with the most layers shares its weights, of which {stages} pipeline stages cannot have a "
            "part each: set ici_pipeline_parallelism=1 and dcn_pipeline_parallelism=1"
        )
    if repeats == -1:
        repeats = max(segment.repeats // stages, 1)
    if segment.repeats % (stages * repeats):
        raise UserError(_uneven(config, segment, stages))
    if repeats > 1 and micro_batches != -1 and micro_batches % stages:
        raise UserError(
            f"num_pipeline_microbatches={micro_batches} must be a multiple of the {stages} pipeline stages where "
            f"num_pipeline_repeats={repeats}: micro-batches come back to the first stage in groups of as many"
        )
    return Schedule(stages, repeats, stages if micro_batches == -1 else micro_batches)


def _uneven(config: Mapping[str, Any], segment: Segment, stages: int) -> str:
    """That stages and turns do not divide a segment's repeats, and which numbers do."""
    count, repeats, period = segment.repeats, max(config["num_pipeline_repeats"], 1), len(segment.pattern)
    if config["decoder_segments"]:
        of_pattern = f" of a pattern of {period} layers" if period > 1 else ""
        has, key = f"the segment with the most layers has {count} repeats{of_pattern}", "repeats of decoder_segments"
    else:
        has, key = f"the model has {count} layers", "base_num_decoder_layers"
    turns = f" x num_pipeline_repeats={repeats}" if repeats > 1 else ""
    if count % stages == 0:
        advice = f"num_pipeline_repeats may be {any_of(divisors(count // stages))}"
    else:
        numbers = [number for number in divisors(count) if number > 1 and count % (number * repeats) == 0]
        without = " without num_pipeline_repeats" if repeats > 1 and not numbers else ""
        sizes = any_of(numbers or divisors(count))
        advice = f"ici_pipeline_parallelism x dcn_pipeline_parallelism may be {sizes}{without}"
    return (
        f"{has}, which do not divide into {stages} pipeline stages{turns}: {advice}, or {key} a multiple of "
        f"{stages * repeats}"
    )


def run_stages(
    run_chunk: Callable[[jax.Array, Any, jax.Array, Context], tuple[jax.Array, Any]],
    x_BTD: jax.Array,
    weights: Any,
    layers_L: jax.Array,
    context: Context,
    schedule: Schedule,
    remat: Callable[[Callable], Callable],
) -> tuple[jax.Array, Any]:
    """Runs the repeats of a segment, shared out over stages.

    Stages that have no work compute on zeros, and nothing reads what they make of them.

    The one collective over `stage` in each iteration passes a micro-batch's activations on. Weights gathered over
    fsdp are so for each turn. Kept for the backward pass: what the blocks of a chunk keep, in each of the
    M R + P - 1 iterations. With remat_policy=full that is an input [B, T, D] for each block and iteration, which for
    L layers makes L / (P R) (M R + P - 1): GPipe's memory (Huang et al. 2019).
    Before the schedule each weight goes to the stage that runs it where R > 1 (`_chunks`), and its gradient comes back:
    once for each of gradient_accumulation_steps. After it, all stages get the hidden states.

    Args:
        run_chunk: (x, weights, layers, context) -> (x, reports), of consecutive repeats, on rows of one micro-batch.
        x_BTD: all rows, as many as `check_rows` lets pass.
        weights: arrays whose first dim is the repeats, in layer order, cut over `stage`.
        layers_L: the model's number of each repeat's first layer.
        context: what the blocks are told of all rows.
        schedule: of the stages.
        remat: wraps a turn, which takes its weights from those of all turns, so that the weights of each are not kept.

    Returns:
        x, and the reports: sums over micro-batches, with a first dim of the repeats, cut over `stage`.
    """
    layout, P, R = context.layout, schedule.stages, schedule.repeats
    x_MBTD = layout.split_rows(x_BTD, schedule.micro_batches, "norm_length", "activation_embed")
    of_tokens = (context.positions_BT, context.segment_ids_BT, context.dropout_keys_BTW)
    of_tokens = jax.tree.map(lambda x: layout.split_rows(x, schedule.micro_batches, *[None] * (x.ndim - 1)), of_tokens)
    hand_on = [(stage, (stage + 1) % P) for stage in range(P if R > 1 else P - 1)]

    def on_stage(weights: Any, x_1MBTD: jax.Array, told: Any) -> tuple[jax.Array, Any]:
        of_tokens, layers_L = told
        stage = jax.lax.axis_index(AXIS)
        chunks = _chunks(weights, stage, schedule)
        layers_RL = layers_L.reshape(R, P, -1)[:, stage]

        def run_turn(x_BTD: jax.Array, chunks: Any, item: jax.Array) -> tuple[jax.Array, Any]:
            micro_batch = schedule.micro_batch(item)
            turn = schedule.turn(item) if R > 1 else 0  # a constant: the weights are then the same in all iterations
            positions_BT, segment_ids_BT, keys_BTW = jax.tree.map(lambda x: x[micro_batch], of_tokens)
            own = replace(context, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, dropout_keys_BTW=keys_BTW)
            return run_chunk(x_BTD, jax.tree.map(lambda leaf: leaf[turn], chunks), layers_RL[turn], own)

        run_turn = remat(run_turn)

        def iterate(carry: tuple[jax.Array, jax.Array], iteration: jax.Array) -> tuple[Any, Any]:
            received_BTD, rows_MBTD = carry
            item = jnp.clip(iteration - stage, 0, schedule.items - 1)
            works = item == iteration - stage
            micro_batch = schedule.micro_batch(item)
            rows_MBTD, first_BTD = _read(rows_MBTD, micro_batch)
            x_BTD = jnp.where((stage == 0) & (schedule.turn(item) == 0), first_BTD, received_BTD)
            x_BTD, reports = run_turn(jnp.where(works, x_BTD, 0), chunks, item)
            # On the last stage its last turn overwrites all others; a first input has been read by then.
            rows_MBTD = jax.lax.dynamic_update_index_in_dim(rows_MBTD, x_BTD, micro_batch, 0)
            return (jax.lax.ppermute(x_BTD, AXIS, hand_on), rows_MBTD), reports

        start = (jnp.zeros_like(x_1MBTD[0, 0]), x_1MBTD[0])
        (_, rows_MBTD), reports = jax.lax.scan(iterate, start, jnp.arange(schedule.iterations))
        items_RM = schedule.item(np.arange(R)[:, None], np.arange(schedule.micro_batches))

        def over_micro_batches(report: jax.Array) -> jax.Array:
            """The sums of [iterations, chunk, ...], as [R, 1, chunk, ...]."""
            return jnp.sum(report[items_RM + stage], axis=1)[:, None]

        last_1MBTD = jnp.where(stage == P - 1, rows_MBTD, 0)[None]
        return last_1MBTD, jax.tree.map(over_micro_batches, reports)

    told = (of_tokens, layers_L)
    by_stage, everywhere = PartitionSpec(AXIS), PartitionSpec()
    mapped = layout.shard_map(
        on_stage,
        in_specs=(by_stage, by_stage, everywhere),
        out_specs=(by_stage, PartitionSpec(None, AXIS)),
        over=(AXIS,),
    )
    # The rows of each stage are an entry of one array, and all but the last stage's are zeros: so it is the compiler
    # that adds them up, as it does gradients of the first. (A sum within would be made again in the backward pass.)
    x_PMBTD, reports = mapped(weights, jnp.broadcast_to(x_MBTD, (P, *x_MBTD.shape)), told)
    x_MBTD = jax.lax.reduce(x_PMBTD, np.zeros((), x_PMBTD.dtype), jax.lax.add, (0,))  # not in float32, as jnp.sum
    x_BTD = jnp.moveaxis(x_MBTD, 0, 1).reshape(x_BTD.shape)
    return x_BTD, jax.tree.map(lambda report: report.reshape(-1, *report.shape[3:]), reports)


def _chunks(weights: Any, stage: jax.Array, schedule: Schedule) -> Any:
    """The chunks that this stage runs, [R, chunk, ...], of the weights that lie on it, [R chunk, ...].

    Chunk c lies on stage c // R and is run by stage c % P: one exchange brings each there, P - 1 permutations over
    `stage`. (The compiler would gather what the other axes shard for an all-to-all over this one alone.) In each a
    stage passes on as many chunks as the most that any two have for each other; some go in vain.
    """
    P, R = schedule.stages, schedule.repeats
    chunks = jax.tree.map(lambda leaf: leaf.reshape(R, -1, *leaf.shape[1:]), weights)
    if R == 1:
        return chunks
    slots = -(-R // P)
    chunk_R = jnp.arange(R) * P + stage
    place_R = (stage - chunk_R // R) % P * slots + chunk_R % R // P

    def exchange(chunks: jax.Array) -> jax.Array:
        received = []
        for distance in range(P):
            sent = chunks[jnp.minimum((stage + distance - stage * R) % P + P * jnp.arange(slots), R - 1)]
            to = [(sender, (sender + distance) % P) for sender in range(P)]
            received.append(jax.lax.ppermute(sent, AXIS, to) if distance else sent)
        return jnp.concatenate(received)[place_R]

    return jax.tree.map(exchange, chunks)


@jax.custom_vjp
def _read(rows_MBTD: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array, and its entry `index`.

    Its derivative adds that entry's gradient in place; that of plain indexing would add a whole array of zeros.
    """
    return rows_MBTD, rows_MBTD[index]


def _read_forward(rows_MBTD: jax.Array, index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return _read(rows_MBTD, index), index


def _read_backward(index: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    rows_MBTD, entry_BTD = gradients
    return jax.lax.dynamic_update_index_in_dim(rows_MBTD, rows_MBTD[index] + entry_BTD, index, 0), None


_read.defvjp(_read_forward, _read_backward)


def check_rows(rows: int, layout: Layout, schedule: Schedule | None, key: str) -> None:
    """Raises UserError where rows, as many as `key` gives a device, do not divide into micro-batches and shards."""
    shards = layout.shards("batch")
    if not schedule or rows % (least := schedule.micro_batches * shards) == 0:
        return
    by = f" of {shards} shards ({layout.sharded_by('batch')})" if shards > 1 else ""
    near = dict.fromkeys(max(rows + more - rows % least, least) / layout.mesh.size for more in (0, least))
    raise UserError(
        f"{key}={rows / layout.mesh.size:g} on {layout.mesh.size} devices is {rows} rows, which do not divide into "
        f"{schedule.micro_batches} micro-batches of the pipeline{by}: the nearest that do are "
        f"{key}={' or '.join(f'{size:g}' for size in near)}; or change num_pipeline_microbatches"
    )
