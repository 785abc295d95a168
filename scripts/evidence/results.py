"""Reproduces the results in docs/results: `python scripts/evidence/results.py EXPERIMENT TEXT_FOLDER`.

`scripts/get_text.py TEXT_FOLDER` downloads the text; every hundredth block of 64 paragraphs is held out. The experiment
`quickstart` needs no text. Runs are trained one after the other; finished ones are not repeated, so the script may be
stopped and restarted. It prints a table, and writes `docs/results/EXPERIMENT.json` and plots next to it.
"""

import argparse
import bz2
import dataclasses
import gzip
import hashlib
import json
import lzma
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.evidence import results_plots as plots  # noqa: E402 (the path is set above)

MODEL = ROOT / "docs" / "results" / "model.yml"
BLOCK, HELD_OUT_EVERY = 64, 100  # paragraphs per block; one block in HELD_OUT_EVERY is held out
POINTS = 150  # points stored of a curve


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of a finished run: `curve` has (step, mean training loss since the previous point)."""

    name: str
    keys: list[str]
    parameters: int
    curve: list[tuple[int, float]]
    held_out: list[tuple[int, float]]  # (step, loss in nats per token on the held-out text)
    minutes: float  # of steps, from their logged times
    version: str  # and commit of MinText

    @property
    def held_out_loss(self) -> float:
        """The final loss on the held-out text."""
        return self.held_out[-1][1]


@dataclasses.dataclass(frozen=True)
class Lab:
    """Trains the runs of an experiment in `folder`, on `text`/train, and evaluates them on `text`/held_out."""

    text: Path | None  # None: the config names the data
    folder: Path

    def train(self, name: str, *keys: str, config: Path = MODEL, core: int | None = None) -> Run:
        """Returns the run `name`, training it unless it is finished, on one `core` or on all."""
        run = self.folder / name
        parts = {"dataset_path": "train", "eval_dataset_path": "held_out"} if self.text else {}
        sources = [f"{key}={self.text / part}" for key, part in parts.items()]
        digests = [hashlib.sha256((self.text / part / "text.txt").read_bytes()).hexdigest() for part in parts.values()]
        asked = "\n".join([config.read_text(), *digests, *keys])  # a run of the same name may have had other settings
        if not (run / "finished").exists() or (run / "finished").read_text() != asked:
            where = [f"run_name={name}", f"base_output_directory={self.folder}", "quiet=true"]
            print(" ".join([name, *keys]), flush=True)
            shutil.rmtree(run, ignore_errors=True)  # remove a stopped run's files
            _command("src.train", str(config), *sources, *where, *keys, core=core)
            (run / "finished").write_text(asked)
        return _read(run, list(keys))


def main(argv: list[str]) -> None:
    """Runs one experiment, and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
    parser.add_argument("text", type=Path, nargs="?", help="the folder that scripts/get_text.py wrote")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "results", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="output folder")
    options = parser.parse_args(argv)
    if (options.text is None) != (options.experiment == "quickstart"):
        parser.error("quickstart trains on this Python's own source; all others need TEXT_FOLDER")
    options.out.mkdir(parents=True, exist_ok=True)  # fail now, not hours later
    lab = Lab(options.text and split(options.text, options.runs / "text"), options.runs)
    found = EXPERIMENTS[options.experiment](lab, options.out)
    versions = f"Python {platform.python_version()}, JAX {version('jax')}"
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPU cores, {versions}"
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    (options.out / f"{options.experiment}.json").write_text(f"{{\n{lines}\n}}\n")
    print("\n".join(found["table"]))


