"""Runs checks on a machine with one NVIDIA GPU, and writes one JSON: `bash scripts/on_gpu.sh [OUT.json]`.

Each check runs in separate processes, because one process may use all of a GPU's memory. If one fails, the JSON has the
end of its output. With `--platform cpu`, sizes are tiny and results are not judged; checks that need a GPU report that.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Distributions that a run on synthetic data imports, or whose versions it reports.
NEEDED = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "ml_collections", "absl-py", "PyYAML")
NEEDED += ("tensorboardX", "protobuf", "etils", "rich")
STEPS, WARM_UP = 20, 5  # steps of a run, and untimed ones among these
# About 1.1B parameters at 4,096 tokens, with the fastest settings that fit an H100, and its replacement on a CPU.
# Other models need more memory with these, and are compared with a scanned run.
MODEL = ("max_target_length=4096", "per_device_batch_size=8", "remat_policy=none", "scan_layers=false")
SCANNED = ("per_device_batch_size=4", "remat_policy=minimal_with_context", "scan_layers=true")
TINY = ("max_target_length=64", "base_emb_dim=64", "base_mlp_dim=128", "base_num_decoder_layers=2", "vocab_size=256")
TINY += ("base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=16", "per_device_batch_size=1")
# A saved step must be small to be compiled twice, and cannot call cuDNN.
SAVED = ("base_num_decoder_layers=2", "per_device_batch_size=1", "attention=blocked")
TOPOLOGIES = {
    "NVIDIA A100-SXM4-80GB": "a100:1",
    "NVIDIA H100 80GB HBM3": "a3:1",
    "NVIDIA H200": "a3-ultra:1",
    "NVIDIA B200": "a4:1",
    "cpu": "cpu-1",
}
# Required ranges: check, figure, minimum and maximum. Decoding and other models are only measured: other trainers
# have published no figures to compare with.
TARGETS = (
    ("bfloat16", "mfu", 0.55, 1.0),
    ("kernels", "greatest_difference", 0.0, 0.02),
    ("fp8", "times_bfloat16", 1.3, 2.0),
    ("saved_step", "loss_differs_by", 0.0, 0.01),
    ("pgle", "step_time_times_none", 0.0, 1.01),  # no slower: a single GPU does not communicate, and 1% is noise
)


class Machine:
    """The machine to check, the checks' folder, and results they share."""

    def __init__(self, platform: str, folder: Path, minutes: float = math.inf) -> None:
        self.is_gpu, self.folder = platform == "gpu", folder
        self.end = time.monotonic() + 60 * minutes
        self.seconds_per_run = 90.0 if self.is_gpu else 20.0  # a guess, until the first check is done
        self.runs_done = self.seconds_done = 0.0  # by checks
        self.kind = ""  # JAX's name of the device
        self.scanned_keys = SCANNED if self.is_gpu else ("scan_layers=true",)
        self.keys = [*(MODEL if self.is_gpu else TINY), "dataset_type=synthetic", "enable_checkpointing=false"]
        # Use one GPU, even if there are more.
        own = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"}
        self.environment = os.environ | (own if self.is_gpu else {"JAX_PLATFORMS": "cpu"})
        self.shared: dict[str, dict | RuntimeError] = {}

    def left(self) -> float | None:
        """Returns the remaining seconds, None without a limit."""
        return None if math.isinf(self.end) else max(1.0, self.end - time.monotonic())

    def count(self, runs: float, seconds: float) -> None:
        """Updates the estimated time of a run from a check that took `seconds`."""
        self.runs_done, self.seconds_done = self.runs_done + runs, self.seconds_done + seconds
        if self.runs_done:
            self.seconds_per_run = self.seconds_done / self.runs_done

    def python(self, *arguments: str, **environment: str) -> str:
        """Runs Python in a process and returns its stdout.

        Raises RuntimeError if it fails, with the end of its output, or if it does not finish in the time that is left.
        """
        command, left = [sys.executable, *arguments], self.left()
        env = self.environment | environment
        try:
            ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"did not finish in the remaining {left:.0f} s") from None
        if ended.returncode:
            raise RuntimeError("\n".join((ended.stdout + ended.stderr).splitlines()[-40:]))
        return ended.stdout

    def inside(self, name: str, *keys: str) -> tuple[list[str], dict]:
        """Runs a function of scripts/on_gpu_inside.py in a process; returns its printed lines and its result."""
        *printed, last = self.python("-m", "scripts.on_gpu_inside", name, *self.keys, *keys).splitlines()
        return printed, json.loads(last)

    def train(self, name: str, *keys: str) -> dict:
        """Trains for some steps: the median step's seconds, tokens per second and MFU, the last loss, peak memory.

        `attention` is the kernel, `said` the run's lines about the profile that its step was compiled with.
        """
        at = (f"base_output_directory={self.folder}", f"run_name={name}", f"steps={STEPS}")
        printed, memory = self.inside("train", *at, *keys)
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        timed = lines[WARM_UP:]
        figures = ("step_time_seconds", "tokens_per_second", "mfu", "mfu_palm")
        medians = {key: statistics.median(line[key] for line in timed) for key in figures if key in timed[0]}
        said = [line for line in printed if line.startswith(("compiled with the profile", "pgle=auto:"))]
        attention = [line.split()[1] for line in printed if line.startswith("attention ")]
        found = {**medians, "loss": lines[-1]["loss"], **memory}
        return found | ({"attention": attention[0]} if attention else {}) | ({"said": said} if said else {})

    def beside_plain(self, name: str, *keys: str) -> dict:
        """Trains with other keys, and computes its speed relative to the plain run."""
        found, plain = self.train(name, *keys), self.plain()
        ratio = found["tokens_per_second"] / plain["tokens_per_second"]
        return {**found, "times_bfloat16": ratio, "loss_of_bfloat16": plain["loss"]}

    def beside_scanned(self, name: str, *keys: str) -> dict:
        """Trains with other keys and less memory, and computes its speed relative to the scanned run."""
        found, scanned = self.train(name, *self.scanned_keys, *keys), self.scanned()
        ratio = found["tokens_per_second"] / scanned["tokens_per_second"]
        return {**found, "times_scanned": ratio, "loss_of_scanned": scanned["loss"]}

    def scanned(self) -> dict:
        """Trains, once, the run with less memory that other models are compared with."""
        return self.once("scanned", lambda: self.train("scanned", *self.scanned_keys))

    def plain(self) -> dict:
        """Trains, once, the run that others are compared with."""
        return self.once("plain", lambda: self.train("plain"))

    def ahead(self) -> dict:
        """Compiles the plain run's step without a GPU, once; returns the report."""
        return self.once("ahead", self.compile_ahead)

    def compile_ahead(self, *keys: str) -> dict:
        """Compiles a step without a GPU; returns the report. Raises RuntimeError for a device not in TOPOLOGIES."""
        if self.kind not in TOPOLOGIES:
            raise RuntimeError(f"there is no compile_topology for {self.kind}")
        report = self.folder / "report.json"
        keys = (f"compile_topology={TOPOLOGIES[self.kind]}", f"steps={STEPS}", f"compile_report={report}", *keys)
        command = ("-m", "src.train_compile", "configs/base.yml", *self.keys, *keys)
        self.python(*command, CUDA_VISIBLE_DEVICES="")
        return json.loads(report.read_text())

    def once(self, name: str, make: Callable[[], dict]) -> dict:
        """Returns the result of `make`, or raises its RuntimeError; both are cached by name."""
        if name not in self.shared:
            try:
                self.shared[name] = make()
            except RuntimeError as error:
                self.shared[name] = error
        if isinstance(found := self.shared[name], RuntimeError):
            raise found
        return found


