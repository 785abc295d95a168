"""Predicts a step's duration from the published rates of its devices, and constants fitted to published runs.

A device computes matmuls and attention, and between them moves arrays through its memory; these times add up.
Communication adds what does not overlap with them, and a job waits for the slowest of its slices or hosts. docs/plan.md
explains each constant and compares predictions with published runs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from src.extras.aot.hlo import Collective
from src.extras.aot.memory import device_bytes
from src.model import flops
from src.model.attention_kernels.cudnn import masked_block
from src.model.attention_kernels.scores import CONTEXT, ScoreSpec
from src.model.execution import Execution
from src.model.low_precision import FORMATS
from src.model.parts import layer_costs
from src.model.selection import Quantization
from src.model.spec import ModelSpec
from src.parallel.chips import Chip
from src.parallel.mesh import MeshLayout
from src.run.summary import step_flops
from src.step.trace import TracedTrainStep

NONE = Quantization()


class Constants(NamedTuple):
    """Constants of the estimate, most of them fractions of published rates (docs/plan.md, "How the estimate works")."""

    matmul: float = 0.72  # fraction of its peak rate that a large matmul reaches
    low_precision: float = 0.75  # the same for 8-bit matmuls, at their own peak, relative to `matmul`
    experts: float = 0.6  # the same for matmuls grouped by expert, relative to `matmul`
    attention: float = 0.5  # the same for attention kernels, relative to `matmul`
    memory: float = 0.9  # fraction of the memory bandwidth
    rounding: float = 0.5  # fraction of the bytes of rounding to 8 bits that is not fused with other kernels
    exposed: float = 0.5  # fraction of asynchronous communication (weights, gradients) that is not hidden
    blocking: float = 1.0  # the same for synchronous communication, for which the next matmul waits
    narrow: float = 64.0  # a matmul of sizes m, k, n takes 1 + narrow (1/m + 1/k + 1/n) times as long
    waiting: float = 0.01  # fraction of the time added for each doubling of the number of slices or hosts


# Fitted to published runs by scripts/evidence/predict_published.py, which prints these lines.
_SHARED = {
    "tpu": Constants(
        matmul=0.822, low_precision=0.964, experts=0.756, attention=0.376, memory=0.94,
        rounding=0.475, exposed=0.543, blocking=0.396, narrow=48.9, waiting=0.00961,
    ),
    "gpu": Constants(
        matmul=0.733, low_precision=0.99, experts=0.544, attention=0.5, memory=0.634,
        rounding=0.687, exposed=0.556, blocking=0.72, narrow=58.1, waiting=0.00596,
    ),
}  # fmt: skip
_MATMUL: dict[str, float] = {
    "NVIDIA B200": 0.664,
    "NVIDIA H100 80GB HBM3": 0.885,
    "NVIDIA H100 96GB HBM2e": 0.594,
    "NVIDIA H200": 0.735,
    "TPU v4": 0.81,
    "TPU v5": 0.917,
    "TPU v5 lite": 0.95,
    "TPU v6 lite": 0.778,
    "TPU7x": 0.809,
}


def constants_of(device_kind: str) -> Constants:
    """Returns the constants of a device's platform, with its own `matmul` if runs on it are published."""
    shared = _SHARED["tpu" if device_kind.startswith("TPU") else "gpu"]
    return shared._replace(matmul=_MATMUL.get(device_kind, shared.matmul))


class Work(NamedTuple):
    """One device's work in a step, without communication. `operations` include the recomputed ones."""

    model_flops: flops.FlopsPerToken  # for a device's tokens: all tokens of the step over the number of devices
    recomputed_flops: flops.FlopsPerToken  # in addition, by rematerialization
    operations: "Operations"
    memory_bytes: float  # read and written between matmuls
    rounding_bytes: float = 0.0  # read and written to round the inputs of 8-bit matmuls
    bubble: float = 0.0  # fraction of the time that a pipeline stage is idle


class Operations(NamedTuple):
    """Floating-point operations by kind; `narrow` and `narrow_low` count the others' operations again, weighted."""

    dense: float  # matmuls with weights in neither `low` nor `experts`, and a layer's `other_flops`
    low: float = 0.0  # matmuls with weights, in 8 bits
    experts: float = 0.0  # matmuls grouped by expert
    attention: float = 0.0  # attention kernels, including the masked scores that they compute
    narrow: float = 0.0  # operations x (1/m + 1/k + 1/n), over the matmuls in `dense` and `experts`
    narrow_low: float = 0.0  # the same for `low`


