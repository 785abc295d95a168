"""Predicts a step's duration from the published rates of its devices.

A device computes matmuls, and between them moves arrays through its memory; both times add up. Communication adds what
does not overlap with them. The reached fractions of published rates and the overlapped fraction of communication are
constants, the same for all hardware, models and meshes. docs/aot.md compares predictions with published runs.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from src.extras.aot.hlo import Collective
from src.extras.aot.memory import device_bytes
from src.model import flops
from src.model.attention_kernels.scores import CONTEXT
from src.model.execution import Execution
from src.model.low_precision import FORMATS
from src.model.parts import layer_costs
from src.model.selection import Quantization
from src.model.spec import ModelSpec
from src.parallel.chips import Chip
from src.step.trace import TracedTrainStep

# The best matmuls reach 86% of the published peak on an A100 and 80% on an H100, whose clock falls under load (Bekman,
# "Machine Learning Engineering", maximum achievable matmul FLOPS); on TPUs whole training steps have reached 80%.
COMPUTE_REACHED = 0.85
# Fraction that a copy in an H100's memory reaches.
MEMORY_REACHED = 0.9
NONE = Quantization()
# Weights are gathered while the previous layer computes, but a sum of activations blocks the next matmul. The program
# does not show how much of either overlaps: assume half.
HIDDEN = 0.5


class Work(NamedTuple):
    """One device's work in a step, without communication."""

    model_flops: flops.FlopsPerToken  # for the device's share of the step's tokens
    recomputed_flops: flops.FlopsPerToken  # added by rematerialization
    whole_scores: bool  # whether attention also computes masked scores
    memory_bytes: float  # read and written between matmuls
    low_precision: float = 0.0  # share of the matmuls with layer weights that run in 8 bits
    bubble: float = 0.0  # fraction of the time that a pipeline stage is idle


class Prediction(NamedTuple):
    """Seconds of a step per resource, and in total, which is less than their sum because of overlap."""

    compute_seconds: float
    memory_seconds: float
    ici_seconds: float
    dcn_seconds: float
    step_seconds: float
    bound: str  # the slowest resource: compute, memory, ici or dcn
    mfu: float  # relative to `peak`, so 8-bit matmuls may exceed 1; counts causal attention
    mfu_palm: float


def predict(
    work: Work, chip: Chip, peak: float, moved: Sequence[Collective], low_peak: float | None = None
) -> Prediction:
    """Predicts a step on devices with `peak` matmul operations per second in its dtype, and `low_peak` in 8 bits."""
    model, again = work.model_flops, work.recomputed_flops
    operations = model.palm + again.palm if work.whole_scores else model.causal + again.causal
    low = work.low_precision * (model.layers + again.layers)
    sent = {"ici": 0.0, "dcn": 0.0}
    for each in moved:  # scaled to all of the device's links: using half of them costs twice the bytes
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


