"""Check a: gradients, losses and token counts on meshes of virtual devices equal those of one device."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from src.config.schema import MESH_AXES, Config, Mesh
from src.extras.verify.locate import parting_of
from src.extras.verify.subject import NOT_APPLICABLE, PLAIN_DESCENT, Row, Subject, compared, mesh_keys
from src.model.spec import model_spec
from src.system.errors import UserError

DEVICES = 8  # virtual ones
# The same sums in another order: clean figures are 1e-6 to 3e-5 (Gemma 2, whose logits are capped), and a term that is
# missing or counted twice gives 0.04 or more.
BOUND = 3e-4

Sizes = Mapping[str, int]  # devices along each axis of more than one


def rows(subject: Subject, where: Sequence[Sizes]) -> Iterator[Row]:
    """Compares a step on each mesh with the step of one device."""
    if not where:
        yield Row("a", "mesh", NOT_APPLICABLE, note="the config's mesh has one device")
    for sizes in where:
        name = "mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        if why := obstacle(subject.config, sizes):
            yield Row("a", name, NOT_APPLICABLE, note=why)
            continue
        expected = subject.reference
        place = math.prod(sizes.values()), {**PLAIN_DESCENT, **mesh_keys(sizes)}
        found = subject.attempt(*place)
        if isinstance(found, str):
            yield Row("a", name, NOT_APPLICABLE, note=found)
        else:
            parts = functools.partial(parting_of, subject, *place, None, BOUND)
            yield compared("a", name, found, expected, BOUND, parts)


def obstacle(config: Config, sizes: Sizes) -> str:
    """Says what the config lacks for this mesh; "" if nothing."""
    spec = model_spec(config.model, config.step, config.batch.max_target_length)
    if sizes.get("expert", 1) > 1 and not spec.has_experts:
        return "the model has no experts"
    most = max(group.repeats for group in spec.layer_groups)
    if sizes.get("stage", 1) > 1 and most % sizes["stage"]:
        return f"no group of layers repeats a multiple of {sizes['stage']} times"
    return ""


def chosen(text: str, config: Config, configured: Mesh) -> list[dict[str, int]]:
    """Reads `mesh=`: all (every pair of axes, in threes), as_configured, "" (that, and single axes), or axis=size,...

    `configured` is the mesh of the whole config; its axes of more than one device become 2. Raises UserError for an
    unknown axis, a size below 2, or more devices than there are.
    """
    if text and text not in ("all", "as_configured"):
        return [_parsed(text)]
    axes = [axis for axis in MESH_AXES if not obstacle(config, {axis: 2})]
    wide = [axis for axis in MESH_AXES if _devices(configured, axis) != 1 and axis in axes]
    both = [dict.fromkeys(wide[start : start + 3], 2) for start in range(0, len(wide), 3)]
    if text == "as_configured":
        return both
    if text == "all":
        return [*({axis: 2} for axis in axes), *_covering(axes)]
    singles = [{axis: 2} for axis in axes]
    return singles + [sizes for sizes in both if sizes not in singles]


def compiled(config: Config, configured: Mesh) -> list[dict[str, int]]:
    """Chooses the meshes whose programs are looked at: the config's, and if it shards weights only by fsdp, tensor too.

    Tensors are sharded over both axes then, of which one is gathered and one is not.
    """
    found = chosen("as_configured", config, configured)
    return found if any({*sizes} - {"data", "fsdp"} for sizes in found) else [{"fsdp": 2, "tensor": 2}]


def _covering(axes: Sequence[str]) -> list[dict[str, int]]:
    """Meshes of three axes that have every pair of axes together at least once."""
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
    """Devices along an axis in the config, -1 (the rest) where any number may be."""
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
        if not number.isdigit() or int(number) < 2:
            raise UserError(f"mesh={text}: expected {axis}=2 or more devices, not {number or 'nothing'}")
        sizes[axis] = int(number)
    if math.prod(sizes.values()) > DEVICES:
        raise UserError(f"mesh={text} has {math.prod(sizes.values())} devices, and verify makes {DEVICES}")
    return sizes
