"""Checks on a machine with one NVIDIA GPU, into one JSON: `bash scripts/on_gpu.sh [OUT.json]`.

Each check runs in a process of its own, as one process may hold a GPU's memory, and one that fails is written down with
the end of what it said. With `--platform cpu` all sizes are tiny and nothing is judged: what needs a GPU says so.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS, WARM_UP = 20, 5  # of a run, and those of them that are not timed
# About 1.1B parameters at 4,096 tokens, and what stands for it where there is no GPU.
MODEL = ("max_target_length=4096", "per_device_batch_size=4", "remat_policy=minimal_with_context")
TINY = ("max_target_length=64", "base_emb_dim=64", "base_mlp_dim=128", "base_num_decoder_layers=2", "vocab_size=256")
TINY += ("base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=16", "per_device_batch_size=1")
# What is asked of a figure: its check, its name, the least and the greatest value. Of decoding nothing is: there is no
# figure of another trainer's to hold it to.
TARGETS = (
    ("kernels", "greatest_difference", 0.0, 0.02),
    ("bfloat16", "mfu", 0.55, 1.0),
    ("fp8", "times_bfloat16", 1.3, 2.0),
    ("saved_step", "loss_differs_by", 0.0, 0.01),
    ("pgle", "step_time_times_none", 0.0, 1.01),  # no slower: one GPU sends nothing, and 1% is noise
)


class Machine:
    """The machine the checks are for, and where they keep their files."""

    def __init__(self, platform: str, folder: Path) -> None:
        self.is_gpu, self.folder = platform == "gpu", folder
        self.keys = [*(MODEL if self.is_gpu else TINY), "dataset_type=synthetic", "enable_checkpointing=false"]
        self.environment = os.environ | ({} if self.is_gpu else {"JAX_PLATFORMS": "cpu"})

    def run(self, module: str, *arguments: str) -> str:
        """Runs a command of MinText and returns what it printed; raises RuntimeError with the end of it."""
        command = [sys.executable, "-m", module, "configs/base.yml", *self.keys, *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError("\n".join((ended.stdout + ended.stderr).splitlines()[-6:]))
        return ended.stdout

    def train(self, name: str, *arguments: str) -> dict:
        """Trains for some steps: the median step's seconds, tokens per second and MFU, the last loss, and `said`.

        That is what the run printed of a profile that its step was compiled by.
        """
        at = (f"base_output_directory={self.folder}", f"run_name={name}", f"steps={STEPS}")
        printed = self.run("src.train", *at, *arguments).splitlines()
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        timed = lines[WARM_UP:]
        figures = ("step_time_seconds", "tokens_per_second", "mfu", "mfu_palm")
        medians = {key: statistics.median(line[key] for line in timed) for key in figures if key in timed[0]}
        said = [line for line in printed if line.startswith(("compiled by the profile", "pgle=auto:"))]
        return {**medians, "loss": lines[-1]["loss"], **({"said": said} if said else {})}


def bfloat16(machine: Machine) -> dict:
    """The step's speed in bfloat16."""
    return machine.train("bfloat16")


def fp8(machine: Machine) -> dict:
    """The same in float8, and how many times as fast."""
    found, plain = machine.train("fp8", "quantization=fp8"), machine.train("beside_fp8")
    ratio = found["tokens_per_second"] / plain["tokens_per_second"]
    return {**found, "times_bfloat16": ratio, "loss_beside_it": plain["loss"]}


def saved_step(machine: Machine) -> dict:
    """A step compiled by a process without a GPU, loaded and run; its loss is that of a run that compiles."""
    kind = device_kind(machine)
    topology = {"NVIDIA H100 80GB HBM3": "a3:1", "NVIDIA H200": "a3-ultra:1", "cpu": "cpu-1"}[kind]
    file = machine.folder / "step"
    without = copy.copy(machine)
    without.environment = machine.environment | {"CUDA_VISIBLE_DEVICES": ""}
    saving = (f"compile_topology={topology}", f"compiled_trainstep_file={file}", f"steps={STEPS}")
    without.run("src.train_compile", *saving)
    loaded, compiled = machine.train("loaded", f"compiled_trainstep_file={file}"), machine.train("compiled")
    ratio = loaded["tokens_per_second"] / compiled["tokens_per_second"]
    return {**loaded, "times_compiled_here": ratio, "loss_differs_by": abs(loaded["loss"] - compiled["loss"])}


