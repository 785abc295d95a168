"""Trains a small model with 8-bit and with wider matmuls: `python scripts/evidence/convergence.py TEXT_FOLDER`.

`scripts/get_text.py` downloads a text. For each seed, which determines data order and initial weights, it runs each
type of matmul in turn. Finished runs are not repeated, so the script may be stopped and restarted. It writes
`convergence.json`, prints a table, and plots the curves to `docs/convergence.svg`.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {  # matmul dtype -> keys
    "": ["dtype=float32"],
    "bfloat16": ["dtype=bfloat16"],
    "int8": ["dtype=float32", "quantization=int8"],
    "fp8": ["dtype=float32", "quantization=fp8"],
}
MODEL = [  # 3.1 million parameters
    *("base_emb_dim=256", "base_mlp_dim=640", "base_num_decoder_layers=4", "base_num_query_heads=4"),
    *("base_num_kv_heads=4", "head_dim=64", "vocab_size=258", "max_target_length=128", "per_device_batch_size=4"),
    *("remat_policy=none", "learning_rate=2e-3", "adam_b2=0.99", "max_document_bytes=2048"),
    *("eval_fraction=0.01", "log_period=500", "enable_checkpointing=false", "quiet=true"),
]
LAST = 100  # steps over which the final loss is averaged
COLORS = {"": "#444444", "bfloat16": "#009e73", "int8": "#0072b2", "fp8": "#d55e00"}
WIDTH, HEIGHT, MARGIN, POINTS = 720, 400, 50, 120
FONT = 20  # of a width of 720: 10 pixels on a phone 360 wide


def main(argv: list[str]) -> None:
    """Trains the missing runs, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a folder of text")
    parser.add_argument("--runs", default="runs/convergence", help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--picture", default=str(ROOT / "docs" / "convergence.svg"))
    options = parser.parse_args(argv)
    losses = {}
    for seed in options.seeds:  # whenever it is stopped, finished seeds are complete
        for kind in KINDS:
            losses[kind, seed] = run(kind, seed, options)
    result = summary(losses, options.seeds)
    Path(options.runs, "convergence.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    Path(options.picture).write_text(curves(losses, options.seeds))


def run(kind: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Returns the loss of each step of a run, training it if necessary."""
    name = f"{kind or 'float32'}-{seed}-{options.steps}"
    metrics = Path(options.runs) / name / "metrics.jsonl"
    if not metrics.exists() or len(found := read(metrics)) < options.steps:
        keys = [f"run_name={name}", f"base_output_directory={options.runs}", f"dataset_path={options.text}"]
        keys += [f"steps={options.steps}", f"data_shuffle_seed={seed}", f"init_weights_seed={seed}"]
        command = [sys.executable, "-m", "src.train", "configs/base.yml", *MODEL, *KINDS[kind], *keys]
        print(" ".join(command[1:]), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)
        found = read(metrics)
    return found


def read(metrics: Path) -> list[float]:
    """Reads the losses of a run's steps."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def summary(losses: dict[tuple[str, int], list[float]], seeds: list[int]) -> dict[str, Any]:
    """Computes each run's mean loss over its last LAST steps, and each type's difference from float32 matmuls.

    A difference `holds` if it is at most 0.3% of the loss, and two standard deviations of float32 over the seeds.
    """
    last = {kind: [statistics.fmean(losses[kind, seed][-LAST:]) for seed in seeds] for kind in KINDS}
    wide = last[""]
    spread = statistics.stdev(wide) if len(seeds) > 1 else 0.0
    kinds = {}
    for kind, values in last.items():
        difference = statistics.fmean(values) - statistics.fmean(wide)
        pairs = [value / reference - 1 for value, reference in zip(values, wide, strict=True)]
        kinds[kind or "float32"] = {
            "losses": dict(zip(map(str, seeds), values, strict=True)),
            "mean": statistics.fmean(values),
            "difference": difference,
            "relative": difference / statistics.fmean(wide),
            "relative_by_seed": pairs,
            "holds": abs(difference) <= 0.003 * statistics.fmean(wide) and abs(difference) <= 2 * spread,
        }
    return {"last_steps": LAST, "spread_over_seeds": spread, "kinds": kinds}


def table(result: dict[str, Any]) -> str:
    """Formats the table in docs/performance.md."""
    seeds = list(result["kinds"]["float32"]["losses"])
    lines = [f"| matmuls | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | to float32 |"]
    lines.append("|" + " --- |" * (len(seeds) + 3))
    for name, kind in result["kinds"].items():
        values = " | ".join(f"{loss:.4f}" for loss in kind["losses"].values())
        lines.append(f"| {name} | {values} | {kind['mean']:.4f} | {kind['relative']:+.3%} |")
    return "\n".join([*lines, "", f"float32's standard deviation over seeds: {result['spread_over_seeds']:.4f}"])


def curves(losses: dict[tuple[str, int], list[float]], seeds: list[int]) -> str:
    """Plots the loss as SVG, averaged over seeds and neighboring steps, on log-log axes."""
    steps = len(losses["", seeds[0]])
    ends = sorted({round(steps ** (point / POINTS)) for point in range(1, POINTS + 1)})
    means = {}
    for kind in KINDS:
        of_step = [statistics.fmean(values) for values in zip(*(losses[kind, seed] for seed in seeds), strict=True)]
        means[kind] = [statistics.fmean(of_step[i:j]) for i, j in itertools.pairwise([0, *ends])]
    low, high = (bound(map(bound, means.values())) for bound in (min, max))

    def x(step: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(step) / math.log(steps)

    def y(loss: float) -> float:
        return MARGIN + (HEIGHT - 2 * MARGIN) * math.log(high / loss) / math.log(high / low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for step in (10**power for power in range(math.floor(math.log10(steps)) + 1)):
        parts.append(f'<text x="{x(step):.0f}" y="{HEIGHT - 20}" font-size="{FONT}" text-anchor="middle">{step}</text>')
    for loss in [high * (low / high) ** (part / 4) for part in range(5)]:
        parts.append(f'<path d="M{MARGIN} {y(loss):.1f}H{WIDTH - MARGIN}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{MARGIN - 6}" y="{y(loss) + 7:.1f}" font-size="{FONT}" text-anchor="end">{loss:.2f}</text>'
        )
    for row, kind in enumerate(KINDS):
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in zip(ends, means[kind], strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[kind]}" stroke-width="1.5"/>')
        position = f'x="{WIDTH - MARGIN - 90}" y="{MARGIN + 24 * (row + 1)}"'
        parts.append(f'<text {position} font-size="{FONT}" fill="{COLORS[kind]}">{kind or "float32"}</text>')
    title = f"training loss (nats per byte) by step, mean of {len(seeds)} seeds"
    return "\n".join([*parts, f'<text x="{MARGIN}" y="24" font-size="{FONT}">{title}</text>', "</svg>", ""])


if __name__ == "__main__":
    main(sys.argv[1:])
