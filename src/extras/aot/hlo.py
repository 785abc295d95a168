"""Parses the instructions and collectives of a compiled step from `compiled.as_text()`.

The text is XLA's HLO after all optimizations: computations, each a list of `%name = type opcode(operands), attributes`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from src.extras.aot.topology import wraps
from src.parallel.slices import slice_of

# Fraction of the full array that each of n devices sends, with shards passed around a ring (Patarasuk and Yuan 2009).
RING_SHARE: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), lambda n: (n - 1) / n),
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,  # passed from each device to the next
    # If every device sends equal amounts; the real amounts depend on the data.
    "ragged-all-to-all": lambda n: (n - 1) / n,
}

_INNER = r"[^()]*"
for _ in range(3):  # tuple types nest, and layouts contain parentheses: {1,0:T(8,128)}
    _INNER = rf"(?:[^()]|\({_INNER}\))*"
_TYPE = re.compile(rf"\({_INNER}\)|\w+\[[\d,]*\](?:\{{[^}}]*\}})?")
_INSTRUCTION = re.compile(rf"\s+(ROOT )?%?([\w.\-]+) = (\({_INNER}\)|\S+) ([a-z][\w\-]*)\(([^()]*)\)(.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)(?:,|$)")
# Attributes by which an instruction calls other computations. The function that a reduction applies is not included.
_CALLS = {
    "while": r" body=%?([\w.\-]+)",
    "call": r" to_apply=%?([\w.\-]+)",
    "conditional": r" (?:branch_computations=\{|true_computation=|false_computation=)([%\w.\-, ]+?)(?=\}|, \w+=|$)",
    "fusion": r" calls=%?([\w.\-]+)",
    "async-start": r" calls=%?([\w.\-]+)",
}


@dataclass(frozen=True)
class Collective:
    """A collective operation of a step as one device sees it; bytes are per execution.

    An operation that uses both networks, within slices or hosts and between them, is listed once for each.
    """

    kind: str  # a key of RING_SHARE
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ
    network: str  # ici: within a TPU slice or a GPU's host; dcn: between them
    times: int  # executions per step, excluding loops whose trip count depends on the data
    whole_bytes: int  # of the gathered, reduced or exchanged array; for a permute, what a device sends
    sent_bytes: int  # sent by a device over this network
    links: float = 1.0  # fraction of a device's links on this network that its group uses
    per_round: int = 0  # additional executions per step if each loop left out of `times` runs once
    name: str = field(default="", compare=False)  # the instruction's name
    dtype: str = field(default="", compare=False)  # as HLO spells it: bf16
    asynchronous: bool = field(default=False, compare=False)  # whether other instructions may run at the same time


class Instruction(NamedTuple):
    """One instruction of a computation, in its parts as HLO spells them."""

    root: bool
    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Lists the operands' names; for a constant, its value."""
        return _NAME.findall(re.sub(r"/\*.*?\*/|\s", "", self.arguments))


