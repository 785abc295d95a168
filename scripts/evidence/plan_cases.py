"""Ranks published choices in searches of src.plan: `python scripts/evidence/plan_cases.py CASE ...`.

A case is a published run. The search chooses its mesh, remat policy and batch per device; other keys keep their values.
Prints the rank of the published choice by the estimates, and among the points that the search compiled, by their
programs: the published choice is always compiled. FOLDER/CASE.json has the results. `--top N` compiles N points (12
without it), `--estimates` none. `--check` gives the command of the first row to src.train_compile. docs/plan_cases.md
has the results.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import yaml

from src import FOLDER
from src.config.schema import size_key
from src.config.yaml import BASE
from src.extras.aot.report import readable
from src.extras.plan import output
from src.extras.plan.command import read
from src.extras.plan.compiling import Folder
from src.extras.plan.costing import Candidate, Costing, cost
from src.extras.plan.points import SIZES, Space
from src.extras.plan.search import Result, Search
from src.parallel.slices import mesh_sizes
from src.system.exit_codes import run_command

SEARCHED = {*SIZES, "remat_policy", "remat_custom", "per_device_batch_size", "gradient_accumulation_steps"}
SEARCHED |= {"shard_optimizer_over_data", "optimizer_memory_host_offload", "num_vocab_tiling"}
SEARCHED |= {"num_pipeline_microbatches", "num_pipeline_repeats"}
RECIPES = FOLDER.parent / "configs" / "recipes"


class Case(NamedTuple):
    """A published run, and the words of the command that searches for it."""

    recipe: str  # in configs/recipes; empty: base.yml
    words: tuple[str, ...]  # these keys keep their values
    keys: tuple[tuple[str, Any], ...] = ()  # published ones that the recipe lacks or has otherwise


ROWS_405B: tuple[tuple[str, Any], ...] = (
    ("model_name", "llama3.1-405b"),
    ("attention", "flash"),
    ("packing", False),
    ("per_device_batch_size", 2),
    ("max_target_length", 8192),
    ("remat_policy", "custom"),
    ("remat_custom", {"context": "offload", "mlpwo": "offload"}),
    ("num_vocab_tiling", 4),
    ("dataset_type", "synthetic"),
)
CASES = {
    # MaxText's script for four hosts has the batch and the mesh of the recipe's sixteen; its minimal_flash is
    # minimal_with_context here, which the recipe does not use.
    "llama2-7b": Case(
        "llama2-7b-a3",
        ("compile_topology=a3", "compile_topology_num_slices=4", "scan_layers=true"),
        (("remat_policy", "minimal_with_context"),),
    ),
    "llama3-70b": Case("llama3-70b-h100-128", ("compile_topology=dgx-h100", "compile_topology_num_slices=16")),
    "16b": Case("maxtext-16b-v5e-256", ("compile_topology=v5e-256",)),
    "32b": Case("maxtext-32b-v5p-128", ("compile_topology=v5p-128",)),
    "mixtral": Case("mixtral-8x7b-v5p-256", ("compile_topology=v5p-256",)),
    # The recipe keeps blocks' inputs in host memory.
    "128b": Case(
        "maxtext-128b-v5e-256", ("compile_topology=v5e-256",), (("remat_policy", "full"), ("remat_custom", {}))
    ),
    "405b": Case("", ("compile_topology=v5p-1024",), ROWS_405B),  # published.yml, tpu-recipes-v5p
    "1160b": Case("maxtext-1160b-v5p-12288", ("compile_topology=v5p-12288",)),
}


def main(argv: Sequence[str]) -> None:
    """Searches the cases that are named, all of them without names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, default=Path("plan_cases"))
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--estimates", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases or CASES:
        found = search(name, arguments.folder, 0 if arguments.estimates else arguments.top)
        if arguments.check and found.get("rows"):
            found["checked"] = check(found["rows"][0], arguments.folder / f"{name}-first.json")
            print(f"first row by src.train_compile: {found['checked']}")
        (arguments.folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def search(name: str, folder: Path, top: int) -> dict[str, Any]:
    """Costs a case's points, compiles `top` of them and the published one, and prints its rank."""
    case, begun = CASES[name], time.monotonic()
    file = RECIPES / f"{case.recipe}.yml" if case.recipe else BASE
    if case.keys:
        file, base = folder.resolve() / f"{name}.yml", file
        file.write_text(yaml.safe_dump({"base_config": str(base), **dict(case.keys)}))
    words = [str(file), *case.words]
    print(f"\n{name}: python -m src.plan {shlex.join(words)}")
    space, request, _ = read(words)
    costing = cost(space, print)
    seconds = {"costing": time.monotonic() - begun}
    published = own_candidate(space)
    print(f"costed {costing.costed:,} of {costing.points:,} points in {seconds['costing']:.0f} s")
    found: dict[str, Any] = {"words": words, "costed": costing.costed, "points": costing.points}
    found |= {"omitted": list(output.omitted_lines(costing)), "estimated": estimated(costing, published)}
    print("\n".join(f"    {each}" for each in found["omitted"]))
    print(f"by estimates: {found['estimated']}")
    if top:
        kept = Folder.of(space.config, space.topology)
        searching = Search(costing, space, kept, request.command_words, top)
        searching.run(print)
        seconds["compiling"] = time.monotonic() - begun - seconds["costing"]
        own = Search(replace(costing, candidates=[published]), space, kept, request.command_words, 1)
        own.run(print)
        found |= {"rows": [row._asdict() for row in output.rows(searching.results, request)]}
        found |= {"compiled": compiled(searching.results, own.results[0])}
        print(f"compiled: {found['compiled']}")
        print("\n".join(output.ranked_lines(output.rows(searching.results, request), request.basis)))
    return found | {"seconds": seconds}


def own_candidate(space: Space) -> Candidate:
    """Costs the config itself: the published choice."""
    config, topology = space.config, space.topology
    groups = {"ici": topology.num_devices // topology.slices, "dcn": topology.slices}
    for kind, devices in groups.items():
        sizes = mesh_sizes(kind, config.mesh, devices, topology.slices)
        keys = (size_key(kind, axis) for axis in config.mesh.mesh_axes)
        config = config.replace(**dict(zip(keys, sizes, strict=True)))
    [candidate] = cost(Space(config, topology, SEARCHED, space.rows)).candidates
    return candidate


def choice(candidate: Candidate) -> tuple[str, str, str]:
    """A candidate's mesh, remat policy and batch: points that differ in other keys are one choice."""
    point = candidate.point
    return point.mesh_words, point.policy_name, point.batch_words


def estimated(costing: Costing, published: Candidate) -> dict[str, Any]:
    """Ranks the published choice among those that should fit, by estimated speed."""
    fitting = [each for each in costing.candidates if each.memory <= costing.capacity]
    faster = dict.fromkeys(choice(each) for each in fitting if each.speed > published.speed)
    faster.pop(choice(published), None)
    first = fitting[0] if fitting else None
    return {
        "published": described(published),
        "rank": len(faster) + 1,
        "choices that should fit": len(dict.fromkeys(map(choice, fitting))),
        "candidates": len(costing.candidates),
        "first that should fit": first and described(first),
        "slower than the first by": first and f"{first.speed / published.speed - 1:.1%}",
    }


def described(candidate: Candidate) -> str:
    """A choice with its estimated memory and seconds."""
    return f"{', '.join(choice(candidate))}: {readable(candidate.memory)}, {candidate.step_seconds:.4g} s"


def compiled(results: Sequence[Result], published: Result) -> dict[str, Any]:
    """Ranks the published choice among compiled ones that fit, by predicted speed."""
    ranked = sorted((each for each in [*results, published] if each.fits), key=lambda each: -each.speed)
    fastest = {choice(each.candidate): each for each in reversed(ranked)}
    choices = sorted(fastest, key=lambda each: -fastest[each].speed)
    own = choice(published.candidate)
    return {
        "published": _verdict(published),
        "rank": choices.index(own) + 1 if own in choices else None,
        "choices that fit": len(choices),
        "compiled": len(results),
        "in the short list": own in {choice(each.candidate) for each in results},
        "first": [_verdict(fastest[each]) for each in choices[:5]],
    }


def _verdict(result: Result) -> str:
    if result.record["failed"]:
        return f"{', '.join(choice(result.candidate))}: failed, {result.record['failed'].splitlines()[0][:200]}"
    fits = "" if result.fits else ", does not fit"
    words = f"{', '.join(filter(None, (*choice(result.candidate), result.candidate.point.also_words)))}"
    return f"{words}: {readable(round(result.needed))}{fits}, {result.step_seconds:.4g} s"


def check(row: dict[str, Any], report: Path) -> dict[str, Any]:
    """Gives a row's command to src.train_compile, as a user would; returns its verdict beside the row's."""
    report.unlink(missing_ok=True)
    words = [sys.executable, *shlex.split(row["command"])[1:], f"compile_report={report}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3) or not report.exists():
        return {"exit code": done.returncode, "message": done.stderr.strip()[-500:]}
    memory = json.loads(report.read_text())["memory"]
    return {"fits": memory["fits"], "needed": memory["needed"], "planned": row["memory"], "exit code": done.returncode}


if __name__ == "__main__":
    run_command(main, may_exit=True)
