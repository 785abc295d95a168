"""Formats the results of a search: a table, command lines, JSON, and a page that opens offline."""

import html
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from src import as_installed
from src.config.schema import Config
from src.config.yaml import dump
from src.extras.aot.report import change_lines, describe, readable
from src.extras.aot.topology import Topology
from src.extras.plan.costing import Costing
from src.extras.plan.points import Point
from src.extras.plan.search import Result
from src.system.errors import counted

REASONS = 4  # how many reasons for refusing meshes have a line each, the most frequent ones
RESOURCES = 4  # the first fields of a Prediction are the seconds of this many resources
ROOFLINE = "by a roofline, not measured"
# Mean absolute error of steps of published runs that no constant was fitted to (docs/plan.md, "Against published
# runs"): on chips of several publications, on others, and with experts.
ERROR, ERROR_OF_OTHERS, ERROR_WITH_EXPERTS = 0.08, 0.126, 0.179
SEVERAL = ("TPU v5", "NVIDIA H100 80GB HBM3", "NVIDIA H100 96GB HBM2e", "NVIDIA H200")


def key_of(word: str) -> str:
    """Returns the key that a word of a command line sets: `a` for `a.b=1`. For a file, the result names no key."""
    return word.partition("=")[0].partition(".")[0]


class Request(NamedTuple):
    """The user's request: the config, the command-line words that resolve to it, the hardware, and the run to price."""

    config: Config
    words: Sequence[str]
    topology: Topology
    train_tokens: float = 0.0
    price: float = 0.0  # of a device for an hour
    calibration: str = ""  # the file of the constants that the predictions use
    has_experts: bool = False

    @property
    def basis(self) -> str:
        """States what the predictions are based on: a calibration's file, or the roofline."""
        return f"calibrated by {self.calibration}" if self.calibration else ROOFLINE

    @property
    def error(self) -> float | None:
        """Mean absolute relative error of a predicted duration; None with a calibration, which printed its own."""
        kind = self.topology.chip.kind if self.topology.chip else ""
        uncalibrated = ERROR_WITH_EXPERTS if self.has_experts else ERROR if kind in SEVERAL else ERROR_OF_OTHERS
        return None if self.calibration else uncalibrated

    def changed(self, point: Point) -> dict[str, Any]:
        """The keys, with values, in which a point differs from the config."""
        return {key: value for key, value in point.keys.items() if dump(value) != dump(self.config[key])}

    def command_words(self, point: Point, changes: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
        """Command line for a point's config with `changes`: the user's words, then the changed keys."""
        changed = {**self.changed(point), **changes}
        own = [word for word in self.words if not {key_of(word), word.partition("=")[0]} & changed.keys()]
        return [*own, *(f"{key}={dump(value)}" for key, value in changed.items())]


class Row(NamedTuple):
    """A row of the table, for a compiled point that fits.

    Bytes are per device; durations, tokens per second and MFU are predicted. `days`, `device_hours` and `price` are for
    `train_tokens`, None without them. `price` is in the currency of `price_per_device_hour`, 0 if that is not given.
    """

    rank: int
    mesh: str
    policy: str
    batch: str
    also: str
    memory: int
    left: int
    step_seconds: float
    step_error: float | None  # relative, on average
    tokens_per_second: float
    mfu: float
    bound: str
    days: float | None
    device_hours: float | None
    price: float | None
    command: str
    keys: dict[str, Any]
    estimated_memory: int
    estimated_step_seconds: float


def rows(results: Sequence[Result], request: Request) -> list[Row]:
    """Ranks the points that fit by predicted tokens per second."""
    ranked = sorted((each for each in results if each.fits), key=lambda each: -each.speed)
    return [_row(rank, each, request) for rank, each in enumerate(ranked, 1)]


def _row(rank: int, result: Result, request: Request) -> Row:
    point, prediction, memory = result.candidate.point, result.prediction, result.record["memory"]
    assert prediction
    devices, most = request.topology.num_devices, max(prediction[:RESOURCES])
    hours = request.train_tokens / result.speed / 3600 if request.train_tokens else None
    return Row(
        rank=rank,
        mesh=point.mesh_words,
        policy=point.policy_name,
        batch=point.batch_words,
        also=point.also_words,
        memory=memory["needed"],
        left=memory["left"],
        step_seconds=result.step_seconds,
        step_error=request.error,
        tokens_per_second=result.speed,
        mfu=prediction.mfu * prediction.step_seconds / result.step_seconds,
        bound="host" if result.host_seconds > most else prediction.bound,
        days=hours and hours / 24,
        device_hours=hours and hours * devices,
        price=hours and request.price and hours * devices * request.price,
        command=command_line(request, point),
        keys=request.changed(point),
        estimated_memory=result.candidate.memory,
        estimated_step_seconds=result.candidate.step_seconds,
    )


def command_line(request: Request, point: Point, changes: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Writes the command that compiles a point with `changes` to its keys."""
    return as_installed(f"python -m src.train_compile {shlex.join(request.command_words(point, changes))}")


def table(ranked: Sequence[Row]) -> list[list[str]]:
    """Builds the table: a list of strings per row, first the columns' names; leaves empty columns out."""
    columns: dict[str, list[str]] = {
        "": [str(row.rank) for row in ranked],
        "mesh": [row.mesh for row in ranked],
        "remat policy": [row.policy for row in ranked],
        "batch": [row.batch for row in ranked],
        "also": [row.also for row in ranked],
        "memory": [readable(row.memory) for row in ranked],
        "left": [readable(row.left) for row in ranked],
        "step, s": [f"{row.step_seconds:.3g}{f' ± {row.step_error:.0%}' if row.step_error else ''}" for row in ranked],
        "tokens/s": [f"{row.tokens_per_second:,.0f}" for row in ranked],
        "MFU": [f"{row.mfu:.1%}" for row in ranked],
        "bound": [row.bound for row in ranked],
        "days": [f"{row.days:.3g}" if row.days else "" for row in ranked],
        "device-hours": [f"{row.device_hours:,.0f}" if row.device_hours else "" for row in ranked],
        "price": [f"{row.price:,.0f}" if row.price else "" for row in ranked],
    }
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def ranked_lines(ranked: Sequence[Row], basis: str) -> Iterator[str]:
    """Yields the table as aligned lines, and the command of each row."""
    lines = table(ranked)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()
    yield f"step, tokens/s and what follows from them: {basis}"
    yield from (f"\n{row.rank}: {row.command}" for row in ranked)


def omitted_lines(costing: Costing) -> Iterator[str]:
    """Yields a line for each group of omitted points, with the reason."""
    for why, meshes in sorted(costing.refused.items(), key=lambda each: -each[1])[:REASONS]:
        yield f"{meshes} mesh{'es' * (meshes > 1)}: {why}"
    if rest := sum(sorted(costing.refused.values())[:-REASONS]):
        yield f"{rest} more meshes that the model or the batch does not divide over"
    if too_large := costing.too_large:
        count = sum(group.points for group in too_large.values())
        least = ", ".join(f"{policy} from {readable(group.best.memory)}" for policy, group in too_large.items())
        yield f"{count:,} points should not fit in {readable(costing.capacity)}, by estimates of memory: {least}"
    if too_large := costing.too_large_on_host:
        count = sum(group.points for group in too_large.values())
        least = ", ".join(f"{policy} from {readable(group.best.on_host)}" for policy, group in too_large.items())
        yield f"{count:,} points should need more than {readable(costing.on_host)} in host memory: {least}"
    for bound, (points, best) in costing.too_slow.items():
        part = best.speed / costing.candidates[0].speed
        yield (
            f"{points:,} points are limited by {bound} and should be slower: the best of them reaches {part:.0%} of "
            f"the fastest estimate's speed ({best.point.mesh_words})"
        )
    if costing.no_gain:
        yield f"{costing.no_gain:,} points save more memory than their mesh and policy need, and only lose time"


def nearest_lines(nearest: Result, request: Request) -> Iterator[str]:
    """Yields lines for a search that found nothing that fits, about its smallest point."""
    if nearest.record["failed"]:
        yield f"nothing compiled: {nearest.record['failed']}"
        return
    point, memory = nearest.candidate.point, nearest.record["memory"]
    more = f"{'at least ' * bool(nearest.record['compiler_message'])}{readable(memory['needed'] - memory['capacity'])}"
    yield (
        f"nothing fits. The nearest needs {more} more than the {readable(memory['capacity'])} per device: {point.words}"
    )
    yield from change_lines(nearest.record, lambda keys: f"would help  {command_line(request, point, keys)}")


def report_json(
    request: Request,
    costing: Costing,
    results: Sequence[Result],
    seconds: Mapping[str, float],
    nearest: Result | None = None,
) -> str:
    """Formats a search's results as JSON text.

    `seconds` are the durations of costing and compiling. `nearest` is the smallest point, with changes to it, if none
    fits.
    """
    compiled = [
        {
            "keys": request.changed(each.candidate.point),
            "estimated_memory": each.candidate.memory,
            "estimated_step_seconds": each.candidate.step_seconds,
            "prediction": each.prediction and each.prediction._asdict(),
            "host_seconds": each.host_seconds,
            **{name: each.record.get(name) for name in ("failed", "memory", "replay", "tokens", "mesh")},
            **{name: each.record.get(name) for name in ("cpu_seconds", "host_peak_bytes")},
        }
        for each in results
    ]
    plan = {
        "topology": describe(request.topology.name, request.topology.slices),
        "devices": request.topology.num_devices,
        "config": shlex.join(request.words),
        "prediction": request.basis,
        "points": costing.points,
        "costed": costing.costed,
        "seconds": dict(seconds),
    }
    found = {
        "rows": [row._asdict() for row in rows(results, request)],
        "compiled": compiled,
        "omitted": list(omitted_lines(costing)),
    }
    if nearest:
        point, changes = nearest.candidate.point, nearest.record.get("changes", [])
        found["changes"] = [{**each, "command": command_line(request, point, each["keys"])} for each in changes]
    return json.dumps({"plan": plan, **found}, indent=2) + "\n"


def page(request: Request, costing: Costing, results: Sequence[Result]) -> str:
    """Renders the page as HTML: a plot of the compiled points, the table, the commands, and the points left out."""
    from src.extras.pages import page as pages

    ranked = rows(results, request)
    name, *head = table(ranked)[0] or [""]
    body = pages.table(table(ranked)[1:], f"<tr><th>{name}</th>{''.join(f'<th>{each}</th>' for each in head)}</tr>")
    commands = "".join(f"<p>{row.rank}</p><pre>{html.escape(row.command)}</pre>" for row in ranked)
    pruned = "".join(f"<p>{html.escape(line)}</p>" for line in omitted_lines(costing))
    slices = describe(request.topology.name, request.topology.slices)
    model = request.config["model_name"] or "a model"
    status = f"{counted(len(results), 'point')} compiled, {costing.costed:,} costed; speeds {request.basis}"
    sections = [
        pages.card("What fits, fastest first", f'<div class="runs">{body}</div>'),
        pages.card("Commands", commands),
        pages.card("Left out", pruned),
    ]
    return pages.whole_page({}, f"{model} on {slices}", status, plot(ranked, results, costing.capacity), sections, "")


def plot(ranked: Sequence[Row], results: Sequence[Result], capacity: int) -> str:
    """Plots memory against speed of the compiled points as SVG, with a line at `capacity`, the bytes of a device.

    Hovering over a dot names its point.
    """
    dots = [(row.memory, row.tokens_per_second, f"{row.rank}: {_hover(row)}", "good") for row in ranked]
    dots += [
        (each.needed, each.speed, f"does not fit: {each.candidate.point.words}", "eval")
        for each in results
        if not each.fits and each.speed and math.isfinite(each.needed)
    ]
    right = max([1.05 * capacity, *(1.02 * memory for memory, *_ in dots)])
    speeds = [speed for _, speed, *_ in dots] or [1.0]
    low, high = 0.95 * min(speeds), 1.02 * max(speeds)
    at = [
        (60 + 880 * memory / right, 300 - 290 * (speed - low) / (high - low), text, color)
        for memory, speed, text, color in dots
    ]
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="var(--{color})"><title>{html.escape(text)}</title></circle>'
        for x, y, text, color in at
    )
    edge = 60 + 880 * capacity / right
    words = 'fill="var(--quiet)" font-size="13"'
    return f"""<figure><figcaption><b>Memory per device against predicted tokens per second</b></figcaption>
<svg viewBox="0 0 960 330" width="100%" role="img">
<path class="grid" d="M60 10V300H940M{edge:.1f} 10V300" stroke="var(--line)"/>
<text x="{edge - 6:.1f}" y="22" text-anchor="end" {words}>{readable(capacity)}</text>
<text x="60" y="320" {words}>0</text><text x="940" y="320" text-anchor="end" {words}>{readable(round(right))}</text>
<text x="54" y="22" text-anchor="end" {words}>{high:,.0f}</text>
<text x="54" y="300" text-anchor="end" {words}>{low:,.0f}</text>
{circles}
</svg></figure>"""


def _hover(row: Row) -> str:
    speed = f"{row.tokens_per_second:,.0f} tokens/s"
    parts = (row.mesh, row.policy, f"batch {row.batch}", row.also, readable(row.memory), speed)
    return ", ".join(part for part in parts if part)