class Prediction(NamedTuple):
    """Seconds of a step for each resource, and for the whole step, in which resources overlap."""

    compute_seconds: float
    memory_seconds: float
    ici_seconds: float
    dcn_seconds: float
    step_seconds: float
    bound: str  # the resource with the most seconds: compute, memory, ici or dcn
    mfu: float  # relative to `peak`, so 8-bit matmuls may exceed 1; counts causal attention
    mfu_palm: float  # the same, but counts full attention, as in PaLM


def predict(
    work: Work,
    chip: Chip,
    peak: float,
    moved: Sequence[Collective],
    low_peak: float | None = None,
    constants: Constants | None = None,
    slices: int = 1,
) -> Prediction:
    """Predicts a step's duration from a device's `work` and the collectives `moved`.

    `peak` and `low_peak` are the device's matmul rates in the step's dtype and in 8 bits, in operations per second;
    without `low_peak`, 8-bit matmuls run at `peak`. A job on several `slices` or hosts waits for the slowest.
    `constants` are by default the chip's.
    """
    constants = constants or constants_of(chip.kind)
    dense, low, experts, attention, narrow, narrow_low = work.operations
    matmuls = dense + experts / constants.experts + attention / constants.attention + constants.narrow * narrow
    low = (low + constants.narrow * narrow_low) / constants.low_precision
    matmul_seconds = matmuls / peak + low / (low_peak or peak)
    sent = {"ici": 0.0, "dcn": 0.0}
    exposed = 0.0
    for each in moved:
        bandwidth = chip.ici_bandwidth if each.network == "ici" else chip.dcn_bandwidth
        # Bandwidths are of all the device's links: a collective that uses half of them takes twice as long.
        taken = each.times * each.sent_bytes / each.links / bandwidth
        sent[each.network] += taken
        exposed += taken * (constants.exposed if each.asynchronous else constants.blocking)
    seconds = {
        "compute": matmul_seconds / (constants.matmul * (1 - work.bubble)),
        "memory": (work.memory_bytes + constants.rounding * work.rounding_bytes)
        / (constants.memory * chip.memory_bandwidth),
        **sent,
    }
    on_device, network = seconds["compute"] + seconds["memory"], sent["ici"] + sent["dcn"]
    step = max(on_device + min(exposed, network), network) * (1 + constants.waiting * math.log2(slices))
    return Prediction(
        **{f"{name}_seconds": value for name, value in seconds.items()},
        step_seconds=step,
        bound=max(seconds, key=seconds.__getitem__),
        mfu=work.model_flops.causal / step / peak,
        mfu_palm=work.model_flops.palm / step / peak,
    )


def work_of(traced: TracedTrainStep) -> Work:
    """Computes the work of each device in a traced step; `operations` include gradients of frozen weights."""
    plan, length = traced.plan, traced.batch["tokens"].shape[1]
    work = step_work(
        plan.spec,
        plan.execution,
        plan.kernel,
        plan.layout,
        tokens=traced.tokens,
        length=length,
        state_bytes=device_bytes(traced.state),
        vocab_tiles=plan.step.num_vocab_tiling,
        quantization=plan.quantization,
        micro_batches=plan.accumulation.micro_batches,
        packed=plan.packed,
    )
    tokens = traced.tokens / plan.layout.mesh.size
    return work._replace(model_flops=flops.FlopsPerToken(*(tokens * count for count in step_flops(plan, length))))


