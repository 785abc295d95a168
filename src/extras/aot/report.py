"""Reports on a compiled step, as a JSON object and as lines to print."""

import dataclasses
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from src.config.yaml import dump
from src.extras.aot.hlo import collectives
from src.extras.aot.memory import attention_workspace, memory, scores_bytes
from src.extras.aot.replay import replay
from src.extras.aot.roofline import predict, work_of
from src.extras.aot.topology import Topology
from src.extras.aot.whole_arrays import whole_lines
from src.model.flops import count_active_params, count_params
from src.parallel.chips import peak_flops, run_peak
from src.parallel.slices import GPU_MEMORY_FRACTION, describe_mesh
from src.run.metrics import duration
from src.step.trace import TracedTrainStep
from src.system.errors import UserError

Report = dict[str, Any]
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Bytes of host memory that a device may use, by the start of its kind. Google's machines have 48, 112 and 120 GB for
# each device of v5e, v5p and TPU7x (docs.cloud.google.com/tpu/docs/v5e, tpu7x). libtpu's compiler allows 128 GiB on
# every TPU. JAX keeps arrays of each GPU in a pool of 64 GiB, or of what the environment says.
HOST_MEMORY = {"TPU v5 lite": 48 * 10**9, "TPU v5": 112 * 10**9, "TPU7x": 120 * 10**9, "TPU": 2**37, "NVIDIA": 2**36}
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# How the TPU compiler reports the memory a program would need; its "temporaries" include the arguments.
TOTAL = re.compile(r"(?:HLO temporaries \(|Total hbm usage >= |Used )([\d.]+)([KMGT])")


def make_report(
    topology: Topology,
    traced: TracedTrainStep,
    compiled: jax.stages.Compiled | None,
    refusal: str,
    seconds: dict[str, float],
) -> Report:
    """Builds the report, without suggested `changes`; bytes and FLOPs are per device.

    If the compiler refused the program because it exceeds a TPU's memory, `compiled` is None and `refusal` the
    compiler's message, else "". `seconds` are the durations of its parts, such as tracing, lowering and compiling.
    Raises UserError as `device_capacity` does.
    """
    plan, work = traced.plan, work_of(traced)
    report: Report = {
        "topology": topology.name,
        "slices": topology.slices,
        "devices": topology.num_devices,
        "device_kind": topology.chip.kind if topology.chip else "cpu",
        "mesh": dict(plan.layout.mesh.shape),
        "parameters": count_params(plan.spec),
        "active_parameters": count_active_params(plan.spec),
        "rows": traced.rows,
        "tokens": traced.tokens,
        "smaller_batches": [rows for rows, _ in traced.schedule.ramp],
        "attention": plan.kernel,
        "attention_not_fused": plan.why_not_fused,
        "attention_scores": scores_bytes(traced),
        "loss_tiles": plan.step.num_vocab_tiling,
        "seconds": dict(seconds),
        "memory": device_memory(topology, traced, compiled, refusal),
        "whole": whole_lines(plan, traced.state, device_capacity(topology)),
        "flops": {
            "model": work.model_flops.causal,
            "model_palm": work.model_flops.palm,
            "recomputed": work.recomputed_flops.causal,
        },
        "compiler_message": refusal,
    }
    if plan.split(plan.shapes).frozen:
        report["frozen_counted"] = True  # the prediction counts gradients of all weights, `flops` only of trained ones
    if compiled:
        text = compiled.as_text() or ""
        communication = collectives(text, plan.layout.mesh)
        report["collectives"] = [dataclasses.asdict(collective) for collective in communication]
        chip = topology.chip
        if not chip:
            report["no_prediction"] = "there are no published rates for CPUs"
        elif peak := run_peak(chip.kind, plan.spec.dtype, plan.step.matmul_precision):
            low_peak = peak_flops(chip.kind, plan.quantization.kind)
            report["prediction"] = predict(work, chip, peak, communication, low_peak, slices=topology.slices)._asdict()
            if topology.platform == "gpu":
                rates = gpu_rates(chip.kind, plan.step.matmul_precision, low_peak)
                replayed = replay(text, plan.layout.mesh, chip, rates)
                report["replay"] = replayed._asdict() | {"exposed_seconds": replayed.exposed_seconds}
        else:
            report["no_prediction"] = f"there is no published peak rate of a {chip.kind} for dtype={plan.spec.dtype}"
    return report


def gpu_rates(kind: str, matmul_precision: str, low_peak: float | None) -> dict[int, float]:
    """Returns the published matmul rates of a GPU by the bits of the operands: of 16, and of 8 and 32 if known."""
    rates = {
        8: low_peak,
        16: peak_flops(kind, "bfloat16"),  # every GPU that can be compiled for has it
        32: run_peak(kind, "float32", matmul_precision),
    }
    return {bits: rate for bits, rate in rates.items() if rate}


