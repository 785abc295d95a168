"""What a compiled step does, read from its program: `python scripts/program_stats.py configs/base.yml key=value ...`.

Keys as `src.train_compile` takes them. A saved program is read as `scripts/program_stats.py FILE --topology v5p-128`.
Seconds are the TPU compiler's own estimates, instruction by instruction, times the rounds of their loops; it gives none
for kernels (Pallas) and none for what waits on the network. They rank programs, and are no step time. With `--bundles`
a kernel has its instruction bundles, of which a TPU issues at most one a cycle.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
import numpy as np
from jax.sharding import Mesh

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import RING_SHARE, Computation, Instruction, collectives, executed, parse, type_bytes
from src.extras.aot.train_compile import USAGE
from src.parallel.topology import parse_topology
from src.run.run_setup import configured
from src.step.build import build
from src.step.compiler_flags import compiler_options
from src.system.exit_codes import run_command

# Cycles a second: a chip's stated peak over what its matrix units do in a cycle (v4, v5e, v5p: 128 x 128 each).
CLOCK = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU7x": 2.2e9}
LISTED = 20  # copies and kernels
# What moves an array and computes nothing.
MOVES = {"copy", "transpose", "reshape", "bitcast", "parameter", "tuple", "get-tuple-element", "constant", "slice"}
MOVES |= {"dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"}
LAYS_OUT = {"copy", "transpose", "reshape"}  # of those, what a better program might not need
GEMM_TARGETS = ("__cublas", "__cudnn$conv")
BUNDLES = "schedule-analysis_final_bundles"  # libtpu's last word on each instruction that it has compiled
_DTYPE = re.compile(r"([a-z]\w*)\[")


class Executed(NamedTuple):
    """An instruction outside fusions, how often it runs, and what it and the fusion it stands for consist of."""

    instruction: Instruction
    operands: list[str]  # their types
    times: int
    inside: list[tuple[Computation, Instruction]]


def main(argv: list[str]) -> None:
    """Prints the statistics; `--json` writes them too, `--save` the program's text."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program", nargs="+", help="a config and keys, or a file with a program's text")
    arguments.add_argument("--topology", default="", help="of a file's program: its devices, such as v5p-128")
    arguments.add_argument("--slices", type=int, default=1, help="of a file's program: how many of that topology")
    arguments.add_argument("--json", default="", help="file to write")
    arguments.add_argument("--save", default="", help="file to write the program's text to")
    arguments.add_argument("--bundles", action="store_true", help="of a config's program for TPUs: those of kernels")
    given = arguments.parse_intermixed_args(argv)  # options between keys too
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
        kind = topology.chip.kind if topology else ""
        several = topology and topology.slices > 1  # whose devices the program names by numbers of their own
        mesh = Mesh(np.array(abstract_devices(topology)), ("devices",)) if several else numbered_mesh(text)
    result = {"memory": memory, **statistics(text, mesh, kind, bundles)}
    if given.save:
        Path(given.save).write_text(text)
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")
    print_statistics(result)


def compiled(argv: Sequence[str]) -> tuple[str, Mesh, str, dict[str, int]]:
    """The program of a configuration's step: its text, mesh, kind of device, and bytes of memory."""
    config = configured(argv, USAGE, joins=False)
    topology = parse_topology(config.compile_topology, config.compile_topology_num_slices)
    devices = abstract_devices(topology)
    jax.config.update("jax_enable_compilation_cache", False)  # a program from it has no text of its own
    built = build(config, devices, compiler_options(config.compile_xla_flags, devices[0], topology.slices))
    program = built.traced.lower().compile()
    stated = program.memory_analysis()
    memory = {"arguments": stated.argument_size_in_bytes, "temporaries": stated.temp_size_in_bytes}
    memory["at once"] = stated.peak_memory_in_bytes  # arguments included
    if counted := program.cost_analysis():  # of a GPU that is not here there is none
        memory["accessed"] = int(counted["bytes accessed"])
    return program.as_text(), built.plan.layout.mesh, devices[0].device_kind, memory


def dump_bundles(folder: str) -> None:
    """Has libtpu, which this process has not loaded yet, write each instruction's bundles into a folder."""
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "final_bundles",  # which BUNDLES analyses
    }
    words = [os.environ.get("LIBTPU_INIT_ARGS", ""), *(f"--{name}={value}" for name, value in flags.items())]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(words).strip()


def dumped_bundles(folder: Path) -> dict[str, int]:
    """Returns the bundles of the instructions in such a folder; of one name those that were written last.

    A file is empty where an instruction has no program of its own, such as a custom call that allocates.
    """
    found = {}
    for path in sorted(folder.glob(f"*-{BUNDLES}.txt")):  # TIME-INSTRUCTION-PASS-...
        name = re.fullmatch(rf"\d+-(.+)-\d+-{BUNDLES}\.txt", path.name)[1]
        if text := path.read_text():
            found[name] = int(re.search(r"total scheduled bundles:\s+(\d+)", text)[1])
    return found


def numbered_mesh(text: str) -> Any:
    """A mesh of one axis for a program of one slice or host whose own is not known."""
    count = int(found[1]) if (found := re.search(r"num_partitions=(\d+)", text)) else 1
    devices = np.array([SimpleNamespace(id=i, platform="", process_index=0) for i in range(count)])
    return SimpleNamespace(devices=devices, axis_names=("devices",), size=count)


