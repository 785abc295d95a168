"""Fits the constants of predictions to published runs and tests them: `python scripts/evidence/predict_published.py`.

Rows are in published.yml. Every publication is predicted by constants that were fitted without it: half of the
publications by a fit to the other half, or if it is the only one of its chip, by a fit to all others. `--constants`
prints the lines of src/extras/aot/roofline.py, fitted to all rows; `--rows` prints every row. Takes two minutes.
"""

import itertools
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
import numpy as np
import yaml
from scipy.stats import spearmanr

from scripts.evidence.recipes import FOLDER, read
from src.config.yaml import BASE
from src.extras.aot.roofline import Constants
from src.extras.aot.topology import parse_topology
from src.extras.plan.calibrate import LARGEST, error, least_errors
from src.extras.plan.estimate import Costs, step_costs
from src.extras.plan.placed import spec_of
from src.model.flops import flops_per_token
from src.run import resolve_config
from src.system.exit_codes import run_command

PUBLISHED = Path(__file__).with_name("published.yml")
# The publications on chips that several publications measured, in two halves.
HALVES = (
    ("maxtext-v5p", "dgxc-maxtext-llama3", "torchtitan-2024", "gpu-recipes-h200", "mintext-h100"),
    (
        *("tpu-recipes-v5p", "maxtext-tiering", "dgxc-maxtext-llama2", "dgxc-pax", "torchtitan-2025", "trainy-h200"),
        "mintext-h200",
    ),
)
# Assumed before the fit: constants of either platform, the standard deviations of their logarithms, and how much a
# chip's `matmul` deviates from its platform's.
START = Constants()
SPREAD = {
    **{"matmul": 0.15, "low_precision": 0.2, "experts": 0.3, "attention": 0.4, "memory": 0.3, "rounding": 0.5},
    **{"exposed": 0.4, "blocking": 0.4, "narrow": 1.0, "waiting": 0.7},
}
OF_CHIP = 0.12


class Row(NamedTuple):
    """A published step: its costs, and its measured seconds."""

    publication: str
    name: str
    costs: Costs
    seconds: float
    has_experts: bool


class Fit(NamedTuple):
    """Fitted logarithms of factors on START, by (constant, platform), and on `matmul` by ("matmul", chip)."""

    parameters: dict[tuple[str, str], float]

    def of(self, kind: str) -> Constants:
        """Constants of a kind of chip; its platform's if none of its rows were fitted."""
        platform = platform_of(kind)
        shared = {name: getattr(START, name) * math.exp(self.parameters[name, platform]) for name in SPREAD}
        matmul = shared["matmul"] * math.exp(self.parameters.get(("matmul", kind), 0.0))
        return Constants(**{**shared, "matmul": min(matmul, LARGEST.matmul)})


def main(argv: list[str]) -> None:
    """Prints the tests' results, and if asked for all rows and the fitted constants."""
    jax.config.update("jax_platforms", "cpu")
    rows = list(published())
    single = {row.publication for row in rows}.difference(*HALVES)
    tested: list[tuple[Row, Constants]] = []
    for half in HALVES:
        found = fit([row for row in rows if row.publication not in half])
        tested += [(row, found.of(row.costs.chip.kind)) for row in rows if row.publication in half]
    apart = []
    for publication in sorted(single):
        found = fit([row for row in rows if row.publication != publication])
        apart += [(row, found.of(row.costs.chip.kind)) for row in rows if row.publication == publication]
    print("Each publication predicted without it:\n")
    print("\n".join(table(tested)))
    print("\nThe only publication of their chip, predicted from other chips (uncalibrated):\n")
    print("\n".join(table(apart)))
    everything = fit(rows)
    print("\nThe default constants, fitted to all rows:\n")
    print("\n".join(table([(row, everything.of(row.costs.chip.kind)) for row in rows])))
    if "--rows" in argv:
        print("\n" + "\n".join(row_lines([*tested, *apart])))
    if "--constants" in argv:
        print("\n" + "\n".join(constant_lines(everything, rows)))


def published() -> Iterator[Row]:
    """Yields every row of published.yml and of the recipes that it names, with the costs of its step."""
    for publication, entry in yaml.safe_load(PUBLISHED.read_text()).items():
        for number, row in enumerate(entry.get("rows", [])):
            topology = parse_topology(str(row["topology"]), row["slices"])
            keys = {**entry.get("keys", {}), **row["keys"], "dataset_type": "synthetic"}
            keys |= {"compile_topology": row["topology"], "compile_topology_num_slices": row["slices"]}
            config = resolve_config.load([str(BASE), *(f"{key}={typed(value)}" for key, value in keys.items())])
            costs = step_costs(config, topology)
            seconds = row.get("seconds") or costs.tokens_per_step / topology.num_devices / row["tokens_per_second"]
            model = config.run.model_name or "base.yml"
            low = f" {config.step.quantization}" if config.step.quantization else ""
            name = f"{model}{low}, {row['slices']} x {row['topology']}, {config.batch.max_target_length} tokens"
            yield Row(publication, f"{name} ({number})", costs, seconds, spec_of(config).has_experts)
        for name in entry.get("recipes", []):
            recipe = read(FOLDER / f"{name}.yml")
            for slices, figures in recipe.published.items():
                config = recipe.load(f"compile_topology_num_slices={slices}")
                costs, topology, spec = (
                    step_costs(config, recipe.topology(slices)),
                    recipe.topology(slices),
                    spec_of(config),
                )
                flops = flops_per_token(spec, config.batch.max_target_length)
                flops_counted = flops.causal if recipe.attention_flops == "causal" else flops.palm
                rate = figures.tokens_per_second or figures.utilization(costs.peak) / 100 * costs.peak / flops_counted
                seconds = costs.tokens_per_step / topology.num_devices / rate
                yield Row(publication, f"{name}, {slices} slices", costs, seconds, spec.has_experts)