def device_memory(
    topology: Topology, traced: TracedTrainStep, compiled: jax.stages.Compiled | None, refusal: str
) -> Report:
    """Returns one device's memory, in bytes: the needed amount and its parts, the capacity, and whether the step fits.

    `compiled` and `refusal` are as for `make_report`; `needed` is a lower bound if the compiler refused the program.
    Without a chip's figures, as on CPUs, `capacity` and `left` are None, and every compiled step fits. `host` has the
    bytes in host memory: the optimizer's state, and arrays kept for the backward pass. Raises UserError as
    `device_capacity` does.
    """
    parts, capacity = memory(traced), device_capacity(topology)
    plan, (rows, length), saved_on_host = traced.plan, traced.batch["tokens"].shape, 0
    if compiled:
        stats = compiled.memory_analysis()
        assert stats
        rows //= plan.accumulation.micro_batches
        workspace = attention_workspace(plan.spec, plan.execution, plan.kernel, plan.layout, rows, length, plan.packed)
        sizes = {
            "arguments": stats.argument_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "donated": stats.alias_size_in_bytes,
            "program": stats.generated_code_size_in_bytes,
            **({"workspace": workspace} if workspace else {}),
        }
        if topology.platform != "cpu":  # on a CPU the peak covers only the arguments
            sizes["peak"] = stats.peak_memory_in_bytes
        saved_on_host = stats.host_temp_size_in_bytes
        # The TPU compiler rejects programs that don't fit, and its "temporaries" count loop carries twice. Elsewhere,
        # outputs that reuse donated arguments need no memory.
        in_all = sizes["arguments"] + sizes["temporaries"] + sizes["outputs"] - sizes["donated"] + workspace
        needed = sizes["peak"] if topology.platform == "tpu" else in_all
    else:
        arguments = sum(parts.arguments.values())
        stated = [round(float(number) * UNITS[unit]) for number, unit in TOTAL.findall(refusal)]
        needed = max([arguments, *stated])
        sizes = {"arguments": arguments, "temporaries": needed - arguments}
    return {
        **sizes,
        "needed": needed,
        "capacity": capacity,
        "left": capacity - needed if capacity else None,
        "fits": compiled is not None and (capacity is None or needed <= capacity),
        "argument_parts": parts.arguments,
        "temporary_parts": parts.temporaries,
        "host": {"optimizer": parts.on_host, "kept for the backward pass": saved_on_host},
    }


def device_capacity(topology: Topology) -> int | None:
    """Returns the bytes of a device that a program may use, None without a chip's figures, as for CPUs.

    Raises UserError if the environment gives JAX two fractions of a GPU's memory, or one that is not above 0.
    """
    chip = topology.chip
    if topology.platform != "gpu" or not chip:
        return chip.memory if chip else None
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    chosen = [(name, os.environ[name]) for name in names if os.environ.get(name)]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(names)} are both set, but JAX accepts one: unset the second")
    name, typed = chosen[0] if chosen else ("", GPU_MEMORY_FRACTION)
    try:
        fraction = float(typed)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < math.inf:
        raise UserError(f"{name}={typed} in the environment: expected a fraction of a GPU's memory, such as 0.9")
    return int(chip.memory * fraction)


def host_capacity(topology: Topology) -> float:
    """Returns the bytes of host memory that a device may use, infinite for CPUs and unlisted devices.

    Raises UserError if HOST_LIMIT in the environment of a GPU's program is not a whole number.
    """
    if topology.platform == "cpu" or not topology.chip:
        return math.inf
    if topology.platform == "gpu" and (typed := os.environ.get(HOST_LIMIT)):
        if not typed.isdecimal():
            raise UserError(f"{HOST_LIMIT}={typed} in the environment: expected a whole number of GiB, such as 128")
        return int(typed) * 2**30
    return next((size for start, size in HOST_MEMORY.items() if topology.chip.kind.startswith(start)), math.inf)