def pgle(machine: Machine) -> dict:
    """Profiles that steer the compiler, by JAX itself and by a file, and the step's time beside a run without one."""
    found = {"auto": machine.train("pgle_auto", "pgle=auto"), "collecting": machine.train("collect", "pgle=collect")}
    (profile,) = (machine.folder / "collect" / "pgle").iterdir()
    found |= {"by_the_file": machine.train("pgle_file", f"pgle_profile={profile}"), "none": machine.train("no_pgle")}
    if silent := [way for way in ("auto", "by_the_file") if "said" not in found[way]]:
        raise RuntimeError(f"no line says that a profile was used: {', '.join(silent)} of {json.dumps(found)}")
    seconds = {way: found[way]["step_time_seconds"] for way in ("by_the_file", "none")}
    return {**found, "step_time_times_none": seconds["by_the_file"] / seconds["none"]}


def device_kind(machine: Machine) -> str:
    """The first device, as a process of its own finds it."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    ended = subprocess.run([sys.executable, "-c", code], env=machine.environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr.splitlines()[-1])
    return ended.stdout.strip()


def kernels(machine: Machine) -> dict:
    """The greatest difference of the GPU's kernels from plain ones, of the greatest value; a process of its own."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from src import command_line
    from src.model.attention_kernels.cudnn import cudnn
    from src.model.attention_kernels.scores import ScoreSpec, dot_product
    from src.model.forward_context import ForwardContext
    from src.model.moe.grouped_matmul import grouped_matmul
    from src.parallel.mesh import make_layout

    B, T, N, H = (4, 1024, 8, 128) if machine.is_gpu else (1, 64, 4, 16)
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    def difference(kernel: Callable, plain: Callable, *arrays: jax.Array) -> float:
        """Of the output and the gradients of all arrays, against the plain one in float32."""

        def run(function: Callable, dtype: type) -> list[np.ndarray]:
            out, pull_back = jax.vjp(jax.jit(function), *(array.astype(dtype) for array in arrays))
            return [np.asarray(each, np.float64) for each in (out, *pull_back(jnp.ones_like(out)))]

        found, expected = run(kernel, jnp.bfloat16), run(plain, jnp.float32)
        return max(float(np.max(np.abs(f - e)) / np.max(np.abs(e))) for f, e in zip(found, expected, strict=True))

    layout = make_layout(command_line.load([str(ROOT / "configs" / "base.yml")]).mesh, jax.devices()[:1])
    plain = {"packed": (True, 0), "unpacked": (False, 0), "window": (False, T // 4)}
    cases = {name: (B, T, N, *facts) for name, facts in plain.items()}
    # Rows as long as MODEL's, and fewer heads of keys than of queries.
    cases |= {f"{name}_grouped": (1, 4 * T, N // 4, *facts) for name, facts in plain.items()}
    found = {}
    for name, (rows, length, key_heads, packed, window) in cases.items():
        segments = np.arange(length) * 5 // (length + 7) if packed else np.zeros(length)
        ids = jnp.asarray(np.tile(1 + segments, (rows, 1)), jnp.int32)
        context = ForwardContext(jnp.tile(jnp.arange(length), (rows, 1)), ids, layout, "", packed)
        spec = ScoreSpec(N, H, H, H**-0.5, window=window)
        arguments = (spec, None, context)
        kernel = cudnn if machine.is_gpu else dot_product
        found[f"attention_{name}"] = difference(
            lambda q, k, v, kernel=kernel, arguments=arguments: kernel(q, k, v, *arguments),
            lambda q, k, v, arguments=arguments: dot_product(q, k, v, *arguments),
            *(drawn(rows, length, heads, H) for heads in (N, key_heads, key_heads)),
        )
    sizes = jnp.asarray([T // 2, 3, 0, T // 2 - 3], jnp.int32)
    found["grouped_products"] = difference(
        lambda x, kernel: grouped_matmul(x, kernel, sizes, "gpu", interpret=not machine.is_gpu),
        lambda x, kernel: grouped_matmul(x, kernel, sizes, "cpu", interpret=True),
        *(drawn(T, 8 * H), drawn(4, 8 * H, 2 * H)),
    )
    compared = "cuDNN's and Triton's" if machine.is_gpu else "plain attention in bfloat16, Triton's interpreted"
    return {"greatest_difference": max(found.values()), "compared": compared, **found}


def decoding(machine: Machine) -> dict:
    """Tokens per second of greedy decoding with random weights, by the number of prompts; a process of its own."""
    import jax
    import numpy as np

    from src import command_line
    from src.generate import Generator, sampling, unrolled
    from src.parallel.mesh import make_layout
    from src.step.build import plan_step

    prompt, new = (128, 256) if machine.is_gpu else (8, 8)
    keys = [*machine.keys, f"max_target_length={prompt + new}", "decode_sampling_strategy=greedy"]
    config = command_line.load([str(ROOT / "configs" / "base.yml"), *keys])
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:1]))
    weights = jax.jit(plan.init_weights, out_shardings=plan.split(plan.shardings))()
    plan, weights = unrolled(plan, weights)
    rates = {}
    for rows in (1, 8):
        generator = Generator(
            plan, weights, sampling(config.decoding), seed=0, length=prompt + new, prefill_length=prompt
        )
        prompts = np.random.default_rng(0).integers(3, 200, (rows, prompt), np.int32)
        tokens_BT, lengths_B = generator.padded(list(prompts), rows)
        generator.compile(*tokens_BT.shape)
        for _ in range(2):  # the first to warm up
            start = time.perf_counter()
            drawn = generator.tokens(tokens_BT, lengths_B, np.arange(rows, dtype=np.int32))
            for _ in range(new):
                next(drawn)
            rates[f"prompts_{rows}"] = rows * new / (time.perf_counter() - start)
    return {"tokens_per_second": rates, "prompt": prompt, "new": new}


CHECKS = {check.__name__: check for check in (kernels, bfloat16, fp8, saved_step, pgle, decoding)}
IN_A_PROCESS = {"kernels", "decoding"}  # which compute themselves


def main(argv: list[str]) -> int:
    """Writes the JSON; the exit code is 1 where a check on a GPU failed or missed what is asked of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="on_gpu.json")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--inside", choices=sorted(IN_A_PROCESS), help="for this script itself: print one check's JSON")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(given.platform, Path(folder))
        if given.inside:
            print(json.dumps(CHECKS[given.inside](machine)))
            return 0
        result = {"machine": described(machine), "checks": {}}
        for name in given.only:
            print(f"{name}: {CHECKS[name].__doc__.splitlines()[0]}", flush=True)
            try:
                found = inside(name, machine) if name in IN_A_PROCESS else CHECKS[name](machine)
            except Exception as error:
                found = {"error": str(error)}
            result["checks"][name] = found
            print(f"  {json.dumps(found)}", flush=True)
            Path(given.out).write_text(json.dumps(result, indent=2) + "\n")
    asked = result["asked"] = judged(result["checks"]) if machine.is_gpu else {}
    Path(given.out).write_text(json.dumps(result, indent=2) + "\n")
    failed = [name for name, found in result["checks"].items() if "error" in found]
    print(f"written: {given.out}; failed: {', '.join(failed) or 'none'}; asked: {json.dumps(asked)}")
    return int(machine.is_gpu and (bool(failed) or not all(asked.values())))


def judged(checks: dict[str, dict]) -> dict[str, bool]:
    """Returns whether each figure of TARGETS is as asked, of the checks that were made; one that is missing is not."""
    return {
        f"{check}.{figure} from {least} to {most}": least <= checks[check].get(figure, -1) <= most
        for check, figure, least, most in TARGETS
        if check in checks
    }


def inside(name: str, machine: Machine) -> dict:
    """Runs a check that computes in a process of its own, which leaves the GPU's memory when it ends."""
    command = [sys.executable, __file__, "--platform", "gpu" if machine.is_gpu else "cpu", "--inside", name]
    ended = subprocess.run(command, cwd=ROOT, env=machine.environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError("\n".join(ended.stderr.splitlines()[-4:]))
    return json.loads(ended.stdout.splitlines()[-1])


def described(machine: Machine) -> dict:
    """The device, the software and the commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    code = "import json; from src.startup import environment; print(json.dumps(environment()))"
    facts = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=machine.environment, capture_output=True, text=True
    )
    return {"commit": commit.stdout.strip(), **json.loads(facts.stdout.splitlines()[-1] if facts.stdout else "{}")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
