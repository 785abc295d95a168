"""Estimates the memory and the duration of a step from its configuration, within milliseconds.

The step is not traced, but one block of each kind is, once for all meshes. `src.plan` costs thousands of points by
these estimates and compiles the best few. docs/plan.md explains them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from src.config.schema import Config
from src.extras.aot.hlo import Collective
from src.extras.aot.memory import GATHERED_ON_GPU, LOGITS, SAVED, Memory, attention_workspace
from src.extras.aot.roofline import Constants, Prediction, Work, predict, step_work
from src.extras.aot.topology import Topology
from src.extras.plan.block_arrays import TokenArray, block_arrays
from src.extras.plan.placed import AbsentLayout, DeclaredWeight, Placed, place
from src.extras.plan.traffic import Step, collectives, gathered_elements
from src.model.execution import check_rows, make_execution
from src.model.flops import all_layers
from src.model.moe.dispatch import BUFFER_SLACK
from src.model.vocab_tiles import vocab_tiles
from src.parallel.chips import Chip, peak_flops, run_peak
from src.parallel.mesh import global_batch_size
from src.system.errors import UserError


class Costs(NamedTuple):
    """A step's work, communication and memory per device, with its tokens and the published peaks of its devices.

    `peak` and `low_peak` are matmul rates in the step's dtype and in 8 bits, in operations per second. `low_peak` is
    None without 8-bit matmuls, or if no rate is published for them.
    """

    work: Work
    moved: list[Collective]
    memory: Memory
    tokens_per_step: int
    chip: Chip
    peak: float
    low_peak: float | None
    slices: int

    def predict(self, constants: Constants) -> Prediction:
        """Predicts the step's duration with `constants`, mostly the fractions of published rates that devices reach."""
        return predict(self.work, self.chip, self.peak, self.moved, self.low_peak, constants, self.slices)


def step_costs(config: Config, topology: Topology, placed: Placed | None = None) -> Costs:
    """Computes a step's costs on a topology, with `placed` as for `absent_step`.

    Raises UserError as `absent_step` does, or if no peak rate of the devices is published for the step's dtype.
    """
    chip = topology.chip
    peak = chip and run_peak(chip.kind, config.step.dtype, config.step.matmul_precision)
    if not chip or not peak:
        raise UserError(f"compile_topology={topology.name}: no peak rate is published for dtype={config.step.dtype}")
    step = absent_step(config, topology, placed)
    placed = step.placed
    quantization = placed.model.plan.quantization
    memory = estimate_memory(step)
    tokens = step.rows * step.micro_batches * placed.length
    work = step_work(
        placed.spec,
        step.execution,
        placed.kernel,
        placed.layout,
        tokens=tokens,
        length=placed.length,
        state_bytes=memory.arguments["weights"] + memory.arguments["optimizer"],
        vocab_tiles=step.tiles,
        quantization=quantization,
        micro_batches=step.micro_batches,
        packed=placed.packed,
    )
    low_peak = peak_flops(chip.kind, quantization.kind)
    return Costs(work, collectives(step), memory, tokens, chip, peak, low_peak, topology.slices)


def absent_step(config: Config, topology: Topology, placed: Placed | None = None) -> Step:
    """Plans a config's step without devices.

    `placed` is the result of `place` for a config that differs at most in remat policy, batch, loss tiles or where the
    optimizer is; None: place this one. Raises UserError if mesh, weights, batch or kernel do not suit each other, as
    compiling the step would.
    """
    placed = placed or place(config, topology)
    layout, batch, micro_batches = placed.layout, config.batch, config.step.gradient_accumulation_steps
    execution = make_execution(config.step, placed.spec, layout, placed.schedule)
    rows = global_batch_size(layout, batch.per_device_batch_size, micro_batches, "per_device_batch_size")
    check_rows(rows // micro_batches, layout, execution, "per_device_batch_size")
    return Step(
        placed=placed,
        execution=execution,
        rows=rows // micro_batches,
        micro_batches=micro_batches,
        tiles=vocab_tiles(config.step, batch, placed.spec, layout),
        optimizer_on_host=config.step.optimizer_memory_host_offload,
    )


def estimate_memory(step: Step) -> Memory:
    """Adds up a device's memory in bytes like src/extras/aot/memory.py, from shapes instead of the traced step."""
    placed, on_host = step.placed, step.optimizer_on_host
    layout, spec, schedule, model, shares = placed.layout, placed.spec, placed.schedule, placed.model, placed.shares
    itemsize, stages = jnp.dtype(spec.dtype).itemsize, schedule.stages if schedule else 1
    gradients = shares.trained
    if step.micro_batches > 1:  # plus the accumulated sum
        gradients += 4 * sum(math.prod(w.shape) / layout.size(_axes(w, layout)) for w in model.weights if w.trained)
    logits = step.tokens / step.tiles * spec.padded_vocab_size / layout.shards("vocab") * itemsize
    # A pipeline's stage saves what a turn saves for each iteration, and computes one micro-batch at a time.
    in_block = step.tokens / (schedule.micro_batches if schedule else 1)
    passes = schedule.iterations * in_block / stages if schedule else step.tokens
    saved = saved_on_host = 0.0
    computed = [0.0]
    between = layout.shards("norm_length") / layout.shards("length") * layout.shards("activation_embed")
    for layer, count in all_layers(spec).items():
        arrays = block_arrays(layer, placed, step.execution)
        saved += count * passes * _bytes(arrays.saved, layout, between)
        saved_on_host += count * passes * _bytes(arrays.saved_on_host, layout, between)
        # Here an array as wide as the stream is not sharded between blocks: as a matmul's output it is a sum over heads
        # or hidden units, which is whole until it is scattered.
        computed.append(in_block * _bytes(arrays.computed, layout, 1))
    gathered = dict.fromkeys((weight.block for weight in model.weights), 0.0)
    for weight in model.weights:
        elements, on_stage = gathered_elements(weight, layout), stages if "layers" in weight.axes else 1
        if weight.block and elements > math.prod(weight.shape) / layout.size(_axes(weight, layout)):
            gathered[weight.block] += elements * on_stage / weight.layers * itemsize
    times = GATHERED_ON_GPU if layout.platform == "gpu" else 1
    workspace = attention_workspace(
        spec, step.execution, placed.kernel, layout, step.rows, placed.length, placed.packed
    )
    return Memory(
        arguments={
            "weights": round(shares.weights),
            "optimizer": 0 if on_host else round(shares.optimizer),
            "average of the weights": round(model.average_bytes * shares.trained / model.weight_bytes),
        },
        temporaries={
            SAVED: round(saved),
            LOGITS: round(2 * logits),
            "gradients": round(gradients),
            "a block's weights, gathered": round(times * max(gathered.values())),
            "what a block computes": round(max(computed)) + workspace,
        },
        on_host=round(shares.optimizer) if on_host else 0,
        saved_on_host=round(saved_on_host),
    )


def _axes(weight: DeclaredWeight, layout: AbsentLayout) -> list[str]:
    return [name for axis in weight.axes if axis for name in layout.axes(axis)]


def _bytes(arrays: Sequence[TokenArray], layout: AbsentLayout, of_stream: float) -> float:
    """Adds up arrays' bytes per token of a device; arrays as wide as the residual stream have `of_stream` shards."""
    total = 0.0
    for each in arrays:
        shards = {"norm_length": of_stream, "length": 1}.get(each.axis) or layout.shards(each.axis)
        # If experts are on several devices, the buffers of their rows have spare room.
        slack = BUFFER_SLACK if each.of_experts and layout.shards("expert") > 1 else 1
        total += each.bytes * slack / shards
    return total
