"""Lists published runs (configs/recipes) as a Markdown table: `python scripts/evidence/recipes.py [FOLDER]`.

A recipe begins with a YAML comment on the published run; `Recipe` describes its fields. FOLDER has reports of
src.train_compile, RECIPE.json, for the columns on the compiled step.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from src.config.schema import Config
from src.config.yaml import parse_keys
from src.extras.aot.report import describe
from src.extras.aot.topology import Topology, parse_topology
from src.parallel.chips import peak_flops
from src.run import resolve_config
from src.run.metrics import duration
from src.system.exit_codes import run_command

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "recipes"
GIB = 2**30


class Figures(NamedTuple):
    """Figures that a source states for a run; None if it does not."""

    tflops: float | None  # 1e12 operations per second and device
    mfu: float | None  # percent of the peak
    tokens_per_second: float | None  # per device

    def utilization(self, peak: float) -> float:
        """Returns MFU in percent, as stated or from the stated rate; `peak` is in operations per second."""
        return self.mfu if self.mfu is not None else 100 * self.tflops * 1e12 / peak


@dataclass(frozen=True)
class Recipe:
    """A file in configs/recipes: a published run's configuration, after a comment that is YAML itself.

    Attributes:
        name: The file's name.
        run: Who ran it, and which model.
        hardware: Slices or hosts of a topology, and the total number of devices.
        mesh: Axis sizes, as in a run's header.
        rows: Sequences per step.
        tokens: Tokens per step.
        parameters: Parameters of the model.
        published: Figures by number of slices or hosts; empty if there are none.
        unpublished: Why there are none, or empty.
        attention_flops: How the source counts attention: "palm", in full, or "causal"; empty if not stated.
        source: Source of the configuration and the figures.
        differs: Differences from the source, and why.
        keys: The configuration's own keys, in addition to base.yml's.
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

    def load(self, *arguments: str) -> Config:
        """Loads the configuration, with `key=value` arguments after the file."""
        return resolve_config.load([str(FOLDER / f"{self.name}.yml"), *arguments])

    def topology(self, slices: int | None = None) -> Topology:
        """Returns the topology with this number of slices or hosts; None: the file's number."""
        return parse_topology(
            self.keys["compile_topology"], slices or int(self.keys.get("compile_topology_num_slices", 1))
        )


def recipes() -> list[Recipe]:
    """Reads all recipes, by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.yml"))]


def read(path: Path) -> Recipe:
    """Reads a recipe and its opening comment."""
    text = path.read_text()
    comment = re.match(r"(?:#.*\n)+", text)[0]
    comment_keys = yaml.safe_load(re.sub(r"^# ?", "", comment, flags=re.MULTILINE))
    figures = comment_keys.pop("published")
    none = figures if isinstance(figures, str) else ""
    published = {} if none else {slices: Figures(**{**_UNSTATED, **stated}) for slices, stated in figures.items()}
    return Recipe(
        **{"attention_flops": "", **comment_keys},
        name=path.stem,
        published=published,
        unpublished=none,
        keys=parse_keys(text, str(path)),
    )


_UNSTATED = dict.fromkeys(Figures._fields)


def table(found: Iterable[Recipe], reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table's lines; `reports` are src.train_compile's, by recipe."""
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
    """Formats a report's cells: compilation time, memory, predicted MFU."""
    memory, prediction = report["memory"], report.get("prediction")
    verdict = "fits" if memory["fits"] else "does not fit"
    fraction = prediction and prediction["mfu" if recipe.attention_flops == "causal" else "mfu_palm"]
    return [
        duration(sum(report["seconds"].values())),
        f"{verdict}: {memory['needed'] / GIB:.1f} of {memory['capacity'] / GIB:.1f}",
        f"{fraction:.1%}" if fraction else "",
    ]


def _published(recipe: Recipe) -> str:
    """Formats MFU by the number of slices, for a cell."""
    chip = recipe.topology().chip
    assert chip
    peak = peak_flops(chip.kind, "bfloat16")
    cells = [f"{slices}: {figures.utilization(peak):.1f}%" for slices, figures in recipe.published.items()]
    return cells[0].removeprefix("1: ") if list(recipe.published) == [1] else ", ".join(cells)


def main(argv: list[str]) -> None:
    """Prints the table."""
    folder = Path(argv[0]) if argv else None
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")} if folder else {}
    print("\n".join(table(recipes(), reports)))


if __name__ == "__main__":
    run_command(main)
