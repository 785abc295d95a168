"""Predicts how long a step takes from the stated rates of its devices.

A device computes matrix products, and between them moves arrays through its memory; both add up. Communication adds
what is not hidden behind them. The fractions of the stated rates that are reached, and of communication that is hidden,
are constants, the same for all hardware, models and meshes. docs/aot.md has predictions beside published runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from src.extras.aot.hlo import Collective
from src.extras.aot.memory import device_bytes
from src.model import flops
from src.model.execution import Execution
from src.model.low_precision import FORMATS
from src.model.parts import layer_costs
from src.model.selection import Quantization
from src.model.spec import ModelSpec
from src.parallel.topology import Chip
from src.step.build import TracedStep

# Of the stated peak the best products reach 86% on an A100 and 80% on an H100, whose clock falls under load (Bekman,
# "Machine Learning Engineering", maximum achievable matmul FLOPS); on TPUs whole training steps have reached 80%.
COMPUTE_REACHED = 0.85
# What a copy in an H100's memory reaches.
MEMORY_REACHED = 0.9
NONE = Quantization()
# Weights are gathered while the layer before computes; sums of activations have the next product wait for them. How
# much of either hides, a program does not say: half.
HIDDEN = 0.5


class Work(NamedTuple):
    """The work of one device in a step, without communication."""

    model_flops: flops.FlopsPerToken  # of the device's share of the step's tokens
    recomputed_flops: flops.FlopsPerToken  # which rematerialisation adds
    whole_scores: bool  # whether attention also computes the scores that its mask hides
    memory_bytes: float  # read and written between matrix products
    low_precision: float = 0.0  # the share of the products with layers' weights that are made in 8 bits
    bubble: float = 0.0  # the fraction of the time in which a pipeline's stage idles


class Prediction(NamedTuple):
    """One step's seconds by resource, and in all, which is less than their sum."""

    compute_seconds: float
    memory_seconds: float
    ici_seconds: float
    dcn_seconds: float
    step_seconds: float
    bound: str  # the resource that takes longest: compute, memory, ici or dcn
    mfu: float  # of `peak`, so it may exceed 1 with products in 8 bits; causal attention counted once
    mfu_palm: float


def predict(
    work: Work, chip: Chip, peak: float, moved: Sequence[Collective], low_peak: float | None = None
) -> Prediction:
    """Predicts a step on devices with `peak` operations per second in products of its dtype, `low_peak` in 8 bits."""
    model, again = work.model_flops, work.recomputed_flops
    operations = model.palm + again.palm if work.whole_scores else model.causal + again.causal
    low = work.low_precision * (model.layers + again.layers)
    sent = {"ici": 0.0, "dcn": 0.0}
    for each in moved:  # scaled to all of the device's links: twice as many bytes where half are used
        sent[each.network] += each.times * each.sent_bytes / each.links
    seconds = {
        "compute": ((operations - low) / peak + low / (low_peak or peak)) / (COMPUTE_REACHED * (1 - work.bubble)),
        "memory": work.memory_bytes / (MEMORY_REACHED * chip.memory_bandwidth),
        "ici": sent["ici"] / chip.ici_bandwidth,
        "dcn": sent["dcn"] / chip.dcn_bandwidth,
    }
    on_device, network = seconds["compute"] + seconds["memory"], seconds["ici"] + seconds["dcn"]
    step = on_device + network - min(HIDDEN * network, on_device)
    return Prediction(
        **{f"{name}_seconds": value for name, value in seconds.items()},
        step_seconds=step,
        bound=max(seconds, key=seconds.__getitem__),
        mfu=model.causal / step / peak,
        mfu_palm=model.palm / step / peak,
    )