def split(source: Path, out: Path) -> Path:
    """Splits SOURCE/botocore.txt, a paragraph per line, into OUT/train/text.txt and OUT/held_out/text.txt."""
    lines = (source / "botocore.txt").read_bytes().splitlines(keepends=True)
    blocks = [b"".join(lines[i : i + BLOCK]) for i in range(0, len(lines), BLOCK)]
    for name, held in ("train", False), ("held_out", True):
        (out / name).mkdir(parents=True, exist_ok=True)
        part = [block for i, block in enumerate(blocks) if (i % HELD_OUT_EVERY == 0) is held]
        (out / name / "text.txt").write_bytes(b"".join(part))
    return out


def quickstart(lab: Lab, out: Path) -> dict[str, Any]:
    """Trains the first command of the README: its curve and cost."""
    run = lab.train("quickstart", config=ROOT / "configs" / "quickstart.yml")
    lines = {"training": run.curve, "held-out files": run.held_out}
    plots.training(lines, out / "quickstart.svg", ("step", "loss, nats per byte"))
    table = [f"{run.parameters:,} parameters, {run.minutes:.1f} minutes of steps; held-out loss by step:"]
    table += [f"| {step} | {loss:.3f} |" for step, loss in run.held_out]
    return {"table": table, "runs": [_record(run)]}


def optimizers(lab: Lab, out: Path) -> dict[str, Any]:
    """Compares AdamW and Muon on one model: how many steps of a whole schedule Muon needs for AdamW's final loss."""
    steps, seeds, lengths = 2000, (0, 1, 2), (700, 1000, 1300)
    rates = {"adamw": ("1e-3", "2e-3", "4e-3"), "muon": ("2e-3", "4e-3", "8e-3")}

    def run(kind: str, rate: str, seed: int, length: int) -> Run:
        keys = (f"opt_type={kind}", f"learning_rate={rate}", f"steps={length}", *_width(128), *_seed(seed))
        return lab.train(f"optimizers-{kind}-{rate}-{length}-{seed}", *keys)

    best, tried = {}, {}
    for kind, of_kind in rates.items():
        runs = {rate: run(kind, rate, 0, steps) for rate in of_kind}
        best[kind] = min(runs, key=lambda rate: runs[rate].held_out_loss)
        tried[kind] = {rate: it.held_out_loss for rate, it in runs.items()}
    whole = {kind: [run(kind, best[kind], seed, steps) for seed in seeds] for kind in best}
    shorter = [[run("muon", best["muon"], seed, length) for length in lengths] for seed in seeds]
    ratios = []
    for adam, muon, parts in zip(whole["adamw"], whole["muon"], shorter, strict=True):
        losses = [*(part.held_out_loss for part in parts), muon.held_out_loss]
        ratios.append(crossing([*lengths, steps], losses, adam.held_out_loss) / steps)
    of_kind = {kind: [it.held_out_loss for it in runs] for kind, runs in whole.items()}
    table = _of_seeds({kind: (f"learning rate {best[kind]}", losses) for kind, losses in of_kind.items()})
    table += ["", f"Muon reached AdamW's final loss in {mean_and_spread(ratios)} of AdamW's steps"]
    plots.curves(
        {kind: [it.curve for it in runs] for kind, runs in whole.items()},
        out / "optimizers.svg",
        ("step", "training loss, nats per byte"),
    )
    every = [*whole["adamw"], *whole["muon"], *(it for parts in shorter for it in parts)]
    return {"table": table, "ratios": ratios, "rates": tried, "runs": [_record(it) for it in every]}


