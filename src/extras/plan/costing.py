"""Costs a space's points by estimates, and leaves out those that should not fit or not be among the fastest."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from src.extras.aot.report import device_capacity, host_capacity
from src.extras.aot.roofline import Prediction
from src.extras.plan import host
from src.extras.plan.estimate import Costs, step_costs
from src.extras.plan.placed import place
from src.extras.plan.points import SIZES, Keys, Point, Space
from src.run.metrics import duration
from src.system.errors import UserError

COMFORTABLE = 0.8  # of the memory: no run whose estimate is below it should run out
MISSES = 1.25  # times the memory: a point whose estimate is above it should not fit
SLOWER = 0.85  # times the speed of the fastest point that should fit: slower points are left out
PASSES = ("per_device_batch_size", "gradient_accumulation_steps")
NEAREST = 3  # points to compile if none should fit
QUIET_SECONDS = 20  # after which a line says how far the costing is


class Candidate(NamedTuple):
    """A point and its estimated costs."""

    point: Point
    costs: Costs
    prediction: Prediction
    host_seconds: float  # waiting for copies to host memory and back

    @property
    def step_seconds(self) -> float:
        """Estimated duration of a step, with `host_seconds`."""
        return self.prediction.step_seconds + self.host_seconds

    @property
    def speed(self) -> float:
        """Estimated tokens per second, of all devices."""
        return self.costs.tokens_per_step / self.step_seconds

    @property
    def memory(self) -> int:
        """Estimated bytes of a device's own memory."""
        return self.costs.memory.total

    @property
    def on_host(self) -> int:
        """Estimated bytes in host memory per device."""
        return self.costs.memory.all_on_host


class Group(NamedTuple):
    """Points left out for one reason."""

    points: int
    best: Candidate  # the one that comes nearest, by BEST


BEST: dict[str, Callable[[Candidate], float]] = {
    "too_large": lambda each: -each.memory,
    "too_large_on_host": lambda each: -each.on_host,
    "too_slow": lambda each: each.speed,
}


@dataclass
class Costing:
    """The candidates to compile, and why the other points were left out.

    The fastest candidate is first or, if none should fit, the one that comes nearest.
    """

    capacity: int  # bytes per device
    on_host: float  # bytes of host memory that a device may use
    candidates: list[Candidate] = field(default_factory=list)
    points: int = 0
    costed: int = 0
    too_large: dict[str, Group] = field(default_factory=dict)  # by remat policy, or "whole meshes"
    too_large_on_host: dict[str, Group] = field(default_factory=dict)  # by remat policy
    too_slow: dict[str, Group] = field(default_factory=dict)  # by the resource that takes the most time
    no_gain: int = 0  # points passed over: a faster one with their mesh and policy should fit easily, or is too slow
    refused: dict[str, int] = field(default_factory=dict)  # reason -> number of meshes

    def omit(self, why: str, name: str, points: int, example: Candidate) -> None:
        """Adds `points` to the group `name` of the field `why`; the group keeps the best `example`, by BEST."""
        groups: dict[str, Group] = getattr(self, why)
        count, best = groups.get(name, Group(0, example))
        groups[name] = Group(count + points, max(best, example, key=BEST[why]))


class OnMesh:
    """Costs points of one mesh and variant, each once.

    The constructor and the methods raise UserError if the model, kernel or batch do not suit them.
    """

    def __init__(self, space: Space, mesh: Keys, variant: Keys) -> None:
        self._space, self._mesh, self._variant = space, mesh, variant
        self._placed = place(space.config.replace(**mesh, **variant), space.topology)
        self._policies, self._placements = list(space.policies()), list(space.placements(mesh))
        self._batches = list(space.batches(mesh, variant))
        self.known: dict[str, Candidate] = {}
        # A bound: no other point of this mesh and variant should be faster.
        self.fastest = self._cost(self._policies[0], self._batches[0], self._placements[0])

    @property
    def points(self) -> int:
        """Number of points of this mesh and variant, costed or not."""
        return len(self._policies) * len(self._batches) * len(self._placements)

    def smallest(self) -> Candidate:
        """Returns the point that should need the least memory: most micro-batches, full remat or custom offloading.

        If these policies are not allowed, all are compared.
        """
        policies = [
            each
            for each in self._policies
            if each["remat_policy"] == "full" or "offload" in each["remat_custom"].values()
        ]
        last = self._batches[-1], self._placements[-1]
        return min((self._cost(each, *last) for each in policies or self._policies), key=lambda each: each.memory)

    def walk(self, enough: float, enough_on_host: float, slowest: float) -> Iterator[Candidate]:
        """Yields, policy by policy, the points that are worth costing, from fast ones to ones that need less memory.

        After a point that needs at most `enough` bytes per device and `enough_on_host` in host memory, or makes fewer
        than `slowest` tokens per second, others would be slower and save memory in vain: the rest of its batch's
        placements are skipped and, if it has the batch's first placement, the rest of its policy's batches.
        """

        def suffices(candidate: Candidate) -> bool:
            fits = candidate.memory <= enough and candidate.on_host <= enough_on_host
            return fits or candidate.speed < slowest

        for policy in self._policies:
            for batch in self._batches:
                found = list[Candidate]()
                for placement in self._placements:
                    found.append(self._cost(policy, batch, placement))
                    if suffices(found[-1]):
                        break
                yield from found
                if suffices(found[0]):
                    break

    def _cost(self, policy: Keys, batch: Keys, placement: Keys) -> Candidate:
        point, space = Point(self._mesh, self._variant, policy, batch, placement), self._space
        if (name := repr(point[2:])) not in self.known:
            config = space.config.replace(**point.keys)
            costs = step_costs(config, space.topology, self._placed)
            saved = costs.memory.saved_on_host * config.step.gradient_accumulation_steps
            waits = host.seconds(space.topology, costs.memory.on_host, saved)
            self.known[name] = Candidate(point, costs, costs.predict(space.constants), waits)
        return self.known[name]