def verdict(report: Report) -> str:
    """States in one sentence whether the step fits its devices."""
    memory = report["memory"]
    if memory["capacity"] is None:
        return "it compiles; memory is not checked for CPUs"
    words = f"{readable(memory['needed'])} of {readable(memory['capacity'])} per device"
    if memory["fits"]:
        return f"fits: {words}, {readable(memory['left'])} left"
    return f"does not fit: {'at least ' if report['compiler_message'] else ''}{words}"


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yields a report as (name, value) pairs to print."""
    slices = describe(report["topology"], report["slices"])
    yield "topology", f"{slices}: {report['devices']:,} x {report['device_kind']}"
    yield "mesh", describe_mesh(report["mesh"])
    active = report["active_parameters"]
    a_token = f", {active:,} active per token" if active < report["parameters"] else ""
    yield "model", f"{report['parameters']:,} parameters{a_token}"
    ramp = ", the full batch; src.train also compiles a step for each smaller batch" * bool(report["smaller_batches"])
    yield "step", f"{report['rows']:,} rows, {report['tokens']:,} tokens{ramp}"
    plain, scores = report["attention_not_fused"], report["attention_scores"]
    why = f" ({plain})" if plain else ""
    held = f", which holds {readable(scores)} of scores at a time" if scores else ""
    yield "attention", report["attention"] + why + held
    if report["loss_tiles"] > 1:
        yield "loss", f"in {report['loss_tiles']} tiles (num_vocab_tiling)"
    parts = ", ".join(f"{name} {value:.1f}" for name, value in report["seconds"].items())
    yield "compiled", f"in {duration(sum(report['seconds'].values()))} (seconds: {parts})"
    yield "memory", "\n".join(_memory_lines(report["memory"]))
    flops = report["flops"]
    again = f"; {flops['recomputed']:.4g} more are recomputed" if flops["recomputed"] else ""
    yield "FLOPs", f"{flops['model']:.4g} per device (attention causal; {flops['model_palm']:.4g} as in PaLM){again}"
    if report.get("collectives"):
        yield "collectives", "\n".join(_collective_lines(report["collectives"]))
    if prediction := report.get("prediction"):
        times = ", ".join(f"{name} {prediction[f'{name}_seconds']:.3g}" for name in ("compute", "memory", "ici", "dcn"))
        mfu = f"MFU {prediction['mfu']:.1%} (as in PaLM {prediction['mfu_palm']:.1%})"
        words = f"{prediction['step_seconds']:.3g} s per step, {mfu}: by a roofline, not measured"
        words += f"\nseconds for each: {times}; {prediction['bound']} takes the most"
        if replayed := report.get("replay"):
            waited, sent = replayed["exposed_seconds"], replayed["communication_seconds"]
            words += (
                f"\n{replayed['step_seconds']:.3g} s by the program's schedule, including {waited:.3g} s waiting for "
            )
            words += f"communication, which takes {sent:.3g} s"
        if report.get("frozen_counted"):
            words += "\nwith the gradients of frozen weights, which the step does not compute: it takes less time"
        yield "prediction", words
    elif "no_prediction" in report:
        yield "prediction", f"none: {report['no_prediction']}"
    if report["compiler_message"]:
        yield "compiler", report["compiler_message"]
    yield "verdict", "\n".join([verdict(report), *report["whole"]])


def describe(topology: str, slices: int) -> str:
    """Returns a topology's name, preceded by the number of slices or hosts if there are several: 2 x v5p-128."""
    return f"{slices} x {topology}" if slices > 1 else topology


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    sums = [(memory["arguments"], "arguments", memory["argument_parts"])]
    if "donated" in memory:
        sums.append((memory["outputs"] - memory["donated"], "outputs that don't reuse an argument's memory", {}))
    words = "temporaries (estimated parts, not all live at once)"
    sums.append((memory["temporaries"], words, memory["temporary_parts"]))
    if any(memory["host"].values()):
        sums.append((sum(memory["host"].values()), "in host memory, for each device", memory["host"]))
    if "workspace" in memory:
        sums.append((memory["workspace"], "workspace of cuDNN's attention, in addition", {}))
    if "peak" in memory:
        sums.append((memory["peak"], "peak, by the compiler's own count", {}))
    for total, name, parts in sums:
        yield f"{readable(total):>11}  {name}"
        yield from (f"{readable(size):>15}  {part}" for part, size in parts.items() if size)


def _collective_lines(communication: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    times, sent = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for each in communication:
        kind = each["kind"], " x ".join(each["axes"]), each["network"]
        times[kind] += each["times"]
        sent[kind] += each["times"] * each["sent_bytes"]
    for kind, size in sent.most_common():
        if times[kind]:
            words = f"{times[kind]:,} per step, each device sends {readable(size)}"
            yield f"{kind[0]:<18} over {kind[1]} ({kind[2]}): {words}"
    if more := sum(each["per_round"] * each["sent_bytes"] for each in communication):
        yield f"not counted: {readable(more)} per iteration of loops that depend on the data (uneven experts)"


def change_lines(report: Report, write: Callable[[Mapping[str, Any]], str] | None = None) -> Iterator[str]:
    """Yields lines on the report's `changes`: keys that reduce the memory of a step that does not fit.

    Each change was compiled, and its line has the result. `write` formats its keys, by default as a user would type
    them.
    """
    write = write or typed
    if not any(change["fits"] for change in report["changes"]):
        yield "no compiled change fits: use shorter sequences, a smaller model or more devices"
    for change in report["changes"]:
        fits = "fits" if change["fits"] else "still too much"
        yield f"{write(change['keys'])}\n    compiled: {readable(change['compiled'])}, {fits}; {change['cost']}"


def typed(keys: Mapping[str, Any]) -> str:
    """Formats keys as a user would type them in a shell."""
    return shlex.join(f"{key}={dump(value)}" for key, value in keys.items())


def readable(number: float) -> str:
    """Formats a number of bytes in the largest unit that gives at least 1."""
    for letter, factor in reversed(UNITS.items()):
        if number >= factor:
            return f"{number / factor:.2f} {letter}iB"
    return f"{number} B"