def work_of(traced: TracedTrainStep) -> Work:
    """Computes the work of each device in a traced step."""
    plan, layout, schedule = traced.plan, traced.plan.layout, traced.plan.execution.schedule
    stages = schedule.stages if schedule else 1
    return step_work(
        plan.spec,
        plan.execution,
        plan.kernel,
        tokens=traced.tokens / layout.mesh.size,
        length=traced.batch["tokens"].shape[1],
        sharing=layout.mesh.size // (layout.shards("batch") * layout.shards("length") * stages),
        state_bytes=device_bytes(traced.state),
        vocab_tiles=plan.step.num_vocab_tiling,
        quantization=plan.quantization,
        # For each micro-batch of a pipeline, a device reads only its stage's weights.
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
    """Computes one device's work in a step.

    A device has `tokens` of the step in sequences of `length`, and computes them together with `sharing` devices, over
    which heads and hidden units are sharded. `kernel` is the attention kernel; `state_bytes` covers weights and
    optimizer on the device; `vocab_tiles` is the number of loss tiles; the weights are read in `micro_batches` passes.
    For `quantization`, matmuls use their own peak, and quantizing activations and gradients counts; quantizing weights
    does not, since each device quantizes only its shard.
    """
    model = flops.flops_per_token(spec, length)
    again = recomputed_flops(spec, length, execution, vocab_tiles, kernel)
    itemsize = jnp.dtype(spec.dtype).itemsize
    # An array between two matmuls is written and read in the forward pass, and again if it is recomputed; in the
    # backward pass it is read, and its gradient is written and read.
    passes = 5 if execution.remat_policy == "none" else 7
    arrays = pairs = 0.0
    for layer, count in flops.all_layers(spec).items():
        # With embedding width: the input, its norm, attention's output, their sum, its norm, and the last sum.
        costs = layer_costs(layer)
        arrays += count * (6 * spec.emb_dim * sharing + sum(part.activation_size for part in costs.values()))
        if scores := costs["attention"].scores:
            keys = length if kernel == "dot_product" else flops.mean_keys(scores, length)
            pairs += count * scores.num_heads * keys
    activations = passes * tokens * arrays * itemsize
    if kernel in ("dot_product", "blocked"):  # scores and attention weights per key, in float32
        activations += passes * tokens * 2 * pairs * 4
    quantized = {path[3:] for path in quantization.matmuls}
    if quantized:
        inputs, outputs = product_widths(spec, quantized)
        # Quantizing reads an array for its absmax, reads it again, and writes codes: for a matmul's inputs in the
        # forward pass, and again if recomputed; for its output gradient per matmul, or once for both if scales are per
        # tensor.
        forward = 1 if passes == 5 else 2
        if quantization.kind == "mxfp8":  # blocks are read once, and again for the weight gradient
            activations += tokens * ((forward + 1) * inputs + 2 * outputs) * (itemsize + 1)
        else:
            rounded = forward * inputs + (2 if FORMATS[quantization.kind].per_channel else 1) * outputs
            activations += tokens * rounded * (2 * itemsize + 1)
    # Forward and backward in float32: the logits and their gradient are written and read.
    logits = 4 * tokens * (1 + spec.mtp_num_layers) * spec.padded_vocab_size * 4
    # A weight is gathered (written) and read, forward and backward; its gradient is written, and read to be summed.
    weights = 6 * micro_batches * flops.count_params(spec) / sharing * itemsize
    return Work(
        model_flops=flops.FlopsPerToken(*(tokens * count for count in model)),
        recomputed_flops=flops.FlopsPerToken(*(tokens * count for count in again)),
        low_precision=layer_share(spec, quantized),
        whole_scores=kernel == "dot_product",
        memory_bytes=activations + logits + weights + 2 * state_bytes,
        bubble=execution.schedule.bubble if execution.schedule else 0.0,
    )


# ---- What the backward pass recomputes, and what matmuls with chosen weights read and write


def layer_share(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> float:
    """Share of the layers' weight matmuls that use the weights with these paths in their block."""
    products = list(flops.layer_matmuls(spec))
    return sum(used for path, used in products if path in paths) / sum(used for _, used in products)


def product_widths(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> tuple[float, float]:
    """Counts the numbers per token that the layers' matmuls with these weights read, and that they write.

    An input that several weights of a module read, such as attention's query, key and value, counts once.
    """
    inputs = outputs = 0.0
    for layer, count in flops.all_layers(spec).items():
        weights = [each for each in flops.block_weights(layer, spec) if each.path in paths]
        inputs += count * sum({(each.path[0], each.input): each.taken for each in weights}.values())
        outputs += count * sum(each.used / each.summed for each in weights)
    return inputs, outputs


def recomputed_flops(
    spec: ModelSpec, length: int, execution: Execution, vocab_tiles: int, kernel: str
) -> flops.FlopsPerToken:
    """Counts the matmuls per token that the backward pass recomputes, in addition to `flops_per_token`.

    A block recomputes the arrays that its derivatives need and its policy does not save; with more than one tile of the
    loss, the logits are recomputed too. Attention's two matmuls are recomputed unless the policy saves what the kernel
    needs, which for dot_product includes arrays without a name; scores that other kernels recompute internally, in
    their backward pass, are not counted.
    """
    elements = flops.head_elements(spec) if vocab_tiles > 1 else 0
    if execution.remat_policy == "none":
        return flops.FlopsPerToken(2.0 * elements, 2.0 * elements)
    kept = {name for names in execution.saved_names for name in names}
    if "decoder_layer_input" not in kept:
        elements += spec.mtp_num_layers * 2 * spec.emb_dim**2
    in_layers = 0.0
    for layer, count in flops.all_layers(spec).items():
        products = [weight for weight in flops.block_weights(layer, spec) if weight.input and not weight.ends_block]
        again = [weight for weight in products if not weight.saved_by or not kept.issuperset(weight.saved_by)]
        in_layers += count * sum(weight.used for weight in again)
    attends = kernel == "dot_product" or CONTEXT not in kept
    return flops.matmul_flops(1, elements, in_layers, spec, length, attends)