Computation = Mapping[str, Instruction]  # instructions by name


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Lists the collectives in a compiled program's text, one entry per instruction and network.

    `mesh` has the devices in the order of the program's partitions. Some loops have no trip count in the program, such
    as the windows that only unevenly routed experts need; for them `per_round` counts one iteration. Every branch of a
    conditional counts.
    """
    operations: list[Collective] = []
    computations, entry = parse(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    mesh_map = _MeshMap(mesh, int(partitions[1]) if partitions else 1)
    wrapped = set(re.findall(rf" async-start\(.*{_CALLS['async-start']}", text))
    for computation, instruction, times, with_unknown in executed(computations, entry):
        kind = instruction.opcode.removesuffix("-start")
        if instruction.opcode == "send" and "_xla_megascale_target" in instruction.attributes:
            if re.search(r'_ragged_operand_index="[1-9]', instruction.attributes):
                continue  # a ragged exchange also sends its sizes in four messages of a few bytes: skip them
            kind, groups, whole = _between_slices(instruction, computations[computation], mesh_map)
        elif kind in RING_SHARE and not _continues(instruction, computations[computation]):
            groups = mesh_map.numbers(_groups(instruction.attributes, mesh_map.partitions))
            # An asynchronous collective, except an all-reduce, has the type (input, output, ...).
            is_pair = instruction.opcode.endswith("-start") and kind != "all-reduce"
            whole = type_bytes(_TYPE.findall(instruction.type[1:-1])[1] if is_pair else instruction.type)
            if kind == "reduce-scatter":
                whole *= groups.shape[1]
            elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # the TPU compiler fuses a sum with a slice of it
            elif kind == "ragged-all-to-all":  # each side has room for more rows; the smaller one bounds them
                whole = min(whole, type_bytes(computations[computation][instruction.operands[0]].type))
        else:
            continue
        # A start may be synchronous: XLA's GPU compiler marks it so if nothing runs in the meantime.
        starts = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
        asynchronous = starts or instruction.opcode == "send" or "chain_id" in instruction.attributes
        fields: dict[str, Any] = {"name": instruction.name, "dtype": first_array(instruction.type)[0]}
        fields |= {"asynchronous": asynchronous or computation in wrapped, "per_round": with_unknown - times}
        on_networks = mesh_map.collectives(kind, groups, times, whole)
        operations += [replace(collective, **fields) for collective in on_networks]
    return operations


def parse(text: str) -> tuple[Mapping[str, Computation], str]:
    """Parses the text of an HLO module into its computations and the name of the entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = {}
            entry = name if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            instruction = Instruction(bool(match[1]), *match.groups()[1:])
            if instruction.opcode == "fusion-start":  # in JAX 0.11, with type (operands, result, context)
                result = _TYPE.findall(instruction.type[1:-1])[1]
                instruction = instruction._replace(opcode="fusion", type=result)
            computations[name][match[2]] = instruction
    return computations, entry


def executed(
    computations: Mapping[str, Computation], name: str, times: int = 1, with_unknown: int = 1
) -> Iterator[tuple[str, Instruction, int, int]]:
    """Yields (computation, instruction, count, count) for the computation `name` and, recursively, those it calls.

    The counts are the instruction's executions if `name` runs `times` and `with_unknown` times. Loops without a known
    trip count run zero times in the first count, and once in the second.
    """
    for instruction in computations[name].values():
        yield name, instruction, times, with_unknown
        rounds = loop_rounds(instruction, computations[name], computations)
        counts = times * (rounds or 0), with_unknown * (1 if rounds is None else rounds)
        for callee in callees(instruction):
            yield from executed(computations, callee, *counts)


def callees(instruction: Instruction) -> list[str]:
    """Returns the names of the computations an instruction calls; for a loop, only its body."""
    if instruction.opcode not in _CALLS:
        return []
    called = re.findall(_CALLS[instruction.opcode], instruction.attributes)
    return [name for names in called for name in _NAME.findall(names.replace(" ", ""))]