def sizes(lab: Lab, out: Path) -> dict[str, Any]:
    """Trains six sizes on the same bytes: loss by parameters, a power law's exponent and its standard error."""
    shapes = [(64, 2), (96, 3), (128, 4), (192, 4), (256, 5), (384, 6)]  # width, layers
    points = []
    for width, layers in shapes:
        for seed in (0, 1):
            keys = [*_width(width), f"base_num_decoder_layers={layers}", "mup_base_emb_dim=64", "learning_rate=8e-3"]
            keys += ["steps=1500", *_seed(seed)]
            points.append((width, layers, lab.train(f"sizes-{width}-{seed}", *keys)))
    # Without embeddings and output, as in Kaplan et al. 2020.
    parameters = [it.parameters - 2 * 258 * width for width, _, it in points]
    losses = [it.held_out_loss for _, _, it in points]
    law = power_law(parameters, losses)
    table = [
        "| width | layers | parameters without embeddings | held-out loss of seeds 0, 1 |",
        "| --- | --- | --- | --- |",
    ]
    for i in range(0, len(points), 2):
        width, layers, _ = points[i]
        table.append(f"| {width} | {layers} | {parameters[i]:,} | {losses[i]:.4f}, {losses[i + 1]:.4f} |")
    table += ["", f"loss = {law['factor']:.3f} N^-{law['exponent']:.4f}, standard error {law['standard_error']:.4f}"]
    labels = ("parameters without embeddings", "held-out loss, nats per byte")
    plots.law(parameters, losses, law, out / "sizes.svg", labels)
    return {"table": table, "law": law, "runs": [_record(it) for _, _, it in points]}


