"""Summarizes a compiled step from its program: `scripts/evidence/program_stats.py configs/base.yml key=value ...`.

Keys are as for `src.train_compile`. A saved program is read with `program_stats.py FILE --topology v5p-128`.
Seconds are the TPU compiler's own estimates per instruction, times the iterations of their loops; it has no estimates
for kernels (Pallas) or for waiting on the network. They serve to rank programs, and are not step times. With
`--bundles`, kernels get their number of instruction bundles, of which a TPU issues at most one per cycle.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
import numpy as np
from jax.sharding import Mesh

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import RING_SHARE, Computation, Instruction, collectives, executed, parse, type_bytes
from src.extras.aot.topology import parse_topology
from src.extras.aot.train_compile import USAGE
from src.run.run_setup import configured
from src.step.compiler_flags import compiler_options
from src.step.trace import trace_train_step
from src.system.exit_codes import run_command

# Cycles per second: a chip's published peak over its matrix units' operations per cycle (v4, v5e, v5p: 128 x 128 each).
CLOCK = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU7x": 2.2e9}
LISTED = 20  # copies and kernels
# Operations that move an array without computing.
MOVES = {"copy", "transpose", "reshape", "bitcast", "parameter", "tuple", "get-tuple-element", "constant", "slice"}
MOVES |= {"dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"}
LAYS_OUT = {"copy", "transpose", "reshape"}  # the ones that a better program might avoid
GEMM_TARGETS = ("__cublas", "__cudnn$conv")
BUNDLES = "schedule-analysis_final_bundles"  # libtpu's final report on each compiled instruction
_DTYPE = re.compile(r"([a-z]\w*)\[")


class Executed(NamedTuple):
    """An instruction outside fusions, its number of executions, and the instructions it consists of."""

    instruction: Instruction
    operands: list[str]  # their types
    times: int
    inside: list[tuple[Computation, Instruction]]


def main(argv: list[str]) -> None:
    """Prints the statistics; `--json` also writes them, `--save` writes the program's text."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program", nargs="+", help="a config and keys, or a file with a program's text")
    arguments.add_argument("--topology", default="", help="the devices of a program from a file, such as v5p-128")
    arguments.add_argument("--slices", type=int, default=1, help="for a program from a file: the number of such slices")
    arguments.add_argument("--json", default="", help="file to write")
    arguments.add_argument("--save", default="", help="file to write the program's text to")
    arguments.add_argument("--bundles", action="store_true", help="count kernels' bundles, for a config on TPUs")
    given = arguments.parse_intermixed_args(argv)  # allows options between keys
    bundles = {}
    if given.program[0].endswith((".yml", ".yaml")):
        with tempfile.TemporaryDirectory() as folder:
            if given.bundles:
                dump_bundles(folder)
            text, mesh, kind, memory = compiled(given.program)
            bundles = dumped_bundles(Path(folder))
    else:
        text, memory = Path(given.program[0]).read_text(), {}
        topology = parse_topology(given.topology, given.slices) if given.topology else None
        kind = topology.chip.kind if topology and topology.chip else ""
        several = topology and topology.slices > 1  # the program numbers several slices' devices in its own way
        mesh = Mesh(np.array(abstract_devices(topology)), ("devices",)) if several else numbered_mesh(text)
    result = {"memory": memory, **statistics(text, mesh, kind, bundles)}
    if given.save:
        Path(given.save).write_text(text)
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")
    print_statistics(result)


def compiled(argv: Sequence[str]) -> tuple[str, Mesh, str, dict[str, int]]:
    """Compiles a config's step: returns the program's text, mesh, device kind, and bytes of memory."""
    config = configured(argv, USAGE, joins=False)
    assert config  # only --help has none
    topology = parse_topology(config.aot.compile_topology, config.aot.compile_topology_num_slices)
    devices = abstract_devices(topology)
    jax.config.update("jax_enable_compilation_cache", False)  # cached programs have no text
    traced = trace_train_step(
        config, devices, compiler_options(config.aot.compile_xla_flags, devices[0], topology.slices)
    )
    program = traced.jax_traced.lower().compile()
    stated: Any = program.memory_analysis()
    memory = {"arguments": stated.argument_size_in_bytes, "temporaries": stated.temp_size_in_bytes}
    memory["at once"] = stated.peak_memory_in_bytes  # arguments included
    if counted := program.cost_analysis():  # not available for an absent GPU
        memory["accessed"] = int(counted["bytes accessed"])
    return program.as_text(), traced.plan.layout.mesh, devices[0].device_kind, memory