def step_work(
    spec: ModelSpec,
    execution: Execution,
    kernel: str,
    layout: MeshLayout,
    *,
    tokens: float,
    length: int,
    state_bytes: int,
    vocab_tiles: int = 1,
    quantization: Quantization = NONE,
    micro_batches: float = 1,
    packed: bool = False,
) -> Work:
    """Computes one device's work in a step of `tokens`, over all devices, in sequences of `length`.

    `kernel` is the attention kernel, and `packed` sequences may have several segments; `state_bytes` counts the weights
    and optimizer state on the device; `vocab_tiles` is the number of tiles of the loss. With `quantization`, its
    matmuls count as 8-bit ones, and rounding activations and gradients as `rounding_bytes`; rounding weights does not
    count, since each device rounds only its shard.
    """
    stages = execution.schedule.stages if execution.schedule else 1
    # Tensor parallelism: `sharing` devices compute the same tokens, each with its shard of the heads and hidden units.
    sharing = layout.mesh.size // (layout.shards("batch") * layout.shards("length") * stages)
    sequences = round(tokens / length / micro_batches)
    tokens /= layout.mesh.size
    if execution.schedule:  # for each of a pipeline's micro-batches, a device reads only its stage's weights
        sequences //= execution.schedule.micro_batches
        micro_batches *= execution.schedule.micro_batches / stages
    model = flops.flops_per_token(spec, length)
    again = recomputed_flops(spec, length, execution, vocab_tiles, kernel)
    itemsize = jnp.dtype(spec.dtype).itemsize
    # An array between two matmuls is written and read in the forward pass, and again if it is recomputed; in the
    # backward pass it is read, and its gradient is written and read.
    passes = 5 if execution.remat_policy == "none" else 7
    arrays = pairs = 0.0
    masked: dict[ScoreSpec, int] = {}
    for layer, count in flops.all_layers(spec).items():
        # Six arrays have the width D: the input, its norm, attention's output, the sum, its norm, and the last sum.
        costs = layer_costs(layer)
        arrays += count * (6 * spec.emb_dim * sharing + sum(part.activation_size for part in costs.values()))
        if scores := costs["attention"].scores:
            keys = length if kernel == "dot_product" else flops.mean_keys(scores, length)
            pairs += count * scores.num_heads * keys
            if kernel == "cudnn_flash":
                masked[scores] = masked_block(sequences, length, scores, packed, layout)
    activations = passes * tokens * arrays * itemsize
    if kernel in ("dot_product", "blocked"):  # scores and attention weights per key, in float32
        activations += passes * tokens * 2 * pairs * 4
    rounding, quantized = 0.0, {path[3:] for path in quantization.matmuls}
    if quantized:
        inputs, outputs = product_widths(spec, quantized)
        # Quantizing reads an array for its absmax, reads it again, and writes codes: a matmul's input in the forward
        # pass, and again if recomputed; its output's gradient for each of the two backward matmuls, or once for both if
        # scales are per tensor.
        forward = 1 if passes == 5 else 2
        if quantization.kind == "mxfp8":  # one read; inputs once more for the weight's gradient
            rounding = tokens * ((forward + 1) * inputs + 2 * outputs) * (itemsize + 1)
        else:
            rounded = forward * inputs + (2 if FORMATS[quantization.kind].per_channel else 1) * outputs
            rounding = tokens * rounded * (2 * itemsize + 1)
    # Forward and backward in float32: the logits and their gradient are written and read.
    logits = 4 * tokens * (1 + spec.mtp_num_layers) * spec.padded_vocab_size * 4
    # A weight is gathered (written) and read, forward and backward; its gradient is written, and read to be summed.
    of_experts = sum(
        count * each.size
        for layer, count in flops.all_layers(spec).items()
        for each in flops.block_weights(layer, spec)
        if each.used < each.size
    )
    again_read = sum(
        count * each.size
        for layer, count in flops.repeated_layers(spec).items()
        for each in flops.block_weights(layer, spec)
    )
    elements = flops.count_params(spec) + again_read - of_experts * (1 - 1 / layout.shards("expert"))
    weights = 6 * micro_batches * elements / sharing * itemsize
    rows = tokens * sharing / micro_batches
    of_token = operations(spec, length, execution, vocab_tiles, kernel, quantized, rows, sharing, masked)
    return Work(
        model_flops=flops.FlopsPerToken(*(tokens * count for count in model)),
        recomputed_flops=flops.FlopsPerToken(*(tokens * count for count in again)),
        operations=Operations(*(tokens * count for count in of_token)),
        memory_bytes=activations + logits + weights + 2 * state_bytes,
        rounding_bytes=rounding,
        bubble=execution.schedule.bubble if execution.schedule else 0.0,
    )


# ---- Operations, also recomputed ones, and the sizes of matmuls' inputs and outputs