def bfloat16(machine: Machine) -> dict:
    """Measures speed and memory of a billion parameters' step in bfloat16."""
    return machine.plain()


def kernels(machine: Machine) -> dict:
    """Compares the GPU's kernels with plain ones: the largest difference relative to the largest value."""
    return machine.inside("kernels")[1]


def fp8(machine: Machine) -> dict:
    """Times the step in float8, relative to bfloat16."""
    return machine.beside_plain("fp8", "quantization=fp8")


def decoding(machine: Machine) -> dict:
    """Measures greedy decoding with random weights, in tokens per second by number of prompts."""
    return machine.inside("decoding")[1]


def saved_step(machine: Machine) -> dict:
    """Runs a step that a process without a GPU compiled; its loss must match a run that compiles."""
    saved = f"compiled_trainstep_file={machine.folder / 'step'}"
    machine.compile_ahead(*SAVED, saved)
    found, compiled = machine.train("loaded", *SAVED, saved), machine.train("compiled", *SAVED)
    return {**found, "compiled": compiled, "loss_differs_by": abs(found["loss"] - compiled["loss"])}


def scanned(machine: Machine) -> dict:
    """Trains with a loop over layers and recomputed activations, which takes less memory and compiles faster."""
    found, plain = machine.scanned(), machine.plain()
    return {**found, "times_bfloat16": found["tokens_per_second"] / plain["tokens_per_second"]}


