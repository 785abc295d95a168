"""Estimates the memory and the duration of a step from the configuration, in milliseconds and without tracing it.

`src.extras.plan` costs hundreds of points with this and compiles the best few. docs/plan.md explains the model.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from src.config.schema import Config
from src.extras.aot.hlo import Collective
from src.extras.aot.memory import LOGITS, SAVED, Memory
from src.extras.aot.roofline import Constants, Prediction, Work, constants_of, predict, step_work
from src.extras.aot.topology import Topology
from src.extras.plan.declared import (
    AbsentLayout,
    Declared,
    DeclaredWeight,
    TokenArray,
    absent_layout,
    block_arrays,
    declared,
    spec_of,
)
from src.extras.plan.traffic import Step, collectives, gathered_elements
from src.model.attention_kernels.cudnn import workspace_bytes
from src.model.execution import check_rows, make_execution, make_schedule
from src.model.flops import all_layers
from src.model.moe.dispatch import BUFFER_SLACK
from src.model.parts import kernel_for, layer_costs
from src.model.spec import ModelSpec
from src.model.vocab_tiles import vocab_tiles
from src.parallel.chips import Chip, peak_flops, run_peak
from src.parallel.mesh import global_batch_size
from src.parallel.sequence import zigzag_order
from src.system.errors import UserError


class Estimate(NamedTuple):
    """A step on each device, estimated; times are in seconds."""

    memory_bytes: int  # peak
    parts: dict[str, int]  # bytes by purpose, as src/extras/aot/memory.py names them; not all live at once
    compute_seconds: float
    memory_seconds: float
    ici_seconds: float
    dcn_seconds: float
    bubble: float  # fraction of the time that a pipeline stage is idle
    step_seconds: float
    bound: str  # compute, memory, ici or dcn
    mfu: float
    tokens_per_step: int


class Shares(NamedTuple):
    """A device's share of the weights, in bytes, and of a state that is sharded like them."""

    weights: float
    trained: float
    optimizer: float


class Point(NamedTuple):
    """A configuration on a topology, checked: what its memory and its collectives are computed from."""

    model: Declared
    step: Step
    kernel: str
    rows: int  # of a micro-batch
    shares: Shares


class Costs(NamedTuple):
    """What a step costs each device, whatever the devices reach of their published rates."""

    work: Work
    moved: list[Collective]
    memory: Memory
    tokens_per_step: int
    chip: Chip
    peak: float
    low_peak: float | None
    slices: int

    def predict(self, constants: Constants) -> Prediction:
        """Predicts the duration on devices that reach these fractions."""
        return predict(self.work, self.chip, self.peak, self.moved, self.low_peak, constants, self.slices)


def estimate(config: Config, topology: Topology, constants: Constants | None = None) -> Estimate:
    """Estimates the step of a checked config on a topology; None: with the constants of its devices.

    Raises UserError if the mesh, the weights, the batch or the kernel do not fit it, as compiling the step would, or if
    no peak rate of these devices is published.
    """
    costs = step_costs(config, topology)
    prediction = costs.predict(constants or constants_of(costs.chip.kind))
    return Estimate(
        costs.memory.total,
        {**costs.memory.arguments, **costs.memory.temporaries},
        prediction.compute_seconds,
        prediction.memory_seconds,
        prediction.ici_seconds,
        prediction.dcn_seconds,
        costs.work.bubble,
        prediction.step_seconds,
        prediction.bound,
        prediction.mfu,
        costs.tokens_per_step,
    )


def step_costs(config: Config, topology: Topology) -> Costs:
    """Counts what a step costs each device of a topology; raises as `estimate`."""
    chip = topology.chip
    peak = chip and run_peak(chip.kind, config.step.dtype, config.step.matmul_precision)
    if not chip or not peak:
        raise UserError(f"compile_topology={topology.name}: no peak rate is published for dtype={config.step.dtype}")
    point = check_point(config, topology)
    model, step, length = point.model, point.step, config.batch.max_target_length
    layout, schedule = step.layout, step.execution.schedule
    stages = schedule.stages if schedule else 1
    memory = estimate_memory(config, point)
    work = step_work(
        step.spec,
        step.execution,
        point.kernel,
        tokens=point.rows * step.micro_batches * length / layout.mesh.size,
        length=length,
        sharing=layout.mesh.size // (layout.shards("batch") * layout.shards("length") * stages),
        state_bytes=memory.arguments["weights"] + memory.arguments["optimizer"],
        vocab_tiles=step.tiles,
        quantization=model.plan.quantization,
        micro_batches=step.micro_batches * (schedule.micro_batches / stages if schedule else 1),
        expert_shards=layout.shards("expert"),
    )
    return Costs(
        work,
        collectives(step, model.weights),
        memory,
        point.rows * step.micro_batches * length,
        chip,
        peak,
        peak_flops(chip.kind, model.plan.quantization.kind),
        topology.slices,
    )


