"""Tests what a search leaves out: `python scripts/evidence/plan_pruned.py REPORT.json [--points N] [--seed S]`.

REPORT.json is a report of src.plan. Chooses N random points among those that the search left out by its estimates, and
prints whether any fits and is predicted over 5% faster than the first row. Points that the model, the mesh or the batch
refuse are replaced, because they cannot be compiled. Collectives only add to a step. So a point needs no program if its
compute and memory traffic already take longer; the others are compiled. `--above PART` compiles those that might reach
this part of the first row's speed, 0 all.
"""

import argparse
import json
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
from src.extras.aot.report import readable
from src.extras.plan.command import read
from src.extras.plan.compiling import Folder
from src.extras.plan.costing import Candidate, Costing, cost
from src.extras.plan.points import Point, Space
from src.extras.plan.search import Search
from src.system.errors import UserError
from src.system.exit_codes import run_command

FASTER = 1.05  # times the first row's speed


def main(argv: Sequence[str]) -> None:
    """Prints a line for each of the points, and how many would have been better."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--above", type=float, default=FASTER)
    arguments = parser.parse_args(argv)
    report = json.loads(arguments.report.read_text())
    first, (space, request, _) = report["rows"][0], read(shlex.split(report["plan"]["config"]))
    costing, folder = cost(space), Folder.of(space.config, space.topology)
    if (points := report["plan"]["points"]) != costing.points:
        raise UserError(f"{arguments.report}: its search had {points:,} points, but its config has {costing.points:,}")
    speed, better, compiled = first["tokens_per_second"], 0, 0
    print(f"first row: {first['mesh']}, {first['policy']}, batch {first['batch']}")
    for number, candidate in enumerate(random_points(space, costing, arguments.points, arguments.seed), 1):
        words_of = candidate.point.words
        # The fastest that its program can be: without communication and copies to the host.
        alone = candidate.costs._replace(moved=[]).predict(space.constants).step_seconds
        bound = candidate.costs.tokens_per_step / alone / speed
        if bound <= min(arguments.above, FASTER):
            print(f"{number}: {words_of}: at most {bound:.0%} of the first row's speed, if nothing were communicated")
            continue
        search = Search(replace(costing, candidates=[candidate]), space, folder, request.command_words, 1)
        search.run(lambda line: None)
        result, compiled = search.results[0], compiled + 1
        better += result.fits and result.speed > FASTER * speed
        memory = result.record["failed"] or f"{readable(result.needed)}, {'fits' if result.fits else 'does not fit'}"
        print(
            f"{number}: {words_of}: compiled, {memory}, {result.speed / speed:.0%} of the first row's speed", flush=True
        )
    print(f"{compiled} of {arguments.points} compiled; {better} fit and are over 5% faster than the first row")


def random_points(space: Space, costing: Costing, count: int, seed: int) -> Iterator[Candidate]:
    """Yields pruned points of a space in random order, with their costs; prints how many the checks refused."""
    kept = {identity(each.point) for each in costing.candidates}
    refused = 0
    points = list(space.points())
    random.Random(seed).shuffle(points)
    for point in points:
        if identity(point) in kept:
            continue
        config = space.config.replace(**point.keys)
        try:
            [candidate] = cost(Space(config, space.topology, point.keys, space.rows)).candidates
        except UserError:
            refused += 1
            continue
        yield candidate._replace(point=point)
        count -= 1
        if not count:
            break
    print(f"seed {seed}: {refused} points that are refused were replaced")


def identity(point: Point) -> str:
    """A string that only points with the same keys share."""
    return json.dumps(point.keys, sort_keys=True)


if __name__ == "__main__":
    run_command(main, may_exit=True)
