"""Compares step times with PyTorch and another commit: `python scripts/evidence/bench_peers.py [case ...]`.

On CPUs the sides take turns of a few steps, each in its own process, so that other load on the machine slows all
equally; ratios are medians over neighboring turns. `--against FOLDER` adds a checkout of another commit (`git worktree
add`). Needs the packages of requirements/dev.txt. Rows are random tokens: for MinText four documents each, with masked
attention; for PyTorch the same tokens with only a causal mask. All compute in float32, with AdamW and gradient
clipping.

The cases of GPU_CASES need a GPU that both JAX and PyTorch can use, and run if they are named. There, one side runs
after the other, as a GPU's memory may not suffice for all; rows are one document each, for both sides; matmuls are in
bfloat16, of float32 weights. PyTorch compiles the model with its loss, and is run with each of its attention kernels
for GPUs.
"""

import argparse
import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.evidence.torch_models import TORCH_MODELS, Case

ROOT = Path(__file__).resolve().parents[2]


def _keys(layers: int, width: int, heads: int, hidden: int, vocabulary: int, rows: int, length: int) -> list[str]:
    sizes = {
        "base_num_decoder_layers": layers,
        "base_emb_dim": width,
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
        "head_dim": width // heads,
        "base_mlp_dim": hidden,
        "vocab_size": vocabulary,
        "per_device_batch_size": rows,
        "max_target_length": length,
    }
    return [f"{key}={value}" for key, value in sizes.items()]


_GPT = ["normalization=layer", "mlp_activations=[gelu]", "position_type=learned", "logits_via_embedding=true"]
_QUICKSTART, _NANOGPT, _50M = (
    (4, 128, 2, 384, 258, 8, 128),
    (4, 128, 4, 512, 65, 12, 64),
    (4, 512, 8, 2048, 32768, 4, 512),
)
CASES = {
    "quickstart": Case(_keys(*_QUICKSTART), "llama", *_QUICKSTART, steps=8),
    "nanogpt": Case([*_GPT, *_keys(*_NANOGPT)], "gpt", *_NANOGPT, steps=10),  # its README's setting for a CPU
    "50m": Case(_keys(*_50M), "llama", *_50M, steps=1),
}

_ON_GPU = ["remat_policy=none", "scan_layers=false", "packing=false"]
_GPT2, _1B = (12, 768, 12, 3072, 50304, 12, 1024), (16, 2048, 16, 7168, 32000, 4, 4096)
GPU_CASES = {
    # nanoGPT's batch of a step without accumulation, and its vocabulary
    "gpt2": Case(
        [*_GPT, *_ON_GPU, *_keys(*_GPT2)], "gpt", *_GPT2, steps=20, base="base.yml", documents=1, dtype="bfloat16"
    ),
    "1b": Case(
        [*_ON_GPU, *_keys(*_1B)], "llama_modules", *_1B, steps=10, base="base.yml", documents=1, dtype="bfloat16"
    ),
}
_ALL = CASES | GPU_CASES
# PyTorch's attention kernels for GPUs, by their names in torch.nn.attention.SDPBackend
_TORCH_KERNELS = ("flash_attention", "cudnn_attention")


def main() -> None:
    """Prints each side's seconds, and the ratios of this checkout to the other sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arguments", nargs="*", metavar="case or key=value", help=f"cases: {', '.join(_ALL)}")
    parser.add_argument("--against", metavar="FOLDER", help="a checkout of another commit")
    parser.add_argument("--turns", type=int, default=12, help="turns of each side")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    keys = [argument for argument in options.arguments if "=" in argument]
    if options.worker:
        side, case = options.worker
        return take_turns(side, case, keys)
    sides = {"MinText": str(ROOT)}
    if options.against:
        sides["against"] = options.against
    for case in [argument for argument in options.arguments if "=" not in argument] or CASES:
        kernels = _TORCH_KERNELS if case in GPU_CASES else ("",)
        peers = {f"PyTorch {name}".strip(): f"torch {name}" for name in kernels if not options.without_torch}
        compare(case, sides | peers, keys, options.turns)
    return None


def compare(case: str, sides: dict[str, str], keys: list[str], turns: int) -> None:
    """Runs all sides on a case, in turns or, on a GPU, one after the other, and prints their times."""
    wall, cpu, peak = ({name: [] for name in sides} for _ in range(3))
    together = [[name] for name in sides] if case in GPU_CASES else [[*sides]]
    for names in together:
        workers = {name: _start(sides[name], case, keys if name == "MinText" else []) for name in names}
        for turn in range(turns + 1):  # the first warms up
            for name, worker in workers.items():
                assert worker.stdin
                assert worker.stdout
                worker.stdin.write("go\n")
                worker.stdin.flush()
                took = json.loads(worker.stdout.readline())
                if turn:
                    wall[name].append(took["wall"])
                    cpu[name].append(took["cpu"])
                    peak[name].append(took["peak"])
        for worker in workers.values():
            assert worker.stdin
            worker.stdin.close()
            worker.wait()
    print(f"{case}: {turns} turns of {_ALL[case].steps} steps; per step")
    for name in sides:
        median, least, of_cpu = statistics.median(wall[name]), min(wall[name]), statistics.median(cpu[name])
        line = f"  {name:<8} {1e3 * median:8.1f} ms median, {1e3 * least:8.1f} minimum, {1e3 * of_cpu:8.1f} ms of CPU"
        print(line + (f", {max(peak[name]) / 1e9:.1f} GB at the peak" if any(peak[name]) else ""))
    for name in [*sides][1:]:
        ratios = [
            statistics.median(a / b for a, b in zip(seconds["MinText"], seconds[name], strict=True))
            for seconds in (wall, cpu)
        ]
        least = min(wall["MinText"]) / min(wall[name])
        print(f"  MinText / {name}: {ratios[0]:.2f} (minimum {least:.2f}; CPU {ratios[1]:.2f})", flush=True)


def _start(side: str, case: str, keys: list[str]) -> subprocess.Popen:
    command = [sys.executable, __file__, *keys, "--worker", side, case]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def take_turns(side: str, case: str, keys: list[str]) -> None:
    """Runs one turn's steps for each line of input, and prints the seconds per step."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output apart from the results
    sizes = _ALL[case]
    torch, _, kernel = side.partition(" ")
    run = pytorch(sizes, kernel) if torch == "torch" else mintext(sizes, Path(side), keys)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        peak = run(sizes.steps)
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        per_step = {name: value / sizes.steps for name, value in took.items()}
        print(json.dumps(per_step | {"peak": peak}), file=output, flush=True)