def widths(lab: Lab, out: Path) -> dict[str, Any]:
    """Measures loss by learning rate at three widths, with and without muP, and activations after a few steps."""
    shapes, rates, seeds = (64, 128, 256), [2.0**power for power in range(-11, -4)], (0, 1)
    found: dict[str, dict[int, dict[float, list[Run]]]] = {
        kind: {width: {rate: [] for rate in rates} for width in shapes} for kind in ("muP", "plain")
    }
    coordinates: dict[str, dict[int, list[float]]] = {kind: {} for kind in found}
    for kind, by_width in found.items():
        for width, by_rate in by_width.items():
            keys = [*_width(width), f"mup_base_emb_dim={64 if kind == 'muP' else 0}"]
            for rate, of_seeds in by_rate.items():
                name, asked = f"widths-{kind}-{width}-{rate}", [*keys, f"learning_rate={rate}", "steps=300"]
                of_seeds += [lab.train(f"{name}-{seed}", *asked, *_seed(seed)) for seed in seeds]
            name = f"coordinates-{kind}-{width}"
            lab.train(name, *keys, "learning_rate=0.0078125", "steps=8", "warmup_steps_fraction=0", "log_internals=1")
            coordinates[kind][width] = activations(lab.folder / name / "metrics.jsonl")
    losses = {
        kind: {
            width: {rate: statistics.fmean(it.held_out_loss for it in runs) for rate, runs in by_rate.items()}
            for width, by_rate in by_width.items()
        }
        for kind, by_width in found.items()
    }
    table = [
        "| width | best rate, muP | its loss, seeds 0 and 1 | best rate, plain | its loss, seeds 0 and 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for width in shapes:
        cells = []
        for kind, by_width in found.items():
            best = min(rates, key=losses[kind][width].__getitem__)
            cells += [f"{best:.5f}", ", ".join(f"{it.held_out_loss:.4f}" for it in by_width[width][best])]
        table.append(f"| {width} | {' | '.join(cells)} |")
    plots.panels(losses, out / "widths.svg", ("learning rate", "held-out loss, nats per byte"), log=True)
    steps = {kind: {w: dict(enumerate(values, 1)) for w, values in it.items()} for kind, it in coordinates.items()}
    plots.panels(steps, out / "coordinates.svg", ("step", "last layer's activations, RMS"), log=False)
    every = [
        it for by_width in found.values() for by_rate in by_width.values() for runs in by_rate.values() for it in runs
    ]
    return {"table": table, "losses": losses, "activations": coordinates, "runs": [_record(it) for it in every]}


def experts(lab: Lab, out: Path) -> dict[str, Any]:
    """Compares feed-forward layers of 320 units with two of eight experts of 160: equal FLOPs per token."""
    shape = [key for key in _width(128) if not key.startswith("base_mlp_dim")]
    kinds = {
        "dense": [*shape, "base_mlp_dim=320"],
        "experts": [*shape, "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=160"],
    }
    runs = {
        kind: [lab.train(f"experts-{kind}-{seed}", *keys, "steps=1500", *_seed(seed)) for seed in range(3)]
        for kind, keys in kinds.items()
    }
    losses = {kind: [it.held_out_loss for it in of_kind] for kind, of_kind in runs.items()}
    table = _of_seeds({kind: (f"{runs[kind][0].parameters:,} parameters", it) for kind, it in losses.items()})
    table += ["", f"difference by seed: {mean_and_spread(_differences(losses['dense'], losses['experts']))}"]
    curves = {kind: [it.curve for it in of_kind] for kind, of_kind in runs.items()}
    plots.curves(curves, out / "experts.svg", ("step", "training loss, nats per byte"))
    return {"table": table, "runs": [_record(it) for of_kind in runs.values() for it in of_kind]}


def lora(lab: Lab, out: Path) -> dict[str, Any]:
    """Finetunes a model of English on Python source: all weights, or adapters, with the best rate of each."""
    shape = _width(128)
    lab.train("lora-base", *shape, "steps=2000", "enable_checkpointing=true", "checkpoint_period=2000")
    python = [*shape, "dataset_path=", "eval_dataset_path=", "eval_steps=64", "steps=400"]
    python += [f"load_parameters_path={lab.folder / 'lora-base'}"]
    kinds = {"all weights": [], "adapters": ["lora_rank=16", "lora_parameters=[attention.*,feed_forward.*]"]}
    rates = {"all weights": ("3e-4", "1e-3", "3e-3"), "adapters": ("1e-3", "3e-3", "1e-2")}

    def run(kind: str, rate: str, seed: int) -> Run:
        name = f"lora-{kind.replace(' ', '-')}-{rate}-{seed}"
        return lab.train(name, *python, *kinds[kind], f"learning_rate={rate}", *_seed(seed))

    tried = {kind: {rate: run(kind, rate, 0) for rate in rates[kind]} for kind in kinds}
    best = {kind: min(by_rate, key=lambda rate: by_rate[rate].held_out_loss) for kind, by_rate in tried.items()}
    runs = {kind: [run(kind, best[kind], seed) for seed in range(3)] for kind in kinds}
    losses = {kind: [it.held_out_loss for it in of_kind] for kind, of_kind in runs.items()}
    table = _of_seeds({kind: (f"learning rate {best[kind]}", it) for kind, it in losses.items()})
    table += ["", f"difference by seed: {mean_and_spread(_differences(losses['all weights'], losses['adapters']))}"]
    curves = {kind: [it.curve for it in of_kind] for kind, of_kind in runs.items()}
    plots.curves(curves, out / "lora.svg", ("step", "training loss, nats per byte"))
    rate_losses = {kind: {rate: it.held_out_loss for rate, it in by_rate.items()} for kind, by_rate in tried.items()}
    every = [_record(it) for of_kind in runs.values() for it in of_kind]
    return {"table": table, "rates": rate_losses, "runs": every}


def compression(lab: Lab, out: Path) -> dict[str, Any]:
    """Trains six layers of 320 on SentencePiece and on bytes; compares bits per byte with compressors.

    Two single-threaded runs in parallel take half the time of two runs with two threads in sequence; the third, a
    second seed of bytes, uses both cores.
    """
    assert lab.text
    model = ["base_emb_dim=320", "base_mlp_dim=896", "base_num_decoder_layers=6", "base_num_query_heads=5"]
    model += ["base_num_kv_heads=5", "opt_type=muon", "learning_rate=4e-3", "steps=1000"]
    model += ["enable_checkpointing=true", "checkpoint_period=1000"]
    # src.evaluate cuts the held-out text; a training run would see one document of 282 KB.
    model += ["eval_interval=-1"]
    pieces = ["tokenizer_type=sentencepiece", f"tokenizer_path={lab.folder / 'pieces.model'}", "vocab_size=4096"]
    kinds = {
        "SentencePiece": [*pieces, "max_target_length=256", "per_device_batch_size=8"],
        "bytes": ["max_target_length=512", "per_device_batch_size=4"],
    }
    if not (lab.folder / "pieces.model").exists():
        _command("src.train_tokenizer", str(MODEL), f"dataset_path={lab.text / 'train'}", *pieces)
    held_out = lab.text / "held_out" / "text.txt"
    bits = compressed_bits(held_out.read_bytes(), (lab.text / "train" / "text.txt").read_bytes())
    with ThreadPoolExecutor() as pool:
        begun = {
            kind: pool.submit(lab.train, f"compression-{kind}", *model, *keys, core=core % os.cpu_count())
            for core, (kind, keys) in enumerate(kinds.items())
        }
        runs = {kind: it.result() for kind, it in begun.items()}
    runs["bytes, seed 1"] = lab.train("compression-bytes-1", *model, *kinds["bytes"], *_seed(1))
    for kind, it in runs.items():
        scores = lab.folder / it.name / "bits.json"
        keys = [f"eval_dataset_path={held_out}", "max_document_bytes=4096"]  # a document fills rows of one stream
        _command("src.evaluate", str(lab.folder / it.name), *keys, f"results_path={scores}")
        found = json.loads(scores.read_text())
        bits[f"MinText, {it.parameters:,} parameters, {kind}"] = {"bits": found["eval_bits_per_byte"]}
        runs[kind] = dataclasses.replace(it, held_out=[(it.curve[-1][0], round(found["eval_loss"], 5))])
    table = ["| coding of the held-out text | bits per byte | after the training text |", "| --- | --- | --- |"]
    for name, it in sorted(bits.items(), key=lambda item: -item[1]["bits"]):
        table.append(f"| {name} | {it['bits']:.3f} | {format(it['primed'], '.3f') if 'primed' in it else ''} |")
    for kind, it in runs.items():
        step, fall = knee(it.curve)
        table.append(
            f"\n{kind}: the loss curve's knee is at step {step:,} of {it.curve[-1][0]:,}, after {fall:.0%} of its fall"
        )
    curves = {kind: [it.curve for name, it in runs.items() if name.partition(",")[0] == kind] for kind in kinds}
    plots.curves(curves, out / "compression.svg", ("step", "training loss, nats per token"))
    return {"table": table, "bits": bits, "runs": [_record(it) for it in runs.values()]}


def compressed_bits(text: bytes, before: bytes) -> dict[str, dict[str, float]]:
    """Measures compressors' bits per byte of `text`; "primed": what it adds to `before`, for large enough windows."""
    window = zstandard.ZstdCompressionParameters.from_level(22, window_log=27, enable_ldm=True)
    tools: dict[str, Callable[[bytes], bytes]] = {
        "gzip -9": lambda data: gzip.compress(data, 9),
        "bzip2 -9": lambda data: bz2.compress(data, 9),
        "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
        "zstd --ultra -22 --long=27": zstandard.ZstdCompressor(compression_params=window).compress,
    }
    bits = {name: {"bits": 8 * len(tool(text)) / len(text)} for name, tool in tools.items()}
    for name in "xz -9e", "zstd --ultra -22 --long=27":  # with windows of 64 and 128 MiB
        bits[name]["primed"] = 8 * (len(tools[name](before + text)) - len(tools[name](before))) / len(text)
    return bits


def activations(metrics: Path) -> list[float]:
    """Reads the last layer's root-mean-square activations at each step that has them."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line["activation_rms"][-1] for line in lines if "activation_rms" in line]


def crossing(steps: Sequence[int], losses: Sequence[float], target: float) -> float:
    """Finds the step at which a line through the points (steps, losses) first falls to `target`.

    Raises ValueError if the first loss is not above it, or no loss reaches it: the crossing is then unknown.
    """
    for i in range(1, len(steps)):
        if losses[i] <= target < losses[i - 1]:
            part = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
            return steps[i - 1] + part * (steps[i] - steps[i - 1])
    raise ValueError(f"runs of {list(steps)} steps, with losses {list(losses)}, do not enclose {target}")


def knee(curve: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Finds the step at which a falling curve bends most, and the fraction of its fall before that step.

    It is the point furthest below the line from the first point to the least loss at the last step, with both axes
    scaled to 0..1 (Satopaa et al. 2011, "Finding a Kneedle in a Haystack", section 3, for a decreasing convex curve).
    """
    (first, highest), (last, _) = curve[0], curve[-1]
    least = min(loss for _, loss in curve)
    fall = [(highest - loss) / (highest - least) for _, loss in curve]
    bend = max(range(len(curve)), key=lambda i: fall[i] - (curve[i][0] - first) / (last - first))
    return curve[bend][0], fall[bend]


def power_law(sizes: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """Fits loss = factor * size^-exponent by least squares of logarithms; returns the standard error too."""
    x, y = [math.log(size) for size in sizes], [math.log(loss) for loss in losses]
    fit = statistics.linear_regression(x, y)
    left = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    error = math.sqrt(left / (len(x) - 2) / spread)
    return {"factor": math.exp(fit.intercept), "exponent": -fit.slope, "standard_error": error}


def mean_and_spread(values: Sequence[float]) -> str:
    """Formats mean and standard deviation: "0.65 +- 0.02 (n = 3)"."""
    return f"{statistics.fmean(values):.4f} +- {statistics.stdev(values):.4f} (n = {len(values)})"


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(first, second, strict=True)]


def _of_seeds(kinds: dict[str, tuple[str, list[float]]]) -> list[str]:
    table = ["| | | held-out loss of seeds 0, 1, 2 | mean and standard deviation |", "| --- | --- | --- | --- |"]
    for kind, (what, losses) in kinds.items():
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        table.append(f"| {kind} | {what} | {each} | {mean_and_spread(losses)} |")
    return table


def _command(module: str, *argv: str, core: int | None = None) -> None:
    pinned = [] if core is None or not shutil.which("taskset") else ["taskset", "-c", str(core)]
    subprocess.run([*pinned, sys.executable, "-m", module, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _width(width: int) -> list[str]:
    heads = width // 32
    shape = [f"base_emb_dim={width}", f"base_mlp_dim={width * 5 // 2}", "head_dim=32"]
    return [*shape, f"base_num_query_heads={heads}", f"base_num_kv_heads={heads}"]


def _seed(seed: int) -> list[str]:
    return [f"data_shuffle_seed={seed}", f"init_weights_seed={seed}"]


def _read(run: Path, keys: list[str]) -> Run:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held_out = [(line["step"], round(line["eval_loss"], 5)) for line in lines if "eval_loss" in line]
    seconds = sum(line["step_time_seconds"] for line in lines if "step_time_seconds" in line)
    environment = json.loads((run / "environment.json").read_text())
    parameters = int(environment["model"].split()[0].replace(",", ""))  # "222,016 parameters, 4 layers"
    return Run(run.name, keys, parameters, thinned(train), held_out, seconds / 60, environment["MinText"])


def thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduces a curve to at most POINTS points, each the mean loss of neighboring steps at the last of them."""
    size = math.ceil(len(curve) / POINTS)
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(part[-1][0], round(statistics.fmean(loss for _, loss in part), 4)) for part in parts]


def _record(run: Run) -> dict[str, Any]:
    return dataclasses.asdict(run) | {"minutes": round(run.minutes, 2)}


EXPERIMENTS = {it.__name__: it for it in (quickstart, optimizers, sizes, widths, experts, lora, compression)}

if __name__ == "__main__":
    main(sys.argv[1:])