def typed(value: Any) -> str:
    """Writes a value as on a command line."""
    return json.dumps(value).replace('"', "") if isinstance(value, dict | list) else str(value)


def platform_of(kind: str) -> str:
    """Platform of a chip."""
    return "tpu" if kind.startswith("TPU") else "gpu"


def fit(rows: Sequence[Row]) -> Fit:
    """Fits the constants to rows; a publication with many rows counts less for each."""
    kinds = sorted({row.costs.chip.kind for row in rows})
    names = [("matmul", kind) for kind in kinds] + list(itertools.product(SPREAD, ("tpu", "gpu")))
    spread = [OF_CHIP if scope in kinds else SPREAD[name] for name, scope in names]
    upper = [
        math.inf if scope in kinds else math.log(getattr(LARGEST, name) / getattr(START, name)) for name, scope in names
    ]
    count = Counter(row.publication for row in rows)

    def constants(row: Row, parameters: np.ndarray) -> Constants:
        return Fit(dict(zip(names, map(float, parameters), strict=True))).of(row.costs.chip.kind)

    weights = [count[row.publication] ** -0.25 for row in rows]
    return Fit(dict(zip(names, map(float, least_errors(rows, constants, spread, upper, weights)), strict=True)))


def table(predicted: Sequence[tuple[Row, Constants]]) -> Iterator[str]:
    """Yields a table of each publication's errors of the step time, and the means."""
    yield "| publication | chip | rows | mean error | mean absolute error | rank correlation |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for publication in dict.fromkeys(row.publication for row, _ in predicted):
        those = [(row, constants) for row, constants in predicted if row.publication == publication]
        errors = [error(*each) for each in those]
        ranks = rank_correlation(those) if len(those) > 2 else None
        rank = "" if ranks is None else f"{ranks:.2f}"
        mean, absolute = statistics.fmean(errors), statistics.fmean(map(abs, errors))
        kind = those[0][0].costs.chip.kind
        yield f"| {publication} | {kind} | {len(those)} | {mean:+.1%} | {absolute:.1%} | {rank} |"
    for name, has_experts in (("dense", False), ("experts", True)):
        errors = [abs(error(row, constants)) for row, constants in predicted if row.has_experts == has_experts]
        if errors:
            yield f"| **all, {name}** | | {len(errors)} | | **{statistics.fmean(errors):.1%}** | |"


def rank_correlation(predicted: Sequence[tuple[Row, Constants]]) -> float:
    """Spearman's rank correlation of measured and predicted step times."""
    seconds = [row.costs.predict(constants).step_seconds for row, constants in predicted]
    return float(spearmanr([row.seconds for row, _ in predicted], seconds).statistic)


def row_lines(predicted: Sequence[tuple[Row, Constants]]) -> Iterator[str]:
    """Yields a table of all rows."""
    yield "| publication | row | measured, s | predicted | error |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for row, constants in predicted:
        seconds = row.costs.predict(constants).step_seconds
        yield f"| {row.publication} | {row.name} | {row.seconds:.3g} | {seconds:.3g} | {error(row, constants):+.1%} |"


def constant_lines(found: Fit, rows: Sequence[Row]) -> Iterator[str]:
    """Yields the fitted lines of src/extras/aot/roofline.py."""

    def written(values: Mapping[str, float]) -> str:
        words = [f"{name}={float(f'{value:.3g}'):g}" for name, value in values.items()]
        return f"\n        {', '.join(words[:5])},\n        {', '.join(words[5:])},\n    "

    yield "_SHARED = {"
    for platform in ("tpu", "gpu"):
        # A kind without rows has its platform's constants.
        yield f'    "{platform}": Constants({written(found.of(platform.replace("tpu", "TPU"))._asdict())}),'
    yield "}  # fmt: skip"
    yield "_MATMUL: dict[str, float] = {"
    for kind in sorted({row.costs.chip.kind for row in rows}):
        yield f'    "{kind}": {found.of(kind).matmul:.3g},'
    yield "}"


if __name__ == "__main__":
    run_command(main)
