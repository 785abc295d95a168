"""Compares step times on CPUs with PyTorch and another commit: `python scripts/evidence/bench_peers.py [case ...]`.

The sides take turns of a few steps, each in its own process, so that other load on the machine slows all equally;
ratios are medians over neighboring turns. `--against FOLDER` adds a checkout of another commit (`git worktree add`).
Needs the packages of requirements/dev.txt. Rows are random tokens: for MinText four documents each, with masked
attention; for PyTorch the same tokens with only a causal mask. All compute in float32, with AdamW and gradient
clipping.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """A model and its batch, for both sides."""

    keys: list[str]  # MinText's keys, in addition to configs/quickstart.yml
    kind: str  # PyTorch's model: gpt or llama
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    rows: int
    length: int
    steps: int  # per turn


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


def main() -> None:
    """Prints each side's seconds, and the ratios of this checkout to the other sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arguments", nargs="*", metavar="case or key=value", help=f"cases: {', '.join(CASES)}")
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
    if not options.without_torch:
        sides["PyTorch"] = "torch"
    for case in [argument for argument in options.arguments if "=" not in argument] or CASES:
        compare(case, sides, keys, options.turns)
    return None


def compare(case: str, sides: dict[str, str], keys: list[str], turns: int) -> None:
    """Runs all sides in turns on a case, and prints their times."""
    workers = {name: _start(side, case, keys if name == "MinText" else []) for name, side in sides.items()}
    wall, cpu = ({name: [] for name in sides} for _ in range(2))
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
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()
    print(f"{case}: {turns} turns of {CASES[case].steps} steps; per step")
    for name in sides:
        median, least, of_cpu = statistics.median(wall[name]), min(wall[name]), statistics.median(cpu[name])
        print(f"  {name:<8} {1e3 * median:8.1f} ms median, {1e3 * least:8.1f} minimum, {1e3 * of_cpu:8.1f} ms of CPU")
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
    run = pytorch(CASES[case]) if side == "torch" else mintext(CASES[case], Path(side), keys)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        run(CASES[case].steps)
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({name: value / CASES[case].steps for name, value in took.items()}), file=output, flush=True)


def mintext(case: Case, root: Path, keys: list[str]) -> Callable[[int], None]:
    """Returns a function that runs steps of the checkout `root`; it fetches losses one step late, as a run does."""
    sys.path[0] = str(root)
    import jax
    import numpy as np

    argv = [str(root / "configs/quickstart.yml"), *case.keys, *keys]
    batch = random_batch(case)
    if (root / "src/step").exists():
        from src.run import resolve_config
        from src.run.run_setup import configure_jax
        from src.step.optimizer import hparams_at
        from src.step.state import init_state
        from src.step.trace import trace_train_step

        config = resolve_config.load(argv)
        configure_jax(config.step)
        traced = trace_train_step(config, jax.devices())
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

    def run(steps: int) -> None:
        nonlocal state
        metrics: dict[str, Any] = {}
        for _ in range(steps):
            before = metrics
            state, metrics = train_step(state, placed, hparams)
            jax.device_get(before)
        jax.block_until_ready((state, metrics))

    return run


def random_batch(case: Case) -> dict[str, Any]:
    """Creates rows of random tokens, four documents each, as input for MinText's step."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, case.vocabulary, (case.rows, case.length + 1), np.int32)
    documents = np.arange(case.length, dtype=np.int32) * 4 // case.length
    starts = np.searchsorted(documents, documents)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.tile(documents + 1, (case.rows, 1)),
        "positions": np.tile((np.arange(case.length) - starts).astype(np.int32), (case.rows, 1)),
        "loss_mask": np.ones((case.rows, case.length), np.float32),
    }


def pytorch(case: Case) -> Callable[[int], None]:
    """Returns a function that runs PyTorch steps: of transformers' Llama, or of a GPT built from PyTorch's modules."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    model = (torch_gpt if case.kind == "gpt" else torch_llama)(case).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.99), weight_decay=0.1, fused=True)
    batch = random_batch(case)
    tokens, targets = (torch.from_numpy(batch[name].copy()).long() for name in ("tokens", "targets"))

    def run(steps: int) -> None:
        for _ in range(steps):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, case.vocabulary), targets.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

    return run


def torch_llama(case: Case) -> Any:
    """Builds transformers' Llama in a case's sizes, from tokens to logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.width,
            intermediate_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            max_position_embeddings=case.length,
            use_cache=False,
        )
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.llama(tokens).logits

    return Logits()


def torch_gpt(case: Case) -> Any:
    """Builds a GPT-2 in a case's sizes: learned positions, LayerNorm before, GELU, tied embeddings, no biases."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(case.width, bias=False)
            self.qkv = nn.Linear(case.width, 3 * case.width, bias=False)
            self.out = nn.Linear(case.width, case.width, bias=False)
            self.mlp_norm = nn.LayerNorm(case.width, bias=False)
            self.up = nn.Linear(case.width, case.hidden, bias=False)
            self.down = nn.Linear(case.hidden, case.width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (x.shape[0], x.shape[1], case.heads, case.width // case.heads)
            q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(case.vocabulary, case.width)
            self.positions = nn.Embedding(case.length, case.width)
            self.layers = nn.ModuleList(Layer() for _ in range(case.layers))
            self.norm = nn.LayerNorm(case.width, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) + self.positions(torch.arange(case.length))
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.embedding.weight.T

    return Gpt()


if __name__ == "__main__":
    main()
