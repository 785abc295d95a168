"""Published runs (configs/recipes), as a table in Markdown: `python scripts/recipes.py [FOLDER]`.

A recipe begins with a comment of fixed form that says what was published of its run; `Recipe` describes it. FOLDER has
reports of src.train_compile, RECIPE.json, for the columns of what was compiled.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from ml_collections import FrozenConfigDict

from src.config.yaml import parse_keys
from src.extras.aot.report import describe
from src.parallel.topology import Topology, parse_topology, peak_flops
from src.run import resolve_config
from src.run.metrics import duration
from src.system.exit_codes import run_command

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "recipes"
GIB = 2**30


class Figures(NamedTuple):
    """What a source states of a run; None: nothing."""

    tflops: float | None  # 1e12 operations per second and device
    mfu: float | None  # percent of the peak
    tokens_per_second: float | None  # of a device

    def utilization(self, peak: float) -> float:
        """MFU in percent, as stated or of the stated rate; `peak` is in operations per second."""
        return self.mfu if self.mfu is not None else 100 * self.tflops * 1e12 / peak


@dataclass(frozen=True)
class Recipe:
    """A file of configs/recipes: a published run's configuration, after a comment that is YAML itself.

    Attributes:
        name: of the file.
        run: whose, and which model.
        hardware: slices or hosts of a topology, and the devices in all.
        mesh: the sizes of its axes, as a run's header has them.
        rows: of a step.
        tokens: of a step.
        parameters: of the model.
        published: by the number of slices or hosts; empty: nothing was.
        unpublished: why nothing was, or empty.
        attention_flops: how the source counts attention: "palm", in full, or "causal"; empty where nothing is stated.
        source: where the configuration and the figures are from.
        differs: from the source in what, and why.
        keys: the configuration's own, beside base.yml's.
    """

    name: str
    run: str
    hardware: str
    mesh: str
    rows: int
    tokens: int
    parameters: int
    published: Mapping[int, Figures]
    unpublished: str
    attention_flops: str
    source: str
    differs: str
    keys: Mapping[str, Any]

    def load(self, *arguments: str) -> FrozenConfigDict:
        """The configuration, with `key=value` arguments after the file."""
        return resolve_config.load([str(FOLDER / f"{self.name}.yml"), *arguments])

    def topology(self, slices: int | None = None) -> Topology:
        """Of as many slices or hosts; None: as the file says."""
        return parse_topology(
            self.keys["compile_topology"], slices or int(self.keys.get("compile_topology_num_slices", 1))
        )


def recipes() -> list[Recipe]:
    """All of them, by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.yml"))]


def read(path: Path) -> Recipe:
    """A recipe and what its opening comment says."""
    text = path.read_text()
    comment = re.match(r"(?:#.*\n)+", text)[0]
    said = yaml.safe_load(re.sub(r"^# ?", "", comment, flags=re.MULTILINE))
    figures = said.pop("published")
    none = figures if isinstance(figures, str) else ""
    published = {} if none else {slices: Figures(**{**_UNSTATED, **stated}) for slices, stated in figures.items()}
    return Recipe(
        **{"attention_flops": "", **said},
        name=path.stem,
        published=published,
        unpublished=none,
        keys=parse_keys(text, str(path)),
    )


_UNSTATED = dict.fromkeys(Figures._fields)


def table(found: Iterable[Recipe], reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the table; `reports` are src.train_compile's, by recipe."""
    columns = {
        "recipe": "---",
        "devices": "---",
        "tokens per step": "---:",
        "parameters": "---:",
        "compiled in": "---:",
        "memory, GiB per device": "---",
        "MFU predicted": "---:",
        "published": "---",
    }
    yield _line(columns)
    yield _line(columns.values())
    for recipe in found:
        topology, report = recipe.topology(), reports.get(recipe.name)
        compiled = _compiled(recipe, report) if report else ["", "not compiled", ""]
        yield _line(
            [
                f"[{recipe.name}](../configs/recipes/{recipe.name}.yml)",
                describe(topology.name, topology.slices),
                f"{recipe.tokens:,}",
                f"{recipe.parameters / 1e9:,.1f}B",
                *compiled,
                _published(recipe) or "none",
            ]
        )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _compiled(recipe: Recipe, report: Mapping[str, Any]) -> list[str]:
    """Cells of what a report says: how long the compilation took, memory, predicted MFU."""
    memory, prediction = report["memory"], report.get("prediction")
    verdict = "fits" if memory["fits"] else "does not fit"
    fraction = prediction and prediction["mfu" if recipe.attention_flops == "causal" else "mfu_palm"]
    return [
        duration(sum(report["seconds"].values())),
        f"{verdict}: {memory['needed'] / GIB:.1f} of {memory['capacity'] / GIB:.1f}",
        f"{fraction:.1%}" if fraction else "",
    ]


def _published(recipe: Recipe) -> str:
    """MFU by the number of slices in a cell."""
    peak = peak_flops(recipe.topology().chip.kind, "bfloat16")
    cells = [f"{slices}: {figures.utilization(peak):.1f}%" for slices, figures in recipe.published.items()]
    return cells[0].removeprefix("1: ") if list(recipe.published) == [1] else ", ".join(cells)


def main(argv: list[str]) -> None:
    """Prints the table."""
    folder = Path(argv[0]) if argv else None
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")} if folder else {}
    print("\n".join(table(recipes(), reports)))


if __name__ == "__main__":
    run_command(main)