def loop_rounds(loop: Instruction, caller: Computation, computations: Mapping[str, Computation]) -> int | None:
    """Returns how often an instruction runs its callees: 1, or for a loop its trip count, which is None if unknown."""
    if loop.opcode != "while":
        return 1
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    condition, body = (
        computations[found(rf" {role}=%?([\w.\-]+)", loop.attributes)[1]] for role in ("condition", "body")
    )
    compare, after = (next(each for each in part.values() if each.root) for part in (condition, body))
    before = caller[loop.operands[0]]
    if (compare.opcode, before.opcode, after.opcode) != ("compare", "tuple", "tuple"):
        return None
    counter = condition[compare.operands[0]]
    if counter.opcode != "get-tuple-element" or "direction=LT" not in compare.attributes:
        return None
    index = int(found(r"index=(\d+)", counter.attributes)[1])
    start, bound = _constant(caller, before.operands[index]), _constant(condition, compare.operands[1])
    added = body[after.operands[index]]
    step = _constant(body, added.operands[1]) if added.opcode == "add" else None
    return None if start is None or bound is None or not step else math.ceil((bound - start) / step)


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation[name]
    while instruction.opcode == "copy":
        instruction = computation[instruction.operands[0]]
    return int(instruction.arguments) if instruction.opcode == "constant" else None


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Tests whether an instruction continues or ends a collective that another fusion starts.

    The TPU compiler splits an asynchronous collective over fusions, with matmuls that run at the same time. Each fusion
    names the collective again, as a link of a chain; the one that starts it passes it to AsyncCollectiveStart.
    """
    return "chain_id" in instruction.attributes and not any(
        '"AsyncCollectiveStart"' in other.attributes and instruction.name in other.operands
        for other in computation.values()
    )


def type_bytes(types: str) -> int:
    """Adds up the bytes of all arrays in a type."""
    total = 0
    for dtype, dims in _ARRAY.findall(types):
        bits = 8 if dtype == "pred" else int(found(r"\d+", dtype)[0])
        total += math.prod(_ints(dims)) * bits // 8
    return total


def found(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    """Returns the first match of a pattern that XLA always writes."""
    match = re.search(pattern, text)
    assert match, f"no {pattern} in {text}"
    return match


def first_array(types: str) -> tuple[str, list[int]]:
    """Returns the dtype and dims of the first array in a type."""
    dtype, dims = found(_ARRAY, types).groups()
    return dtype, _ints(dims)


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _groups(attributes: str, partitions: int) -> np.ndarray:
    """Parses the partitions of each group, [groups, n]; for a permute, (source, target) pairs, [pairs, 2]."""
    text = found(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)[1]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if match := re.match(r"\[(.*?)\]<=(\[.*?\])(T\(.*?\))?", text):
        return _iota(match[2] + (match[3] or "")).reshape(_ints(match[1]))
    listed = found(r"^\{((?:\{[\d,]*\},?)*)\}", text)[1]
    return np.array([_ints(group) for group in re.findall(r"\{(.*?)\}", listed)] or [range(partitions)])


def _mesh_groups(text: str) -> np.ndarray:
    """Parses groups given by mesh axes: mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}.

    In (1)2, an axis is split: 1 is the product of the parts before this one, and 2 is this part's size.
    """
    sizes, order, along = found(r"^mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", text).groups()
    axes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", sizes)}
    ids = np.arange(math.prod(axes.values()))
    if order:
        ids = _iota(order) if order.startswith("[") else np.array(_ints(order))
    refs = {
        name: (int(before or 1), int(part or axes[name]))
        for name, before, part in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", along)
    }
    shape, grouped = [], []
    for name, size in axes.items():
        before, part = refs.get(name, (1, 1))
        grouped.append(len(shape) + 1)
        shape += [before, part, size // before // part]
    n = math.prod(shape[dim] for dim in grouped)
    return np.moveaxis(ids.reshape(shape), grouped, range(-len(grouped), 0)).reshape(-1, n)


def _iota(text: str) -> np.ndarray:
    """Expands [4,2]T(1,0): the numbers 0 to 7, reshaped to [4, 2], transposed with the order (1, 0), and flattened."""
    dims, order = found(r"^\[(.*?)\](?:T\((.*?)\))?", text).groups()
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order) if order else None).ravel()


def _between_slices(send: Instruction, computation: Computation, mesh_map: "_MeshMap") -> tuple[str, np.ndarray, int]:
    """Returns kind, groups and bytes of a collective between TPU slices, which another runtime (Megascale) runs.

    Groups, [groups, n], have device numbers in the mesh. The text has device ids, 100000 times the slice plus a number
    in the slice; {1,2}x{0:255} stands for a group for each number from 0 to 255, with the devices of that number in
    slices 1 and 2.
    """
    target, kind = found(
        r'_xla_megascale_target="?(.*?)"?,_xla_megascale_transfer_type="(\w+)"', send.attributes
    ).groups()
    if match := re.match(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target):
        ids = [[100_000 * s + i for s in _ints(match[1])] for i in range(int(match[2]), int(match[3]) + 1)]
    else:
        ids = [_ints(group.replace("->", ",")) for group in re.findall(r"\{([\d,>\-]+)\}", target)]
    groups = np.array([[mesh_map.by_id[i] for i in group] for group in ids])
    sent = type_bytes(found(_ARRAY, send.type)[0])
    whole = sent * groups.shape[1] if kind == "ALL_GATHER" else sent
    if kind == "RAGGED_ALL_TO_ALL":  # as within a slice, the smaller side bounds the rows
        rendezvous = found(r'_xla_host_transfer_rendezvous="[^"]*"', send.attributes)[0]
        received = [each for each in computation.values() if each.opcode == "recv" and rendezvous in each.attributes]
        whole = min([sent, *(type_bytes(found(_ARRAY, each.type)[0]) for each in received)])
    return "collective-permute" if kind == "ONE_TO_ONE" else kind.lower().replace("_", "-"), groups, whole


def network_shares(kind: str, n: int, near: int) -> tuple[float, float]:
    """Returns the fractions of the bytes of a collective among n devices that stay in a slice or host, and leave it.

    `near` of the devices are in one slice or host. Not for collective-permute, whose pairs each use one network.
    """
    if kind.endswith("all-to-all"):  # equal amounts to every other device
        return (near - 1) / max(n - 1, 1), (n - near) / max(n - 1, 1)
    # Rings leave a slice or host once per `near` devices in it, and there are as many rings as ways out.
    return (1 - 1 / near, 1 / near) if near < n else (float(n > 1), 0.0)


def dim_share(count: int, span: int, size: int, ring: bool) -> float:
    """Returns the fraction of the bandwidth along a torus's dim that one group of chips has.

    A group has `count` of the dim's `size` chips, and `span` hops from the first to the last. If its chips are several
    hops apart, the links between them carry other groups' bytes too. A dim without wraparound is a line, and so is a
    part of a ring. It has half of a ring's bandwidth: everything that its ends receive comes over one link.
    """
    if count == 1:
        return 0.0
    hops = span / (count - 1)
    return (1.0 if ring and hops * count == size else 0.5) / hops


class _MeshMap:
    """Maps a program's partitions to the mesh, to slices or hosts, and to a slice's torus."""

    def __init__(self, mesh: Mesh, partitions: int) -> None:
        self.mesh, self.partitions = mesh, partitions
        devices = list(mesh.devices.flat)
        self.domains = np.array([slice_of(device) for device in devices])
        self.by_id = {device.id: number for number, device in enumerate(devices)}
        self.coords = np.array([device.coords for device in devices]) if devices[0].platform == "tpu" else None

    def numbers(self, groups: np.ndarray) -> np.ndarray:
        """Converts partitions to device numbers in the mesh."""
        if self.partitions == self.mesh.size:
            return groups
        # A program for several slices numbers the partitions of one; all slices have the same numbering.
        return np.flatnonzero(self.domains == self.domains[0])[groups]

    def collectives(self, kind: str, groups: np.ndarray, times: int, whole: int) -> Iterator[Collective]:
        """Yields a collective of these groups of devices, [groups, n], once for each network it uses."""
        where = np.stack(np.unravel_index(groups, self.mesh.devices.shape))  # [axes, groups, n]
        differ = (where != where[:, :, :1]).any((1, 2))
        axes = tuple(name for name, differs in zip(self.mesh.axis_names, differ, strict=True) if differs)
        sent = whole * RING_SHARE[kind](groups.shape[1])
        ici, dcn = self._shares(kind, groups)
        if ici:
            yield Collective(kind, axes, "ici", times, whole, round(sent * ici), self._links(kind, groups))
        if dcn:
            yield Collective(kind, axes, "dcn", times, whole, round(sent * dcn))

    def _shares(self, kind: str, groups: np.ndarray) -> tuple[float, float]:
        """Returns the fractions of a device's sent bytes that stay in its slice or host, and that leave it."""
        domains = self.domains[groups]
        near = (domains == domains[:, :1]).sum(1)  # [groups]: devices in the slice or host of the group's first
        if kind == "collective-permute":  # a pair uses one network; the permute uses each that some pair uses
            return float((near == groups.shape[1]).any()), float((near < groups.shape[1]).any())
        return network_shares(kind, groups.shape[1], int(near.max()))

    def _links(self, kind: str, groups: np.ndarray) -> float:
        """Returns the fraction of a device's links on the torus that a group uses; a permute uses one dim at a time."""
        if self.coords is None:
            return 1.0
        where = self.coords[groups]  # [groups, n, 3]
        sizes = np.ptp(self.coords, axis=0) + 1
        shape = tuple(int(size) for size in sizes)
        rings = wraps(shape if shape[2] > 1 else shape[:2])
        # Of the first group: the others are as large.
        shares = [
            dim_share(len(set(along)), max(along) - min(along), size, ring)
            for along, size, ring in zip(where[0].T.tolist(), shape, (*rings, False), strict=False)
        ]
        used = float((where != where[:, :1]).any()) if kind == "collective-permute" else sum(shares)
        # A group within one TPU7x chip uses no link of the torus: the link between the chip's two devices is as fast as
        # its six others together (docs.cloud.google.com/tpu/docs/tpu7x).
        return used / (sizes > 1).sum() if used else 1.0