def check_point(config: Config, topology: Topology) -> Point:
    """Plans a config's step without devices; raises UserError as `estimate`, except for a missing peak rate."""
    batch, micro_batches = config.batch, config.step.gradient_accumulation_steps
    spec, layout = spec_of(config), absent_layout(config, topology)
    if spec.has_experts or layout.shards("expert") > 1:
        from src.model.moe.layer import check_mesh

        check_mesh(spec, layout)
    if any(layer.attention_type == "mla" for layer in spec.layers):
        from src.model.latent_attention import place_latents

        layout = replace(layout, rules=place_latents(layout, spec).rules)
    kernel = kernel_for(config.step.attention, spec, batch.max_target_length, layout).name
    model = declared(config, layout, kernel)
    for shape, axes in {(weight.shape, weight.axes) for weight in model.weights}:
        layout.spec(axes)  # raises if two dims are sharded over one mesh axis
        layout.check(shape, axes)
    execution = make_execution(config.step, spec, layout, make_schedule(config.mesh, spec, layout))
    rows = global_batch_size(layout, batch.per_device_batch_size, micro_batches, "per_device_batch_size")
    zigzag_order(batch.max_target_length, layout)
    check_rows(rows // micro_batches, layout, execution, "per_device_batch_size")
    step = Step(
        layout=layout,
        spec=spec,
        execution=execution,
        tokens=rows * batch.max_target_length / micro_batches / (layout.shards("batch") * layout.shards("length")),
        micro_batches=micro_batches,
        tiles=vocab_tiles(config.step, batch, spec, layout),
        torus=topology.shape if topology.platform == "tpu" else (),
        devices_per_chip=topology.devices_per_chip,
    )
    return Point(model, step, kernel, rows // micro_batches, _weight_shares(model, layout, config))


def _weight_shares(model: Declared, layout: AbsentLayout, config: Config) -> Shares:
    whole = trained = 0.0
    used = set()
    for weight in model.weights:
        names = [name for axis in weight.axes if axis for name in layout.axes(axis)]
        used.update(names)
        size = math.prod(weight.shape) * weight.itemsize / layout.size(names)
        whole += size
        trained += size * weight.trained
    optimizer = model.optimizer_bytes * trained / model.weight_bytes
    if config.step.shard_optimizer_over_data:
        optimizer /= layout.size([name for name in layout.axes("batch") if name not in used])
    return Shares(whole, trained, optimizer)


def estimate_memory(config: Config, point: Point) -> Memory:
    """Adds up a device's memory like src/extras/aot/memory.py, from shapes instead of the traced step."""
    model, step, kernel, rows, shares = point
    layout, spec, schedule = step.layout, step.spec, step.execution.schedule
    length, itemsize = config.batch.max_target_length, jnp.dtype(spec.dtype).itemsize
    stages = schedule.stages if schedule else 1
    on_host = config.step.optimizer_memory_host_offload
    gradients = shares.trained
    if step.micro_batches > 1:  # plus the accumulated sum
        gradients += 4 * sum(math.prod(w.shape) / layout.size(_axes(w, layout)) for w in model.weights if w.trained)
    logits = step.tokens / step.tiles * spec.padded_vocab_size / layout.shards("vocab") * itemsize
    # A pipeline's stage saves what a turn saves for each iteration, and computes one micro-batch at a time.
    in_block = step.tokens / (schedule.micro_batches if schedule else 1)
    passes = schedule.iterations * in_block / stages if schedule else step.tokens
    saved = 0.0
    computed = [0.0]
    for layer, count in all_layers(spec).items():
        arrays = block_arrays(layer, spec, step.execution, kernel, config.batch.packing, length, layout)
        saved += count * passes * _bytes(arrays.saved, layout)
        computed.append(in_block * _bytes(arrays.computed, layout))
    gathered = dict.fromkeys((weight.block for weight in model.weights), 0.0)
    for weight in model.weights:
        elements, on_stage = gathered_elements(weight, layout), stages if "layers" in weight.axes else 1
        if weight.block and elements > math.prod(weight.shape) / layout.size(_axes(weight, layout)):
            gathered[weight.block] += elements * on_stage / weight.layers * itemsize
    workspace = _workspace(spec, rows, length, step, kernel, config)
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
            "a block's weights, gathered": round(max(gathered.values())),
            "what a block computes": round(max(computed)) + workspace,
        },
        on_host=round(shares.optimizer) if on_host else 0,
    )


def _axes(weight: DeclaredWeight, layout: AbsentLayout) -> list[str]:
    return [name for axis in weight.axes if axis for name in layout.axes(axis)]


def _bytes(arrays: Sequence[TokenArray], layout: AbsentLayout) -> float:
    """Adds up arrays' bytes per token of a device's sequences, with each array's own sharding."""
    total = 0.0
    for each in arrays:
        if each.axis == "norm_length":
            shards = layout.shards("norm_length") / layout.shards("length") * layout.shards("activation_embed")
        else:
            shards = 1 if each.axis == "length" else layout.shards(each.axis)
        # Between devices, experts' rows have spare room.
        slack = BUFFER_SLACK if each.of_experts and layout.shards("expert") > 1 else 1
        total += each.bytes * slack / shards
    return total


def _workspace(spec: ModelSpec, rows: int, length: int, step: Step, kernel: str, config: Config) -> int:
    if kernel != "cudnn_flash":
        return 0
    rows //= step.execution.schedule.micro_batches if step.execution.schedule else 1
    mixers = [layer_costs(layer)["attention"] for layer in all_layers(spec)]
    return max(
        workspace_bytes(rows, length, costs.scores, min(costs.sharded["heads"]), config.batch.packing, step.layout)
        for costs in mixers
        if costs.scores
    )
