"""Costs a space's points by estimates, and leaves out those that can't fit or can't be among the fastest."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from src.extras.aot.report import device_capacity
from src.extras.aot.roofline import Prediction
from src.extras.plan import host
from src.extras.plan.estimate import Costs, step_costs
from src.extras.plan.placed import Placed, place
from src.extras.plan.points import SIZES, Keys, Point, Space
from src.system.errors import UserError

COMFORTABLE = 0.8  # of the memory: no run whose estimate is below it should run out
MISSES = 1.25  # times the memory: a point whose estimate is above it should not fit
SLOWER = 0.85  # times the speed of the fastest point that should fit: slower points are left out
PASSES = ("per_device_batch_size", "gradient_accumulation_steps")
NEAREST = 3  # points to compile if none should fit


class Candidate(NamedTuple):
    """A costed point."""

    point: Point
    costs: Costs
    prediction: Prediction
    host_seconds: float  # waiting for copies to host memory and back
    placed: Placed  # the same for all points of a mesh and variant

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return self.prediction.step_seconds + self.host_seconds

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.costs.tokens_per_step / self.step_seconds

    @property
    def memory(self) -> int:
        """Bytes per device."""
        return self.costs.memory.total


class Group(NamedTuple):
    """Points left out for one reason."""

    points: int
    best: Candidate  # the smallest of those that are too large, the fastest of those that are too slow


@dataclass
class Costing:
    """The candidates to compile, the fastest first, and why the other points were left out."""

    capacity: int  # bytes per device
    candidates: list[Candidate] = field(default_factory=list)
    points: int = 0
    costed: int = 0
    too_large: dict[str, Group] = field(default_factory=dict)  # by remat policy
    too_slow: dict[str, Group] = field(default_factory=dict)  # by the resource that takes the most time
    no_gain: int = 0  # points after one of the same mesh and policy that is faster and should fit easily
    refused: dict[str, int] = field(default_factory=dict)  # why: meshes

    def omit_large(self, policy: str, points: int, example: Candidate) -> None:
        """Counts points that are too large, `example` the smallest of them."""
        count, best = self.too_large.get(policy, Group(0, example))
        self.too_large[policy] = Group(count + points, min(best, example, key=lambda each: each.memory))

    def omit_slow(self, points: int, example: Candidate) -> None:
        """Counts points that are too slow, `example` the fastest of them."""
        bound = example.prediction.bound
        count, best = self.too_slow.get(bound, Group(0, example))
        self.too_slow[bound] = Group(count + points, max(best, example, key=lambda each: each.speed))


def cost(space: Space) -> Costing:
    """Costs points, the most promising first, until no other can be among the fastest.

    With a mesh and variant no point is faster than with all arrays saved, in as few micro-batches as possible, and none
    needs less memory than with as much as possible recomputed or in host memory, in as many as possible. For each
    policy, fewer micro-batches come first, and changes that only save memory last: after a point that should fit
    easily, or one that is too slow, the others would only be slower. Raises UserError if no mesh suits model and batch.
    """
    capacity = device_capacity(space.topology)
    assert capacity
    costing, bounds, smallest = Costing(capacity), list[Candidate](), list[Candidate]()
    for mesh in space.meshes():
        try:
            fastest = [_costed(space, costing, point, _placed(space, point)) for point in _fastest(space, mesh)]
            why = "" if fastest else space.batch_problem(mesh, next(space.variants(mesh)))
        except UserError as error:
            fastest, why = [], str(error)
        bounds += fastest
        costing.points += sum(_count(space, each.point) for each in fastest)
        if why:
            costing.refused[why] = costing.refused.get(why, 0) + 1
    if not bounds:
        why = max(costing.refused, key=costing.refused.__getitem__)
        typed = [f"{key}={space.config[key]}" for key in (*sorted(SIZES), *PASSES) if key in space.fixed]
        given = f" and {' '.join(typed)}" if typed else ""
        raise UserError(f"no mesh of {space.topology.num_devices} devices suits this model, this batch{given}: {why}")
    best, found = 0.0, list[Candidate]()
    for fastest in sorted(bounds, key=lambda each: -each.speed):
        points = _count(space, fastest.point)
        if fastest.speed < SLOWER * best:
            costing.omit_slow(points, fastest)
            continue
        small = (_costed(space, costing, point, fastest.placed) for point in _smallest(space, fastest.point))
        least = min(small, key=lambda each: each.memory)
        if least.memory > MISSES * capacity:
            costing.omit_large("whole meshes", points, least)
            smallest.append(least)
            continue
        walked = list(_walk(space, costing, fastest, SLOWER * best))
        best = max([best, *(each.speed for each in walked if each.memory <= capacity)])
        costing.no_gain += points - len(walked)
        found += walked
    for each in found:
        if each.memory > MISSES * capacity:
            costing.omit_large(each.point.policy_name, 1, each)
        elif each.speed < SLOWER * best:
            costing.omit_slow(1, each)
        else:
            costing.candidates.append(each)
    costing.candidates.sort(key=lambda each: -each.speed)
    if not costing.candidates:  # the estimates may be wrong
        costing.candidates = sorted(smallest, key=lambda each: each.memory)[:NEAREST]
    return costing


def _count(space: Space, of: Point) -> int:
    """Counts the points with this point's mesh and variant."""
    parts = space.policies(), space.batches(of.mesh, of.variant), space.placements(of.mesh)
    return sum(1 for _ in itertools.product(*parts))


def _placed(space: Space, point: Point) -> Placed:
    return place(space.config.replace(**point.mesh, **point.variant), space.topology)


def _costed(space: Space, costing: Costing, point: Point, placed: Placed) -> Candidate:
    costing.costed += 1
    config = space.config.replace(**point.keys)
    costs = step_costs(config, space.topology, placed)
    waits = host.estimated_seconds(config, space.topology, costs, placed)
    return Candidate(point, costs, costs.predict(space.constants), waits, placed)


def _fastest(space: Space, mesh: Keys) -> Iterator[Point]:
    """Yields, for each variant of a mesh, the point that no other is faster than."""
    policy, placement = next(space.policies()), next(space.placements(mesh))
    for variant in space.variants(mesh):
        for batch in itertools.islice(space.batches(mesh, variant), 1):
            yield Point(mesh, variant, policy, batch, placement)


def _smallest(space: Space, of: Point) -> Iterator[Point]:
    """Yields points with this point's mesh and variant, one of which needs the least memory."""
    *_, batch = space.batches(of.mesh, of.variant)
    *_, placement = space.placements(of.mesh)
    policies = list(space.policies())
    least = [each for each in policies if each["remat_policy"] == "full" or "offload" in each["remat_custom"].values()]
    for policy in least or policies:
        yield of._replace(policy=policy, batch=batch, placement=placement)


def _walk(space: Space, costing: Costing, fastest: Candidate, slowest: float) -> Iterator[Candidate]:
    """Yields points with this candidate's mesh and variant that are worth costing."""
    of = fastest.point

    def suffices(candidate: Candidate) -> bool:
        return candidate.memory <= COMFORTABLE * costing.capacity or candidate.speed < slowest

    for policy in space.policies():
        for batch in space.batches(of.mesh, of.variant):
            found = list[Candidate]()
            for placement in space.placements(of.mesh):
                point = of._replace(policy=policy, batch=batch, placement=placement)
                found.append(_costed(space, costing, point, fastest.placed))
                if suffices(found[-1]):
                    break
            yield from found
            if suffices(found[0]):
                break
