"""Estimates a step's time by replaying a GPU program's schedule on two streams, for compute and for communication.

The schedule shows which instructions run during a collective; roofline.py can only assume it. An instruction takes the
time of its matmuls or of its memory traffic, whichever is longer, at the rates that the best kernels reach. A
collective takes the time to send its bytes at the network's full bandwidth. The compute stream waits for a collective
at its `-done` instruction, or at once if the collective is synchronous.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import Mesh

from src.extras.aot import hlo
from src.extras.aot.hlo import Computation, Instruction, first_array, found, type_bytes
from src.model.attention_kernels.cudnn_segments import RATIO
from src.parallel.chips import Chip

# The best matmuls reach 86% of the published peak on an A100 and 80% on an H100, whose clock falls under load (Bekman,
# "Machine Learning Engineering", maximum achievable matmul FLOPS); a copy in an H100's memory reaches 90%.
COMPUTE_REACHED, MEMORY_REACHED = 0.85, 0.9

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
# Matmuls of T x T x H per head in cuDNN's attention: forward, and backward, which recomputes the scores.
_ATTENTION_MATMULS = {"fmha": 2, "Backward": 5}
_SCRATCH = re.compile(r"[su]8\[\d+\]")  # a library's workspace: not counted, because a call uses only a part of it


class Replay(NamedTuple):
    """Estimated seconds of a step that runs by the compiler's schedule."""

    step_seconds: float
    compute_seconds: float  # in which the compute stream is busy
    communication_seconds: float  # in which the communication stream is busy

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the compute stream waits for communication."""
        return self.step_seconds - self.compute_seconds


def replay(text: str, mesh: Mesh, chip: Chip, peaks: Mapping[int, float]) -> Replay:
    """Estimates a step's times on a GPU from `text`, the HLO of the compiled program, partitioned over `mesh`.

    `peaks` has the GPU's matmul rates, in operations per second, by their operands' bits: for 16, and perhaps for
    others, which otherwise follow from that. `chip` has its bandwidths.
    """
    computations, entry = hlo.parse(text)
    wire: dict[str, float] = {}
    for moved in hlo.collectives(text, mesh):
        bandwidth = {"ici": chip.ici_bandwidth, "dcn": chip.dcn_bandwidth}[moved.network]
        # A ring uses both networks at the same time.
        wire[moved.name] = max(wire.get(moved.name, 0), moved.sent_bytes / bandwidth)
    return _Clock(computations, wire, chip, peaks).run(entry)


class _Clock(NamedTuple):
    computations: Mapping[str, Computation]
    wire: Mapping[str, float]  # seconds of each collective, by its instruction's name
    chip: Chip
    peaks: Mapping[int, float]  # operations per second, by the bits of a matmul's operands

    def run(self, name: str) -> Replay:
        """Replays the instructions of the computation `name` in order, starting with idle streams.

        A loop takes the time of its body times its trip count, or no time if the count is unknown. A conditional takes
        the time of its slowest branch, except for attention.
        """
        now = free = computed = sent = 0.0  # the two streams' clocks, and their busy time
        arrives: dict[str, float] = {}  # end times of collectives that have started
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.name in self.wire:
                free = max(now, free) + self.wire[instruction.name]
                sent += self.wire[instruction.name]
                arrives[instruction.name] = free
                if not instruction.opcode.endswith("-start"):
                    now = free
            elif instruction.opcode.endswith("-done"):
                now = max(now, arrives.get(instruction.operands[0], now))
            elif instruction.opcode in ("while", "call", "conditional", "async-start"):
                callees = hlo.callees(instruction)
                # Attention chooses a branch by a batch's number of segments (cudnn_segments.py): take the branch with
                # one call, for few segments. Other conditionals skip work in one branch: take the slowest.
                calls = {name: count for name in callees if (count := _list_calls(self.computations[name]))}
                inner = [self.run(callee) for callee in ([min(calls, key=calls.__getitem__)] if calls else callees)]
                times = hlo.loop_rounds(instruction, computation, self.computations) or 0
                taken = max(inner, key=lambda each: each.step_seconds)
                now += times * taken.step_seconds
                free = max(free, now) if taken.communication_seconds else free
                computed += times * taken.compute_seconds
                sent += times * taken.communication_seconds
            elif instruction.opcode not in _FREE:
                matmul_seconds = self.operations(instruction, computation) / COMPUTE_REACHED
                seconds = max(matmul_seconds, self.moved(instruction, computation))
                now, computed = now + seconds, computed + seconds
        return Replay(max(now, free), computed, sent)

    def operations(self, instruction: Instruction, computation: Computation) -> float:
        """Returns the seconds that an instruction's matmuls take at the peak rate of their dtype; 0 without matmuls."""
        if instruction.opcode == "fusion":
            inner = self.computations[hlo.callees(instruction)[0]]
            return sum(self.operations(each, inner) for each in inner.values())
        target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
        if instruction.opcode == "dot" or (target and "matmul" in target[1]):
            dtype, left = first_array(computation[instruction.operands[0]].type)
            named = found(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d,"]+)', instruction.attributes)[1]
            contracted = math.prod(left[int(dim)] for dim in re.findall(r"\d+", named))
            bits = int(found(r"\d+", dtype)[0])
            peak = self.peaks.get(bits) or self.peaks[16] * 16 / bits
            return 2 * math.prod(first_array(instruction.type)[1]) * contracted / peak
        if target and "fmha" in target[1]:
            B, T, N, H = first_array(computation[instruction.operands[0]].type)[1]
            S = first_array(computation[instruction.operands[1]].type)[1][1]
            matmuls = _ATTENTION_MATMULS["Backward" if "Backward" in target[1] else "fmha"]
            share = 0.5 if re.search(r'"mask_type": ?"\w*CAUSAL"', instruction.attributes) else 1.0
            # The program does not have the segments' lengths: count as if each sequence were one segment. With several
            # calls, for classes of segments that are RATIO times shorter each (cudnn_segments.py), all add up to that.
            if _lists_segments(instruction) and _list_calls(computation) > 1:
                share *= 1 - 1 / RATIO
            return 2 * matmuls * B * N * T * S * H * share / self.peaks[16]
        return 0.0

    def moved(self, instruction: Instruction, computation: Computation) -> float:
        """Returns the seconds to read an instruction's operands and write its results.

        If a fusion slices an array or updates a slice in place, only the slice counts.
        """
        reads = [type_bytes(computation[name].type) for name in instruction.operands if name in computation]
        writes = type_bytes(_SCRATCH.sub("", instruction.type))
        if instruction.opcode == "fusion":
            inner = self.computations[hlo.callees(instruction)[0]]
            parameters = {each.arguments: each for each in inner.values() if each.opcode == "parameter"}
            reads = [_read(parameters[str(number)], inner) for number in range(len(reads))]
            for update in inner.values():
                if update.opcode == "dynamic-update-slice":
                    writes += type_bytes(inner[update.operands[1]].type) - type_bytes(update.type)
        return (sum(reads) + max(writes, 0)) / (MEMORY_REACHED * self.chip.memory_bandwidth)


def _list_calls(computation: Computation) -> int:
    return sum(map(_lists_segments, computation.values()))


def _lists_segments(instruction: Instruction) -> bool:
    """Whether this is a call of cuDNN's attention with a list of segments (src/model/attention_kernels)."""
    return re.search(r'"mask_type": ?"PADDING_CAUSAL"', instruction.attributes) is not None


def _read(array: Instruction, computation: Computation) -> int:
    """Counts the bytes that a fusion reads from one of its input arrays: only slices, if it uses nothing else of it."""
    users = [each for each in computation.values() if array.name in each.operands]
    read = 0
    for user in users:
        if user.opcode == "bitcast":
            read += _read(user, computation)
        elif user.opcode == "dynamic-slice":
            read += type_bytes(user.type)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != array.name:
            return type_bytes(array.type)
    return min(read, type_bytes(array.type))
