"""Check a: a step on meshes of virtual devices gives the gradients, losses and token counts of one device."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from src.config.schema import MESH_AXES, Config, Mesh
from src.extras.verify.comparison import compared
from src.extras.verify.locate import UNROLLED, forward_values, parting_of
from src.extras.verify.rewrites import repeated_stages
from src.extras.verify.rows import Row, mesh_name, not_applicable, unless_refused, verdict
from src.extras.verify.subject import PLAIN_DESCENT, Context, Result, Sizes, Subject, mesh_keys
from src.model.params import by_path, nested
from src.model.spec import model_spec
from src.system.errors import UserError

DEVICES = 8  # virtual ones
# Relative. Sums in another order give 1e-6 to 3e-5 (Gemma 2, whose logits are capped), and a term that is missing or
# counted twice gives 0.04 or more.
BOUND = 3e-4
# Relative to the root mean square of the logits. Rounding gives 0.03 in int8 and 7e-4 in fp8, scales of one device that
# are used for the sum of two give 1.
QUANTIZED_BOUND = 0.2
HALVES, UNEVEN = {"tensor": 2}, 16  # a mesh, and the factor of the hidden units on one of its devices


def rows(context: Context) -> Iterator[Row]:
    """Compares a step on each mesh with the step of one device.

    A mesh that the model refuses is not applicable, or fails if it `is_own`. If the config's mesh has stages, the last
    row is of `repeated_stages`.
    """
    if not context.meshes:
        yield not_applicable("mesh", "the config's mesh has one device")
        return
    expected = context.subject.reference  # before meshes: what one device refuses is an error
    for sizes in context.meshes:
        of_mesh = functools.partial(_of_mesh, context.subject, sizes, expected)
        yield unless_refused(mesh_name(sizes), of_mesh, required=is_own(sizes, context.whole.mesh))
    if is_own({"stage": 2}, context.whole.mesh):  # in the rows above, each stage has one turn
        yield repeated_stages(context.subject)
    if kind := context.whole.step.quantization:
        name = f"logits with quantization={kind}, {mesh_name(HALVES)}"
        yield unless_refused(name, functools.partial(_quantized, name, context.subject, kind))


def _of_mesh(subject: Subject, sizes: Sizes, expected: Result) -> Row:
    devices, keys = math.prod(sizes.values()), {**PLAIN_DESCENT, **mesh_keys(sizes)}
    found = subject.result(subject.plan(devices, **keys))
    parts = functools.partial(parting_of, subject, devices, keys, subject.batch, BOUND)
    return compared(mesh_name(sizes), found, expected, BOUND, parts)


def _quantized(name: str, subject: Subject, kind: str) -> Row:
    """Compares logits of quantized matmuls on the mesh HALVES with those of one device, by their root mean squares.

    Half of the hidden units of feed-forward layers are multiplied by UNEVEN, so that a device's scales for its half
    are not those of the other. Only rounding may differ.
    """
    weights = by_path(subject.weights)
    for path in [path for path in weights if path[-1] == "wi"]:
        units = weights[path].shape[-1]
        weights[path] = weights[path] * np.where(np.arange(units) < units // 2, UNEVEN, 1).astype(np.float32)
    subject = subject.with_weights(nested(weights))

    def logits(devices: int, mesh: Sizes) -> np.ndarray:
        plan = subject.plan(devices, quantization=kind, **mesh_keys(mesh), **UNROLLED)
        return dict(forward_values(subject, plan, subject.batch))["logits"]

    expected, found = logits(1, {}), logits(2, HALVES)
    real = subject.batch["segment_ids"] > 0
    size = np.sqrt(np.mean(np.square(found - expected)[real]) / np.mean(np.square(expected)[real]))
    return verdict(name, size, QUANTIZED_BOUND)


def is_own(sizes: Sizes, configured: Mesh) -> bool:
    """Whether the config's own mesh has these axes, in multiples of these sizes, so that refusing them is a fault.

    An axis of -1 may have any number of devices, but a mesh of only such axes does not count as the config's own.
    """
    pairs = [(_devices(configured, axis), size) for axis, size in sizes.items()]
    return any(own > 1 for own, _ in pairs) and all(own == -1 or own % size == 0 for own, size in pairs)


def usable(axis: str, config: Config) -> bool:
    """Whether a model can use two devices along a mesh axis.

    The axis expert needs experts, and stage needs a group of layers with an even number of repeats.
    """
    spec = model_spec(config.model, config.step, config.batch.max_target_length)
    if axis == "expert":
        return spec.has_experts
    return axis != "stage" or any(group.repeats % 2 == 0 for group in spec.layer_groups)


def chosen(text: str, config: Config, configured: Mesh) -> list[dict[str, int]]:
    """Reads `mesh=`: all, as_configured, axis=size,... or "".

    as_configured gives the axes that may have more than one device in `configured`, the mesh of the whole config, at
    most three in a mesh, with two devices along each. "" gives these and each usable axis by itself; all gives each
    axis by itself and meshes of three axes in which each pair occurs. Raises UserError for an unknown axis, a size
    below 2, or more than DEVICES devices.
    """
    if text and text not in ("all", "as_configured"):
        return [_parsed(text)]
    axes = [axis for axis in MESH_AXES if usable(axis, config)]
    wide = [axis for axis in MESH_AXES if (size := _devices(configured, axis)) > 1 or (size == -1 and axis in axes)]
    both = [dict.fromkeys(wide[start : start + 3], 2) for start in range(0, len(wide), 3)]
    if text == "as_configured":
        return both
    if text == "all":
        return [*({axis: 2} for axis in axes), *_covering(axes)]
    singles = [{axis: 2} for axis in axes]
    return singles + [sizes for sizes in both if sizes not in singles]


def compiled(config: Config, configured: Mesh) -> list[dict[str, int]]:
    """Chooses meshes for check `j`: as configured, or fsdp 2 x tensor 2 if these have no axes besides data and fsdp.

    On the latter, weights are sharded over one axis along which they are gathered, and one along which they are not.
    """
    found = chosen("as_configured", config, configured)
    return found if any({*sizes} - {"data", "fsdp"} for sizes in found) else [{"fsdp": 2, "tensor": 2}]


def _covering(axes: Sequence[str]) -> list[dict[str, int]]:
    """Chooses meshes of three of the axes, two devices along each, so that every pair of axes is in one of them."""
    pairs, found = set(itertools.combinations(axes, 2)), []
    while pairs:
        three = max(
            itertools.combinations(axes, min(3, len(axes))),
            key=lambda each: len(pairs.intersection(itertools.combinations(each, 2))),
        )
        pairs.difference_update(itertools.combinations(three, 2))
        found.append(dict.fromkeys(three, 2))
    return found


def _devices(mesh: Mesh, axis: str) -> int:
    """Devices along an axis in the config; -1 if it may have any number."""
    sizes = [getattr(mesh, f"{kind}_{MESH_AXES[axis]}_parallelism") for kind in ("ici", "dcn")]
    ici, dcn = sizes
    if ici == -1 or (dcn == -1 and axis != "data"):  # dcn_data_parallelism is -1 by default: one slice or host
        return -1
    return math.prod(max(size, 1) for size in sizes)


def _parsed(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in MESH_AXES:
            raise UserError(f"mesh={text}: unknown mesh axis {axis}; expected one of {', '.join(MESH_AXES)}")
        if axis in sizes:
            raise UserError(f"mesh={text}: {axis} is given twice")
        if not number.isdecimal() or int(number) < 2:
            raise UserError(f"mesh={text}: expected {axis}=2 or more devices, not {number or 'nothing'}")
        sizes[axis] = int(number)
    if math.prod(sizes.values()) > DEVICES:
        raise UserError(f"mesh={text} has {math.prod(sizes.values())} devices, and verify makes {DEVICES}")
    return sizes