def statistics(text: str, mesh: Mesh, kind: str, bundles: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Everything but memory, of a program's text for devices of this kind; `bundles` of instructions by name."""
    found = list(instructions(text))
    cycles, seconds = Counter(), CLOCK.get(kind)
    for each in found:
        cycles[category(each)] += each.times * estimated_cycles(each.instruction)
    result = {"cycles": dict(cycles), "products": products(found)}
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
    """All that a program executes outside fusions."""
    computations, entry = parse(text)
    fused = {name for part in computations.values() for each in part.values() for name in called(each)}
    for name, instruction, times, _ in executed(computations, entry):
        if name not in fused:
            part = computations[name]
            operands = [part[operand].type for operand in instruction.operands if operand in part]
            yield Executed(instruction, operands, times, list(inside(instruction, part, computations)))


def called(instruction: Instruction) -> list[str]:
    """The computation of a fusion."""
    return re.findall(r" calls=%?([\w.\-]+)", instruction.attributes) if instruction.opcode == "fusion" else []


def inside(
    instruction: Instruction, part: Computation, computations: Mapping[str, Computation]
) -> Iterator[tuple[Computation, Instruction]]:
    """The instruction, or those of a fusion and of fusions in it, each with its computation."""
    names = called(instruction)
    if not names:
        yield part, instruction
    for name in names:
        for each in computations[name].values():
            yield from inside(each, computations[name], computations)


def category(each: Executed) -> str:
    """Of what an instruction's cycles are; a product with a collective beside it in its fusion is a product."""
    opcodes = {instruction.opcode for _, instruction in each.inside}
    if opcodes & {"convolution", "dot"} or is_gemm(each):
        return "products"
    if {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes} & set(RING_SHARE):
        return "collectives"
    return "copies" if opcodes <= MOVES and opcodes & LAYS_OUT else "elementwise"


def estimated_cycles(instruction: Instruction) -> int:
    """The TPU compiler's estimate of one execution; 0 where it gives none."""
    if instruction.opcode in ("while", "conditional", "call"):  # what they run is counted by itself
        return 0
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) if found else 0


def is_gemm(each: Executed) -> bool:
    """Whether it is a GPU library's product, or one that Triton compiles."""
    calls = any(target(one).startswith(GEMM_TARGETS) for _, one in each.inside)
    return calls or "__triton" in each.instruction.attributes


def target(instruction: Instruction) -> str:
    """What a custom call calls."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found and instruction.opcode == "custom-call" else ""


def products(found: Sequence[Executed]) -> list[dict[str, Any]]:
    """Products of matrices by what computes them and the dtypes of both inputs and the output, the most frequent first.

    A fusion may convert its product at once: the output is the product's own.
    """
    counts: dict[str, Counter] = {}
    for each in found:
        for part, one in each.inside:  # a library's call too may be in a fusion, which gives it a slice of an array
            if one.opcode in ("dot", "convolution"):
                how = "triton gemm fusion" if "__triton" in each.instruction.attributes else one.opcode
            elif not (how := target(one)).startswith(GEMM_TARGETS):
                continue
            inputs = " x ".join(_DTYPE.search(part[name].type)[1] for name in one.operands[:2])
            count = counts.setdefault(f"{how}: {inputs} -> {_DTYPE.search(one.type)[1]}", Counter())
            count.update({"places": 1, "executions": each.times})
    return [{"kind": kind, **n} for kind, n in sorted(counts.items(), key=lambda item: -item[1]["executions"])]


def kernels(found: Sequence[Executed], bundles: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Calls of kernels, whose cycles are not counted, by name and dtypes of operands and results.

    `bundles` of instructions by name; of the calls of a kernel the most. A loop within it stands there once.
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
    """Copies of arrays into another layout or place, by the bytes that they write in a step, the largest first."""
    result = []
    for each in found:
        if category(each) == "copies":
            name = re.search(r'op_name="([^"]*)"', each.instruction.attributes)
            facts = {"type": each.instruction.type, "name": name[1] if name else "", "times": each.times}
            facts["cycles"] = each.times * estimated_cycles(each.instruction)
            result.append({"bytes": each.times * written_bytes(each), **facts})
    return sorted(result, key=lambda copy: -copy["bytes"])


def written_bytes(each: Executed) -> int:
    """Counts what one execution writes: its whole result, but of an array that it updates in place the update alone."""
    size = type_bytes(each.instruction.type)
    for part, one in each.inside:
        if one.opcode == "dynamic-update-slice" and one.type.partition("{")[0] in each.instruction.type:
            size -= type_bytes(one.type) - type_bytes(part[one.operands[1]].type)
    return size


def print_statistics(result: Mapping[str, Any]) -> None:
    """Prints what `statistics` returns, in gigabytes of 1e9."""
    print("  ".join(f"{name} {size / 1e9:.3f} GB" for name, size in result["memory"].items()))
    unit, amounts = ("s", result["seconds"]) if "seconds" in result else ("cycles", result["cycles"])
    print("  ".join(f"{name} {amount:.4g} {unit}" for name, amount in amounts.items()))
    for title in ("products", "kernels"):
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