def work_of(built: TracedStep) -> Work:
    """Returns the work of each device in a traced step."""
    plan, layout, schedule = built.plan, built.plan.layout, built.plan.execution.schedule
    stages = schedule.stages if schedule else 1
    return step_work(
        plan.spec,
        plan.execution,
        plan.kernel,
        tokens=built.tokens / layout.mesh.size,
        length=built.batch["tokens"].shape[1],
        sharing=layout.mesh.size // (layout.shards("batch") * layout.shards("length") * stages),
        state_bytes=device_bytes(built.state),
        vocab_tiles=plan.step.num_vocab_tiling,
        quantization=plan.quantization,
        # Each of a pipeline's micro-batches reads a stage's part of the weights.
        micro_batches=plan.accumulation.micro_batches * (schedule.micro_batches / stages if schedule else 1),
    )


def step_work(
    spec: ModelSpec,
    execution: Execution,
    kernel: str,
    *,
    tokens: float,
    length: int,
    sharing: int,
    state_bytes: int,
    vocab_tiles: int = 1,
    quantization: Quantization = NONE,
    micro_batches: float = 1,
) -> Work:
    """Returns the work of one device in a step.

    Each device has `tokens` of the step in rows of `length`, and computes them together with `sharing` devices, each
    with its part of heads and hidden units. `kernel` is attention's; `state_bytes` are of weights and optimizer on the
    device; the loss has `vocab_tiles`; the weights are read in `micro_batches` passes. Of `quantization` count the
    products' own peak and the rounding of what they take, not that of the weights: each device rounds its part of them.
    """
    model = flops.flops_per_token(spec, length)
    again = flops.recomputed_flops(spec, length, execution, vocab_tiles)
    itemsize = jnp.dtype(spec.dtype).itemsize
    # An array between two products is written and read forward, and again if it is not kept; backward it is read, and
    # its gradient is written and read.
    passes = 5 if execution.remat_policy == "none" else 7
    arrays = pairs = 0.0
    for layer, count in flops.all_layers(spec).items():
        # As wide as the embedding: the input, its norm, attention's output, their sum, its norm, and the last sum.
        costs = layer_costs(layer)
        arrays += count * (6 * spec.emb_dim * sharing + sum(part.width for part in costs.values()))
        if scores := costs["attention"].scores:
            keys = length if kernel == "dot_product" else flops.mean_keys(scores, length)
            pairs += count * scores.num_heads * keys
    activations = passes * tokens * arrays * itemsize
    if kernel in ("dot_product", "blocked"):  # scores and weights of each key, in float32
        activations += passes * tokens * 2 * pairs * 4
    quantized = {path[3:] for path in quantization.places}
    if quantized:
        inputs, outputs = flops.product_widths(spec, quantized)
        # An array is read for its largest magnitude, read again, and written as codes: what a product takes forward,
        # and again if it is not kept; its gradient for either product, or for both where scales are per tensor.
        forward = 1 if passes == 5 else 2
        if quantization.kind == "mxfp8":  # blocks are read once, and again for the gradient of the weight
            activations += tokens * ((forward + 1) * inputs + 2 * outputs) * (itemsize + 1)
        else:
            rounded = forward * inputs + (2 if FORMATS[quantization.kind].per_channel else 1) * outputs
            activations += tokens * rounded * (2 * itemsize + 1)
    # Forward and backward, float32: written and read, and their gradient.
    logits = 4 * tokens * (1 + spec.mtp_num_layers) * spec.padded_vocab_size * 4
    # A weight is gathered (written) and read, forward and backward; its gradient is written, and read to be summed.
    weights = 6 * micro_batches * flops.count_params(spec) / sharing * itemsize
    return Work(
        model_flops=flops.FlopsPerToken(*(tokens * count for count in model)),
        recomputed_flops=flops.FlopsPerToken(*(tokens * count for count in again)),
        low_precision=flops.layer_share(spec, quantized),
        whole_scores=kernel == "dot_product",
        memory_bytes=activations + logits + weights + 2 * state_bytes,
        bubble=execution.schedule.bubble if execution.schedule else 0.0,
    )