def operations(
    spec: ModelSpec,
    length: int,
    execution: Execution,
    vocab_tiles: int,
    kernel: str,
    quantized: Collection[Any],
    rows: float,
    sharing: int,
    masked: Mapping[ScoreSpec, int] = MappingProxyType({}),
) -> Operations:
    """Counts a step's operations per token, forward, backward and recomputed, by kind.

    `quantized` has the paths, within a block, of the weights used in 8-bit matmuls. A device multiplies `rows` tokens
    at a time; heads and hidden units are split over `sharing` devices. `masked` has the tokens of the blocks for which
    attention builds masks, 0 for none. With a limited capacity, experts compute all their slots, also empty ones.
    """
    dense = (8 if vocab_tiles > 1 else 6) * flops.head_elements(spec)
    dense += (6 + 2 * _recomputes_inputs(execution)) * spec.mtp_num_layers * 2 * spec.emb_dim**2
    low = experts = attention = narrow_low = 0.0
    narrow = dense * (1 / rows + 1 / spec.emb_dim + sharing / spec.padded_vocab_size)
    again = execution.remat_policy != "none"
    for layer, count in flops.all_layers(spec).items():
        costs = layer_costs(layer)
        for weight in flops.block_weights(layer, spec):
            of_weight = 2 * count * (3 + _is_recomputed(weight, execution)) * weight.used * bool(weight.input)
            # Either the output of a matmul or its input has heads or hidden units, which are sharded: the output if it
            # reads the residual stream.
            made, of_experts = weight.used / weight.summed, weight.used < weight.size
            if of_experts:
                of_weight *= max(layer.capacity_factor, 1.0)
                made /= layer.num_experts_per_tok
            reads_stream = not {"embed", "expert_embed"}.isdisjoint(weight.input)
            sizes = (weight.summed, made / sharing) if reads_stream else (weight.summed / sharing, made)
            thin = of_weight * (1 / sizes[0] + 1 / sizes[1] + weight.size / weight.used / rows)
            if weight.path in quantized:
                low, narrow_low = low + of_weight, narrow_low + thin
            elif of_experts:
                experts, narrow = experts + of_weight, narrow + thin
            else:
                dense, narrow = dense + of_weight, narrow + thin
        dense += count * (3 + again) * sum(part.other_flops for part in costs.values())
        if scores := costs["attention"].scores:
            passes = 3 + _attends_again(kernel, execution)
            # A TPU multiplies by whole tiles of 128 columns.
            tile = 128 if kernel == "flash" else 1
            widths = sum(math.ceil(size / tile) * tile for size in (scores.head_dim, scores.value_dim))
            keys = computed_keys(scores, length, kernel, masked.get(scores, 0))
            attention += count * passes * 2.0 * scores.num_heads * widths * keys
    return Operations(dense, low, experts, attention, narrow, narrow_low)


def computed_keys(scores: ScoreSpec, length: int, kernel: str, masked: int = 0) -> float:
    """Mean number of keys whose scores a kernel computes for a query, including masked ones in its blocks.

    With a mask, cuDNN takes about as long as if it computed all of a block of `masked` tokens (docs/performance.md).
    """
    if kernel == "dot_product":
        return length
    block = masked or {"flash": 512 if scores.window else 1024, "blocked": 512}.get(kernel, 128)
    keys = flops.mean_keys(scores, length)
    reach = min(scores.window or length, scores.chunk or length, length)
    return min(keys + block * (0.5 if reach == length else 1.0), length)


def product_widths(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> tuple[float, float]:
    """Counts the elements per token of the inputs and the outputs of the layers' matmuls with the weights `paths`.

    An input of several weights of a module, such as attention's query, key and value, counts once.
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
    """Counts the FLOPs per token of matmuls that the backward pass recomputes, in addition to `flops_per_token`.

    A block recomputes the arrays that its derivatives need and its policy does not save; with more than one tile of the
    loss, the logits are recomputed too. Attention's two matmuls are recomputed unless the policy saves the kernel's
    residuals; dot_product has some without a name, which only the policy none saves. Scores that other kernels
    recompute internally, in their backward pass, are not counted.
    """
    elements = flops.head_elements(spec) if vocab_tiles > 1 else 0
    if execution.remat_policy == "none":
        return flops.FlopsPerToken(2.0 * elements, 2.0 * elements)
    if _recomputes_inputs(execution):
        elements += spec.mtp_num_layers * 2 * spec.emb_dim**2
    in_layers = 0.0
    for layer, count in flops.all_layers(spec).items():
        products = [weight for weight in flops.block_weights(layer, spec) if weight.input]
        in_layers += count * sum(weight.used for weight in products if _is_recomputed(weight, execution))
    return flops.matmul_flops(1, elements, in_layers, spec, length, _attends_again(kernel, execution))


def _kept(execution: Execution) -> set[str]:
    return {name for names in execution.saved_names for name in names}


def _recomputes_inputs(execution: Execution) -> bool:
    return execution.remat_policy != "none" and "decoder_layer_input" not in _kept(execution)


def _is_recomputed(weight: flops.BlockWeight, execution: Execution) -> bool:
    if execution.remat_policy == "none" or weight.ends_block:
        return False
    return not weight.saved_by or not _kept(execution).issuperset(weight.saved_by)


def _attends_again(kernel: str, execution: Execution) -> bool:
    return execution.remat_policy != "none" and (kernel == "dot_product" or CONTEXT not in _kept(execution))