def dump_bundles(folder: str) -> None:
    """Makes libtpu, which must not be loaded yet, write each instruction's bundles into a folder."""
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "final_bundles",  # the pass that BUNDLES reports on
    }
    words = [os.environ.get("LIBTPU_INIT_ARGS", ""), *(f"--{name}={value}" for name, value in flags.items())]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(words).strip()


def dumped_bundles(folder: Path) -> dict[str, int]:
    """Reads the number of bundles by instruction from a folder of `dump_bundles`; the last file for a name counts.

    A file is empty if an instruction has no program, such as a custom call that allocates.
    """
    found = {}
    for path in sorted(folder.glob(f"*-{BUNDLES}.txt")):  # TIME-INSTRUCTION-PASS-...
        name = re.fullmatch(rf"\d+-(.+)-\d+-{BUNDLES}\.txt", path.name)[1]
        if text := path.read_text():
            found[name] = int(re.search(r"total scheduled bundles:\s+(\d+)", text)[1])
    return found


def numbered_mesh(text: str) -> Any:
    """Makes a mesh of one axis for a program of one slice or host whose mesh is unknown."""
    count = int(found[1]) if (found := re.search(r"num_partitions=(\d+)", text)) else 1
    devices = np.array([SimpleNamespace(id=i, platform="", process_index=0) for i in range(count)])
    return SimpleNamespace(devices=devices, axis_names=("devices",), size=count)


def statistics(text: str, mesh: Mesh, kind: str, bundles: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Computes all statistics except memory, for a program on this kind of device; `bundles` are by instruction."""
    found = list(instructions(text))
    cycles, seconds = Counter(), CLOCK.get(kind)
    for each in found:
        cycles[category(each)] += each.times * estimated_cycles(each.instruction)
    result = {"cycles": dict(cycles), "matmuls": matmuls(found)}
    result |= {"kernels": kernels(found, bundles), "copies": copies(found)}
    if seconds:
        result["seconds"] = {name: count / seconds for name, count in [*cycles.items(), ("sum", sum(cycles.values()))]}
    moved: dict[tuple, Counter] = {}
    for each in collectives(text, mesh):
        key = (each.kind, each.dtype, "async" if each.asynchronous else "sync", each.network, "+".join(each.axes))
        totals = {"places": 1, "executions": each.times, "sent_bytes": each.times * each.sent_bytes}
        moved.setdefault(key, Counter()).update(totals)
    names = ("kind", "dtype", "when", "network", "axes")
    result["collectives"] = [dict(zip(names, key, strict=True)) | totals for key, totals in sorted(moved.items())]
    return result


def instructions(text: str) -> Iterator[Executed]:
    """Yields all instructions that a program executes outside fusions."""
    computations, entry = parse(text)
    fused = {name for part in computations.values() for each in part.values() for name in called(each)}
    for name, instruction, times, _ in executed(computations, entry):
        if name not in fused:
            part = computations[name]
            operands = [part[operand].type for operand in instruction.operands if operand in part]
            yield Executed(instruction, operands, times, list(inside(instruction, part, computations)))


def called(instruction: Instruction) -> list[str]:
    """Returns the computation of a fusion."""
    return re.findall(r" calls=%?([\w.\-]+)", instruction.attributes) if instruction.opcode == "fusion" else []


def inside(
    instruction: Instruction, part: Computation, computations: Mapping[str, Computation]
) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the instruction, or all instructions in a fusion and its nested fusions, each with its computation."""
    names = called(instruction)
    if not names:
        yield part, instruction
    for name in names:
        for each in computations[name].values():
            yield from inside(each, computations[name], computations)


def category(each: Executed) -> str:
    """Classifies an instruction's cycles; a fusion of a matmul and a collective counts as a matmul."""
    opcodes = {instruction.opcode for _, instruction in each.inside}
    if opcodes & {"convolution", "dot"} or is_gemm(each):
        return "matmuls"
    if {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes} & set(RING_SHARE):
        return "collectives"
    return "copies" if opcodes <= MOVES and opcodes & LAYS_OUT else "elementwise"


def estimated_cycles(instruction: Instruction) -> int:
    """Returns the TPU compiler's estimate of one execution; 0 if there is none."""
    if instruction.opcode in ("while", "conditional", "call"):  # their callees are counted separately
        return 0
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) if found else 0


def is_gemm(each: Executed) -> bool:
    """Tests for a matmul by a GPU library or by Triton."""
    calls = any(target(one).startswith(GEMM_TARGETS) for _, one in each.inside)
    return calls or "__triton" in each.instruction.attributes


