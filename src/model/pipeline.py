"""Pipeline stages: devices along the mesh axis `stage` run their chunks of a layer group, a micro-batch at a time.

The schedule is circular (interleaved 1F1B's forward order; Narayanan et al. 2021, arXiv:2104.04473, section 2.2): the
layers are cut into R x P chunks of equal length, and stage s of P runs chunk r P + s in its turn r of R. Each
micro-batch goes through the stages R times. The backward pass is the schedule's derivative: the same in reverse.

Tensor letters: src/model/spec.py, but M counts micro-batches here, and B the sequences of one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from src.config.schema import Mesh
from src.model.forward_context import ForwardContext
from src.model.matmul import with_gradient
from src.model.spec import ModelSpec
from src.parallel.mesh import STAGE, MeshLayout
from src.parallel.slices import any_of, divisors
from src.system.errors import Unsupported, counted


class Schedule(NamedTuple):
    """Assigns an item, which is one turn of a micro-batch, to each stage in each iteration.

    Stage s processes the same items as stage 0, s iterations later: P consecutive micro-batches make their first turn,
    then their second and so on, before the next P start. So the first stage consumes the last one's output immediately.
    """

    stages: int  # P
    repeats: int  # R, turns of a micro-batch
    micro_batches: int  # M, a multiple of P if R > 1

    @property
    def items(self) -> int:
        """Number of items per stage."""
        return self.micro_batches * self.repeats

    @property
    def iterations(self) -> int:
        """Number of iterations of the whole schedule."""
        return self.items + self.stages - 1

    @property
    def bubble(self) -> float:
        """Fraction of the iterations in which a stage idles."""
        return (self.stages - 1) / self.iterations

    def describe(self) -> str:
        """Writes a summary, such as `2 stages x 1 turn, 8 micro-batches: idle 11% of the time`."""
        turns = f"{self.repeats} turn{'s' * (self.repeats > 1)}"
        return f"{self.stages} stages x {turns}, {self.micro_batches} micro-batches: idle {self.bubble:.0%} of the time"

    def turn(self, item: Any) -> Any:
        """Turn of the micro-batch, from 0 to R - 1, that an item is (or each of an array of items)."""
        return item // self.stages % self.repeats

    def micro_batch(self, item: Any) -> Any:
        """Micro-batch of which an item (or each of an array of items) is a turn."""
        return item // (self.stages * self.repeats) * self.stages + item % self.stages

    def item(self, turn: Any, micro_batch: Any) -> Any:
        """Number of the item that is this turn of this micro-batch: the inverse of `turn` and `micro_batch`."""
        group, place = micro_batch // self.stages, micro_batch % self.stages
        return (group * self.repeats + turn) * self.stages + place


def make_schedule(mesh: Mesh, spec: ModelSpec, layout: MeshLayout) -> Schedule:
    """Makes the configured schedule of several stages.

    Raises Unsupported if the sharding rules, the layers or the micro-batches do not fit it.
    """
    stages, group = layout.mesh.shape[STAGE], spec.layer_groups[spec.largest_group]
    micro_batches, repeats = mesh.num_pipeline_microbatches, mesh.num_pipeline_repeats
    if layout.rules["layers"] != (STAGE,):
        raise Unsupported(f"{stages} pipeline stages need logical_axis_rules.layers=[{STAGE}]")
    if group.shared:
        raise Unsupported(
            f"the segment with the most layers shares its weights, which {stages} pipeline stages cannot split: "
            "set ici_pipeline_parallelism=1 and dcn_pipeline_parallelism=1"
        )
    if repeats == -1:
        repeats = max(group.repeats // stages, 1)
    if group.repeats % (stages * repeats):
        turns = max(mesh.num_pipeline_repeats, 1)
        raise Unsupported(
            f"the segment with the most layers has {group.repeats} repeats of {counted(len(group.pattern), 'layer')}, "
            f"which do not divide into {stages} pipeline stages x num_pipeline_repeats={turns}: that product may be "
            f"{any_of(divisors(group.repeats))}, or repeats (base_num_decoder_layers) a multiple of {stages * turns}"
        )
    if repeats > 1 and micro_batches != -1 and micro_batches % stages:
        raise Unsupported(
            f"num_pipeline_microbatches={micro_batches} must be a multiple of the {stages} pipeline stages if "
            f"num_pipeline_repeats={repeats}: micro-batches return to the first stage in groups of that size"
        )
    return Schedule(stages, repeats, stages if micro_batches == -1 else micro_batches)


def run_stages(
    run_chunk: Callable[[Array, Any, Array, ForwardContext], tuple[Array, Any]],
    x_BTD: Array,
    weights: Any,
    layers_L: Array,
    context: ForwardContext,
    schedule: Schedule,
    remat: Callable[[Callable], Callable],
) -> tuple[Array, Any]:
    """Runs the repeats of a layer group, split over stages; idle stages compute on zeros.

    The only collective over `stage` in an iteration passes a micro-batch's activations on; at the end all stages get
    the hidden states. Weights are gathered over fsdp in each turn. The backward pass holds the arrays that a chunk's
    blocks save, in each of the M R + P - 1 iterations: with remat_policy=full this is GPipe's memory (Huang et al.
    2019).

    `run_chunk(x, weights, layers, context)` runs consecutive repeats on one micro-batch and returns x and reports;
    `remat` wraps a turn, which selects its weights inside, so that they are not saved once per turn. `x_BTD` and
    `context` hold the whole batch. The repeats are the first dim of the weights (in layer order, sharded over `stage`),
    of `layers_L`, each repeat's first layer, and of the reports, which are summed over micro-batches.
    """
    layout, P, R = context.layout, schedule.stages, schedule.repeats
    x_MBTD = layout.split_rows(x_BTD, schedule.micro_batches, "norm_length", "activation_embed")
    of_tokens = {name: getattr(context, name) for name in ("positions_BT", "segment_ids_BT", "dropout_keys_BTW")}
    of_tokens = jax.tree.map(lambda x: layout.split_rows(x, schedule.micro_batches), of_tokens)
    pass_on = [(stage, (stage + 1) % P) for stage in range(P if R > 1 else P - 1)]

    def on_stage(weights: Any, x_1MBTD: Array, of_tokens: Any, layers_L: Array) -> tuple[Array, Any]:
        stage = jax.lax.axis_index(STAGE)
        chunks = _chunks(weights, stage, schedule)
        layers_RL = layers_L.reshape(R, P, -1)[:, stage]

        def run_turn(x_BTD: Array, chunks: Any, item: Array) -> tuple[Array, Any]:
            micro_batch = schedule.micro_batch(item)
            turn = schedule.turn(item) if R > 1 else 0  # a constant: the weights are then the same in all iterations
            rows = replace(context, **jax.tree.map(lambda x: x[micro_batch], of_tokens))
            return run_chunk(x_BTD, jax.tree.map(lambda leaf: leaf[turn], chunks), layers_RL[turn], rows)

        run_turn = remat(run_turn)

        def iterate(carry: tuple[Array, Array], iteration: Array) -> tuple[Any, Any]:
            received_BTD, rows_MBTD = carry
            item = jnp.clip(iteration - stage, 0, schedule.items - 1)
            works = item == iteration - stage
            micro_batch = schedule.micro_batch(item)
            rows_MBTD, first_BTD = _read(rows_MBTD, micro_batch)
            x_BTD = jnp.where((stage == 0) & (schedule.turn(item) == 0), first_BTD, received_BTD)
            x_BTD, reports = run_turn(jnp.where(works, x_BTD, 0), chunks, item)
            # The last stage's last turn overwrites earlier outputs; the input in that entry has been read by then.
            rows_MBTD = jax.lax.dynamic_update_index_in_dim(rows_MBTD, x_BTD, micro_batch, 0)
            return (jax.lax.ppermute(x_BTD, STAGE, pass_on), rows_MBTD), reports

        start = (jnp.zeros_like(x_1MBTD[0, 0]), x_1MBTD[0])
        (_, rows_MBTD), reports = jax.lax.scan(iterate, start, jnp.arange(schedule.iterations))
        items_RM = schedule.item(np.arange(R)[:, None], np.arange(schedule.micro_batches))
        last_1MBTD = jnp.where(stage == P - 1, rows_MBTD, 0)[None]
        # A report is [iterations, chunk, ...]; its sums over micro-batches are [R, 1, chunk, ...].
        return last_1MBTD, jax.tree.map(lambda report: jnp.sum(report[items_RM + stage], axis=1)[:, None], reports)

    by_stage, everywhere = PartitionSpec(STAGE), PartitionSpec()
    in_specs, out_specs = (by_stage, by_stage, everywhere, everywhere), (by_stage, PartitionSpec(None, STAGE))
    mapped = layout.shard_map(on_stage, in_specs, out_specs, over=(STAGE,))
    # Each stage's output is an entry of one array, zeros except the last stage's, so that the compiler sums them, as it
    # does the first stage's gradients. (A sum inside the map would be recomputed in the backward pass.)
    x_PMBTD, reports = mapped(weights, jnp.broadcast_to(x_MBTD, (P, *x_MBTD.shape)), of_tokens, layers_L)
    x_MBTD = jax.lax.reduce(x_PMBTD, np.zeros((), x_PMBTD.dtype), jax.lax.add, (0,))  # jnp.sum would use float32
    x_BTD = jnp.moveaxis(x_MBTD, 0, 1).reshape(x_BTD.shape)
    return x_BTD, jax.tree.map(lambda report: report.reshape(-1, *report.shape[3:]), reports)


def _chunks(weights: Any, stage: Array, schedule: Schedule) -> Any:
    """Collects the chunks that this stage runs, [R, chunk, ...], from the weights stored on stages, [R chunk, ...].

    Chunk c is stored on stage c // R and run by stage c % P. Stages exchange chunks in P - 1 permutations over `stage`,
    each of ceil(R / P) chunks, the most that one stage stores for another. (For an all-to-all over only this axis, the
    compiler would gather dims that the other axes shard.)
    """
    P, R = schedule.stages, schedule.repeats
    chunks = jax.tree.map(lambda leaf: leaf.reshape(R, -1, *leaf.shape[1:]), weights)
    if R == 1:
        return chunks
    slots = -(-R // P)
    chunk_R = jnp.arange(R) * P + stage
    place_R = (stage - chunk_R // R) % P * slots + chunk_R % R // P

    def exchange(chunks: Array) -> Array:
        received = []
        for distance in range(P):
            sent = chunks[jnp.minimum((stage + distance - stage * R) % P + P * jnp.arange(slots), R - 1)]
            to = [(sender, (sender + distance) % P) for sender in range(P)]
            received.append(jax.lax.ppermute(sent, STAGE, to) if distance else sent)
        return jnp.concatenate(received)[place_R]

    return jax.tree.map(exchange, chunks)


def _add_entry(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, None]:
    rows_MBTD, entry_BTD = gradients
    return jax.lax.dynamic_update_index_in_dim(rows_MBTD, rows_MBTD[index] + entry_BTD, index, 0), None


# Reads an entry. Its gradient is added in place; the gradient of plain indexing would add a whole array of zeros.
_read = with_gradient(lambda rows_MBTD, index: ((rows_MBTD, rows_MBTD[index]), index), _add_entry)


def check_rows(rows: int, layout: MeshLayout, schedule: Schedule, key: str) -> None:
    """Raises Unsupported if `rows`, which `key` sets, are not divisible by micro-batches times shards."""
    shards = layout.shards("batch")
    least = schedule.micro_batches * shards
    if rows % least == 0:
        return
    by = f" of {shards} shards ({layout.sharded_by('batch')})" if shards > 1 else ""
    near = dict.fromkeys(max(rows + more - rows % least, least) / layout.mesh.size for more in (0, least))
    raise Unsupported(
        f"{key}={rows / layout.mesh.size:g} on {layout.mesh.size} devices is {rows} rows, which do not divide into "
        f"{schedule.micro_batches} micro-batches of the pipeline{by}: the nearest that do are "
        f"{key}={' or '.join(f'{size:g}' for size in near)}; or change num_pipeline_microbatches"
    )