def mintext(case: Case, root: Path, keys: list[str]) -> Callable[[int], int]:
    """Returns a function that runs steps of the checkout `root`, and returns the device's peak bytes, 0 if not counted.

    It fetches losses one step late, as a run does.
    """
    sys.path[0] = str(root)
    import jax
    import numpy as np

    argv = [str(root / "configs" / case.base), *case.keys, *keys]
    batch = random_batch(case)
    if (root / "src/step").exists():
        from src.parallel.slices import count_slices
        from src.run import resolve_config
        from src.run.run_setup import configure_jax
        from src.step.compiler_flags import compiler_options
        from src.step.optimizer import hparams_at
        from src.step.state import init_state
        from src.step.trace import trace_train_step

        config = resolve_config.load(argv)
        configure_jax(config.step)
        options = compiler_options(config.aot.compile_xla_flags, jax.devices()[0], count_slices(jax.devices()))
        traced = trace_train_step(config, jax.devices(), options)
        hparams = hparams_at(config.step, config.run.steps, 0)
        plan, abstract, train_step = traced.plan, traced.state, traced.train
        init = functools.partial(init_state, plan)
        placed = jax.device_put(batch, {name: leaf.sharding for name, leaf in traced.batch.items()})
    else:  # A commit before that folder, such as dbcf1a3: its own benchmark names the functions it needs
        bench = SimpleNamespace(**runpy.run_path(str(root / "scripts/bench.py")))
        config, position = bench.configuration.load(argv), (case.rows, 1, 2)
        layout = bench.make_layout(config, jax.devices())
        plan = bench.make_plan(config, bench.model_spec(config), layout)
        hparams, abstract = bench.hyper_parameters(config, 0), bench.abstract_state(plan, config, position)
        train_step, _ = bench.compile_steps(plan, abstract)
        init = functools.partial(bench.init_state, plan, hparams, position)
        batch["data_position"] = np.zeros(position, np.int32)
        placed = jax.device_put(batch, bench.batch_sharding(layout))
    state = jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()

    def run(steps: int) -> int:
        nonlocal state
        metrics: dict[str, Any] = {}
        for _ in range(steps):
            before = metrics
            state, metrics = train_step(state, placed, hparams)
            jax.device_get(before)
        jax.block_until_ready((state, metrics))
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return run


def random_batch(case: Case) -> dict[str, Any]:
    """Creates rows of random tokens, divided into a case's documents, as input for MinText's step."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, case.vocabulary, (case.rows, case.length + 1), np.int32)
    documents = np.arange(case.length, dtype=np.int32) * case.documents // case.length
    starts = np.searchsorted(documents, documents)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.tile(documents + 1, (case.rows, 1)),
        "positions": np.tile((np.arange(case.length) - starts).astype(np.int32), (case.rows, 1)),
        "loss_mask": np.ones((case.rows, case.length), np.float32),
    }


def pytorch(case: Case, kernel: str) -> Callable[[int], int]:
    """Returns a function that runs PyTorch steps of a case's model.

    With an attention kernel of _TORCH_KERNELS it runs on a GPU, compiled, with matmuls in the case's dtype, and returns
    the peak bytes.
    """
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    device = "cuda" if kernel else "cpu"
    model = TORCH_MODELS[case.kind](case).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.99), weight_decay=0.1, fused=True)
    batch = random_batch(case)
    tokens, targets = (torch.from_numpy(batch[name].copy()).long().to(device) for name in ("tokens", "targets"))

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(tokens).view(-1, case.vocabulary), targets.view(-1))

    if kernel:
        torch.set_float32_matmul_precision("high")
        loss_of = torch.compile(loss_of)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", getattr(torch, case.dtype), enabled=bool(kernel)):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run(steps: int) -> int:
        if not kernel:
            for _ in range(steps):
                step().item()
            return 0
        backend = getattr(torch.nn.attention.SDPBackend, kernel.upper())
        with torch.nn.attention.sdpa_kernel(backend):
            for _ in range(steps):
                loss = step()
        assert torch.isfinite(loss).item()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    return run


if __name__ == "__main__":
    main()
