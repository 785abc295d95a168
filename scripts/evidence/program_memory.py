"""Lists a compiled step's temporaries at peak TPU memory, from the compiler's dump.

    XLA_FLAGS=--xla_dump_to=FOLDER python scripts/evidence/program_stats.py configs/base.yml key=value ...
    python scripts/evidence/program_memory.py FOLDER

The dump is complete when the compiler has assigned all buffers, long before it is done. Bytes shared by several values,
such as loop carries, count once: the total is the buffer assignment itself, to the byte, and less than the temporaries
that the compiler reports. Arguments and vector memory are not included.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from src.system.errors import UserError
from src.system.exit_codes import run_command

LEAST = 20_000_000  # smallest size listed individually
_NAME = r"(\S+?)(\{[\d,]*\})?"


class Value(NamedTuple):
    """An array in the buffer assignment, and its lifetime, in instructions of the schedule."""

    name: str  # with its index in a tuple
    type: str
    offset: int  # in bytes
    size: int
    first: int
    last: int


class Fullest(NamedTuple):
    """The moment of peak memory: the instruction, the bytes, and the live values, largest first."""

    instruction: str
    size: int
    values: list[Value]


def main(argv: list[str]) -> None:
    """Prints the live values at peak memory."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", help="the compiler's dump (xla_dump_to)")
    arguments.add_argument("--module", default="jit_train_step", help="the program's name")
    given = arguments.parse_args(argv)
    assignment, ranges, program = (
        newest(Path(given.folder), f"*{given.module}.*after_optimizations{kind}.txt").read_text()
        for kind in ("-buffer-assignment", "-live-range", "_after_buffer_assignment")
    )
    moment = fullest(assignment, ranges)
    print(f"{moment.size / 1e9:.3f} GB of temporaries at {moment.instruction}, {made_by(program, moment.instruction)}")
    listed: dict[tuple[int, int], Value] = {}
    for value in moment.values:
        listed.setdefault((value.offset, value.size), value)
    for value in listed.values():
        if value.size >= LEAST:
            print(f"  {value.size / 1e9:7.3f}  {value.type}  {made_by(program, value.name)}")


def newest(folder: Path, pattern: str) -> Path:
    """Returns the last file of the dump that matches; raises UserError if there is none."""
    if found := list(folder.glob(pattern)):
        return max(found, key=lambda path: path.stat().st_mtime)
    raise UserError(f"{folder}: no {pattern}; expected the TPU compiler's dump from XLA_FLAGS=--xla_dump_to=FOLDER")


def fullest(assignment: str, ranges: str) -> Fullest:
    """Finds the moment of peak temporaries, from the texts of both dumps.

    Raises UserError if the texts have another format.
    """
    alive = {name + index: (int(first), int(last)) for name, index, first, last in _ranges(ranges)}
    values = [
        Value(name, type_, offset, size, *alive[name])
        for name, type_, offset, size in _temporaries(assignment)
        if name in alive
    ]
    if not values:
        raise UserError("the dump has no temporaries with an offset and a lifetime")
    moments = sorted({value.first for value in values})
    at = max(moments, key=lambda moment: _taken(values, moment))
    schedule = dict(re.findall(r"^\s+(\d+):(\S+)$", ranges, re.MULTILINE))
    there = sorted((v for v in values if v.first <= at <= v.last), key=lambda v: (-v.size, v.offset, v.first))
    return Fullest(schedule[str(at)], _taken(values, at), there)


def _ranges(text: str) -> Iterator[Sequence[str]]:
    """Parses names, indices, first and last instruction of values."""
    return re.findall(rf"^\s+{_NAME}:(\d+)-(\d+)$", text.partition("BufferLiveRange:")[2], re.MULTILINE)


def _temporaries(text: str) -> Iterator[tuple[str, str, int, int]]:
    """Yields names, types, offsets and sizes of the values in main memory's allocation for temporaries."""
    inside = False
    for line in text.splitlines():
        if line.startswith("allocation "):
            inside = line.rstrip().endswith("preallocated-temp:") and ", color " not in line
        elif inside and (
            found := re.match(rf"\s*value: <\d+ {_NAME} (?:\(phi\) )?@\d+> \(size=(\d+),offset=(\d+)\): ([^{{]+)", line)
        ):
            yield found[1] + (found[2] or "{}"), found[5].strip(), int(found[4]), int(found[3])


def _taken(values: Sequence[Value], moment: int) -> int:
    """Counts the bytes in use at a moment; values may share bytes."""
    total = end = 0
    for offset, size in sorted((v.offset, v.size) for v in values if v.first <= moment <= v.last):
        total += max(offset + size, end) - max(offset, end)
        end = max(offset + size, end)
    return total


def made_by(program: str, name: str) -> str:
    """Describes the operation that creates a value, with its line of the model if the program has it."""
    found = re.search(rf"^\s*(?:ROOT )?%{re.escape(name.partition('{')[0])} = (.*)$", program, re.MULTILINE)
    if not found:
        return ""
    opcode, line = re.search(r"\s([a-z][a-z\-]*)\(", found[1]), re.search(r'op_name="([^"]*)"', found[1])
    return f"{opcode[1] if opcode else ''} {line[1] if line else ''}".strip()


if __name__ == "__main__":
    run_command(main, may_exit=True)