def prediction(machine: Machine) -> dict:
    """Compares the step's measured memory and time with the compiler's and roofline's predictions."""
    measured, report = machine.plain(), machine.ahead()
    needed, peak = report["memory"]["needed"], measured["peak_bytes"]
    seconds = {"measured": measured["step_time_seconds"]}
    seconds |= {way: report[way]["step_seconds"] for way in ("prediction", "replay") if way in report}
    return {
        "memory": {"device_peak_bytes": peak, "verdict_bytes": needed, "peak_times_verdict": peak and peak / needed},
        "step_seconds": seconds,
        "measured_times": {way: seconds["measured"] / value for way, value in seconds.items() if way != "measured"},
        **({"no_prediction": report["no_prediction"]} if "no_prediction" in report else {}),
    }


def kernel_times(machine: Machine) -> dict:
    """Profiles the plain run's step, and sums its kernels' times by kind and by name."""
    steps = 2
    machine.train(
        "profiled", "profiler=xplane", f"skip_first_n_steps_for_profiler={WARM_UP}", f"profiler_steps={steps}"
    )
    path = str(machine.folder / "profiled")
    return json.loads(machine.python("-m", "scripts.kernel_times", path, str(steps)).splitlines()[-1])


def unpacked(machine: Machine) -> dict:
    """Compares unpacked rows of one document with packed ones, whose attention is masked."""
    return machine.beside_scanned("unpacked", "packing=false")


def experts(machine: Machine) -> dict:
    """Trains a model with 8 experts, 2 per token."""
    size = 2048 if machine.is_gpu else 64  # of an expert
    return machine.beside_scanned("experts", "num_experts=8", "num_experts_per_tok=2", f"base_mlp_dim={size}")


def window(machine: Machine) -> dict:
    """Trains a model whose layers have a sliding window."""
    size = 1024 if machine.is_gpu else 16
    return machine.beside_scanned("window", "attention_type=local_sliding", f"sliding_window_size={size}")


def soft_cap(machine: Machine) -> dict:
    """Trains a model with soft caps on attention scores and logits, which cuDNN's attention does not support."""
    return machine.beside_scanned("soft_cap", "attn_logits_soft_cap=50", "final_logits_soft_cap=30")


def head_dim_256(machine: Machine) -> dict:
    """Trains a model with half as many heads, of 256, which cuDNN supports from Hopper on, and checks its kernel."""
    heads = 8 if machine.is_gpu else 1
    keys = ("head_dim=256", f"base_num_query_heads={heads}", f"base_num_kv_heads={heads}")
    found = machine.beside_scanned("head_dim_256", *keys)
    try:
        return {**found, "kernel": machine.inside("kernel_of_256")[1]}
    except RuntimeError as error:
        return {**found, "kernel": {"refused": str(error)}}


def pgle(machine: Machine) -> dict:
    """Compiles with profiles, by JAX itself and from a file, and compares the step's time with a run without one."""
    found = {"auto": machine.train("pgle_auto", "pgle=auto"), "collecting": machine.train("collect", "pgle=collect")}
    (profile,) = (machine.folder / "collect" / "pgle").iterdir()
    found |= {"by_the_file": machine.train("pgle_file", f"pgle_profile={profile}"), "none": machine.plain()}
    if silent := [way for way in ("auto", "by_the_file") if "said" not in found[way]]:
        raise RuntimeError(f"no line reports that a profile was used: {', '.join(silent)} of {json.dumps(found)}")
    seconds = {way: found[way]["step_time_seconds"] for way in ("by_the_file", "none")}
    return {**found, "step_time_times_none": seconds["by_the_file"] / seconds["none"]}


class Check(NamedTuple):
    """A check, and its expected duration in training runs: startup and compilation take most of a run."""

    make: Callable[[Machine], dict]
    runs: float  # excluding shared runs
    shares: tuple[str, ...] = ("plain",)  # plus one for each of these that no earlier check has made

    def seconds(self, machine: Machine) -> float:
        """Estimates how long it takes now."""
        return machine.seconds_per_run * (self.runs + sum(name not in machine.shared for name in self.shares))