def cost(space: Space, say: Callable[[str], None] = lambda line: None) -> Costing:
    """Costs points, the most promising meshes first, until no other can be among the fastest.

    With a given mesh and variant, the fastest point saves all arrays and has the fewest micro-batches. The one that
    needs the least memory recomputes or offloads the most and has the most micro-batches. A mesh is left out if its
    fastest point is too slow or its smallest one too large. For each policy, fewer micro-batches come first, and
    changes that only save memory last: after a point that should fit easily, or is too slow, the others would only be
    slower. If no point should fit, the smallest ones are the candidates. Passes lines about its progress to `say`.
    Raises UserError if no mesh suits the devices, the typed keys, the model and the batch; also as `device_capacity`
    and `host_capacity` do.
    """
    capacity, on_host = device_capacity(space.topology), host_capacity(space.topology)
    assert capacity
    costing, bounds, smallest = Costing(capacity, on_host), list[OnMesh](), list[Candidate]()
    meshes = list(space.meshes())
    for mesh in _counted(meshes, lambda: len(meshes), "meshes", say):
        variants = [variant for variant in space.variants(mesh) if any(space.batches(mesh, variant))]
        why = "" if variants else space.batch_problem(mesh, next(space.variants(mesh)))
        try:
            bounds += [OnMesh(space, mesh, variant) for variant in variants]
        except UserError as error:
            why = str(error)
        if why:
            costing.refused[why] = costing.refused.get(why, 0) + 1
    if not bounds:
        why = max(costing.refused, key=costing.refused.__getitem__)
        typed = [f"{key}={space.config[key]}" for key in (*sorted(SIZES), *PASSES) if key in space.fixed]
        given = f" and {' '.join(typed)}" if typed else ""
        raise UserError(f"no mesh of {space.topology.num_devices} devices suits this model, this batch{given}: {why}")
    best, found = 0.0, list[Candidate]()
    bounds.sort(key=lambda each: -each.fastest.speed)

    def promising() -> int:
        return sum(each.fastest.speed >= SLOWER * best for each in bounds)

    for on_mesh in _counted(bounds, promising, "promising meshes' points", say):
        costing.points += on_mesh.points
        if on_mesh.fastest.speed < SLOWER * best:
            costing.omit("too_slow", on_mesh.fastest.prediction.bound, on_mesh.points, on_mesh.fastest)
            continue
        least = on_mesh.smallest()
        if least.memory > MISSES * capacity:
            costing.omit("too_large", "whole meshes", on_mesh.points, least)
            smallest.append(least)
            continue
        walked = list(on_mesh.walk(COMFORTABLE * capacity, on_host, SLOWER * best))
        best = max([best, *(each.speed for each in walked if each.memory <= capacity and each.on_host <= on_host)])
        costing.no_gain += on_mesh.points - len(walked)
        found += walked
    costing.costed = sum(len(on_mesh.known) for on_mesh in bounds)
    for each in found:
        if each.memory > MISSES * capacity:
            costing.omit("too_large", each.point.policy_name, 1, each)
        elif each.on_host > on_host:
            costing.omit("too_large_on_host", each.point.policy_name, 1, each)
        elif each.speed < SLOWER * best:
            costing.omit("too_slow", each.prediction.bound, 1, each)
        else:
            costing.candidates.append(each)
    costing.candidates.sort(key=lambda each: -each.speed)
    if not costing.candidates:  # the estimates may be wrong
        nearest = sorted(smallest or found, key=lambda each: (max(each.on_host - on_host, 0), each.memory))
        costing.candidates = nearest[:NEAREST]
    return costing


def _counted(items: Sequence[Any], count: Callable[[], int], name: str, say: Callable[[str], None]) -> Iterator[Any]:
    """Yields the items; passes lines to `say` about how many of the first `count()` are done, and the time left."""
    begun = spoken = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done == 1:  # the first item took longer, because it traced the blocks: leave it out of the time per item
            begun = now
        if done and now - spoken >= QUIET_SECONDS:
            left = f", about {duration((now - begun) / (done - 1) * max(count() - done, 0))} left" if done > 1 else ""
            say(f"costing     {name}: {done:,} of {count():,}{left}")
            spoken = now
        yield item