def target(instruction: Instruction) -> str:
    """Returns the target of a custom call."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found and instruction.opcode == "custom-call" else ""


def matmuls(found: Sequence[Executed]) -> list[dict[str, Any]]:
    """Counts matmuls by implementation and dtypes of inputs and output, most frequent first.

    A fusion may convert a matmul's result: the output dtype is before the conversion.
    """
    counts: dict[str, Counter] = {}
    for each in found:
        for part, one in each.inside:  # a library call may also be in a fusion, which passes it a slice
            if one.opcode in ("dot", "convolution"):
                how = "triton gemm fusion" if "__triton" in each.instruction.attributes else one.opcode
            elif not (how := target(one)).startswith(GEMM_TARGETS):
                continue
            inputs = " x ".join(_DTYPE.search(part[name].type)[1] for name in one.operands[:2])
            count = counts.setdefault(f"{how}: {inputs} -> {_DTYPE.search(one.type)[1]}", Counter())
            count.update({"places": 1, "executions": each.times})
    return [{"kind": kind, **n} for kind, n in sorted(counts.items(), key=lambda item: -item[1]["executions"])]


def kernels(found: Sequence[Executed], bundles: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Counts kernel calls by name and dtypes of operands and results; cycles do not include them.

    `bundles` are by instruction name, and the maximum over a kernel's calls is reported. A loop in a kernel counts
    once.
    """
    counts: dict[str, Counter] = {}
    for each in found:
        if "tpu_custom_call" in target(each.instruction) or "triton_kernel" in target(each.instruction):
            types = (
                ",".join(dict.fromkeys(_DTYPE.findall(t))) for t in (" ".join(each.operands), each.instruction.type)
            )
            name = re.sub(r"\.\d+$", "", each.instruction.name)
            count = counts.setdefault(f"{name}: {' -> '.join(types)}", Counter())
            count.update({"places": 1, "executions": each.times})
            if each.instruction.name in (bundles or {}):
                count["bundles"] = max(count["bundles"], bundles[each.instruction.name])
    return [{"kind": kind, **n} for kind, n in counts.items()]


def copies(found: Sequence[Executed]) -> list[dict[str, Any]]:
    """Lists copies of arrays into another layout or buffer, by the bytes they write in a step, largest first."""
    result = []
    for each in found:
        if category(each) == "copies":
            name = re.search(r'op_name="([^"]*)"', each.instruction.attributes)
            facts = {"type": each.instruction.type, "name": name[1] if name else "", "times": each.times}
            facts["cycles"] = each.times * estimated_cycles(each.instruction)
            result.append({"bytes": each.times * written_bytes(each), **facts})
    return sorted(result, key=lambda copy: -copy["bytes"])


def written_bytes(each: Executed) -> int:
    """Counts the bytes that one execution writes: its whole result, or only the update of an array updated in place."""
    size = type_bytes(each.instruction.type)
    for part, one in each.inside:
        if one.opcode == "dynamic-update-slice" and one.type.partition("{")[0] in each.instruction.type:
            size -= type_bytes(one.type) - type_bytes(part[one.operands[1]].type)
    return size


def print_statistics(result: Mapping[str, Any]) -> None:
    """Prints the result of `statistics`, with gigabytes of 1e9."""
    print("  ".join(f"{name} {size / 1e9:.3f} GB" for name, size in result["memory"].items()))
    unit, amounts = ("s", result["seconds"]) if "seconds" in result else ("cycles", result["cycles"])
    print("  ".join(f"{name} {amount:.4g} {unit}" for name, amount in amounts.items()))
    for title in ("matmuls", "kernels"):
        print(f"\n{title} (places, executions)")
        for each in result[title][:LISTED]:
            of = f" ({each['bundles']:,} bundles)" if "bundles" in each else ""
            print(f"  {each['places']:5} {each['executions']:7}  {each['kind']}{of}")
    print("\ncollectives (places, executions, GB sent)")
    for each in result["collectives"]:
        name = " ".join(each[part] for part in ("kind", "dtype", "when", "network", "axes"))
        print(f"  {each['places']:5} {each['executions']:7} {each['sent_bytes'] / 1e9:9.3f}  {name}")
    print(f"\ncopies: {sum(each['bytes'] for each in result['copies']) / 1e9:.1f} GB written; the largest (GB, times)")
    for each in result["copies"][:LISTED]:
        print(f"  {each['bytes'] / 1e9:8.3f} {each['times']:5}  {each['type'].split('{')[0]}  {each['name']}")


if __name__ == "__main__":
    run_command(main, may_exit=True)