CHECKS = {
    check.make.__name__: check  # the most informative first
    for check in (
        Check(bfloat16, 0),
        Check(kernels, 1, shares=()),
        Check(fp8, 1),
        Check(decoding, 2, shares=()),
        Check(saved_step, 2.5, shares=()),
        Check(scanned, 0, shares=("plain", "scanned")),
        Check(prediction, 0, shares=("plain", "ahead")),
        Check(kernel_times, 1, shares=()),
        Check(unpacked, 1, shares=("scanned",)),
        Check(experts, 1.5, shares=("scanned",)),
        Check(window, 1, shares=("scanned",)),
        Check(soft_cap, 1, shares=("scanned",)),
        Check(head_dim_256, 1.5, shares=("scanned",)),
        Check(pgle, 3),
    )
}


def main(argv: Sequence[str]) -> int:
    """Writes the JSON; returns 1 if a check on a GPU failed or missed a target, 2 if the machine can't run any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="on_gpu.json")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--minutes", type=float, default=math.inf, help="skip checks that would not finish in time")
    given = parser.parse_args(argv)
    if absent := missing():
        return refuse(f"not installed for {sys.executable}: {', '.join(absent)}")
    with tempfile.TemporaryDirectory() as folder:
        machine, out = Machine(given.platform, Path(folder), given.minutes), Path(given.out)
        try:
            result = {"machine": described(machine), "checks": {}}
            write(out, result)
        except (OSError, RuntimeError) as error:
            return refuse(str(error))
        for name in given.only:
            result["checks"][name] = found = made(name, machine)
            print(f"  {json.dumps(found)}", flush=True)
            asked = result["asked"] = judged(result["checks"]) if machine.is_gpu else {}
            write(out, result)
    failed, skipped = (
        [name for name, found in result["checks"].items() if why in found] for why in ("error", "skipped")
    )
    lists = f"failed: {', '.join(failed) or 'none'}; skipped: {', '.join(skipped) or 'none'}"
    print(f"written: {out}; {lists}; asked: {json.dumps(asked)}")
    return int(machine.is_gpu and (bool(failed) or not all(asked.values())))


def refuse(why: str) -> int:
    """Prints in one line why no check can run; returns the exit code."""
    print(f"on_gpu: {' '.join(why.split())}", file=sys.stderr)
    return 2


def missing() -> list[str]:
    """Lists the packages that a run needs and this Python lacks."""
    found = {distribution.name.lower().replace("_", "-") for distribution in metadata.distributions()}
    old = ["Python 3.11 or newer"] if sys.version_info < (3, 11) else []
    return old + [name for name in NEEDED if name.lower().replace("_", "-") not in found]


def made(name: str, machine: Machine) -> dict:
    """Runs a check, after printing its name and estimated time; returns its result, or why it failed or was skipped."""
    check, left = CHECKS[name], machine.left()
    seconds = check.seconds(machine)
    print(f"{name}: {str(check.make.__doc__).splitlines()[0]} About {seconds:.0f} s.", flush=True)
    if left is not None and seconds > left:
        return {"skipped": f"takes about {seconds:.0f} s, but only {left:.0f} s remain"}
    runs, begin = seconds / machine.seconds_per_run, time.monotonic()
    try:
        found = check.make(machine)
    except Exception as error:
        return {"error": str(error) or repr(error)}
    took = time.monotonic() - begin
    machine.count(runs, took)
    return {**found, "seconds": round(took, 1)}


def judged(checks: dict[str, dict]) -> dict[str, bool]:
    """Tells whether each figure of TARGETS is in its range, for the checks that ran; a missing figure fails."""
    return {
        f"{check}.{figure} from {least} to {most}": least <= checks[check].get(figure, -1) <= most
        for check, figure, least, most in TARGETS
        if check in checks and "skipped" not in checks[check]
    }


def described(machine: Machine) -> dict:
    """Returns the device, the software and the CUDA versions; raises RuntimeError without a device to check.

    The ahead-of-time compilers may be for another CUDA version than the run's, so both are printed.
    """
    facts, ahead = machine.inside("facts")[1], machine.inside("compilers")[1]
    if machine.is_gpu and facts["platform"] != "gpu":
        raise RuntimeError(f"JAX finds no GPU, but {facts['devices']} (--platform cpu tries the checks without one)")
    machine.kind = facts["devices"].partition(" x ")[2]
    for name, value in (facts | ahead).items():
        print(f"{name:20} {value}", flush=True)
    return facts | ahead


def write(out: Path, result: dict[str, Any]) -> None:
    """Writes the JSON atomically: readers find either the last version or this one."""
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
