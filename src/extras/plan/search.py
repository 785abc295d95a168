"""Compiles the most promising candidates, and chooses the next ones by the results of the compiler."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from src.config.schema import Config
from src.extras.aot.hlo import Collective
from src.extras.aot.memory import SAVED
from src.extras.aot.report import readable
from src.extras.aot.roofline import Prediction
from src.extras.plan import host
from src.extras.plan.advice import advise
from src.extras.plan.compiling import Folder, Record, Running, kept, processes
from src.extras.plan.costing import NEAREST, Candidate, Costing
from src.extras.plan.points import Point, Space
from src.run.metrics import duration
from src.system.errors import counted

UNKNOWN_ERROR = 1.1  # before the first result, points are compiled whose estimate is up to this times the memory
QUIET_SECONDS = 60  # without a line, after which one says what is being compiled


class Result(NamedTuple):
    """A candidate, the record of its compilation, and the prediction from that."""

    candidate: Candidate
    record: Record
    prediction: Prediction | None  # from the compiled program's collectives; None without a program
    host_seconds: float  # waiting for copies to host memory and back

    @property
    def fits(self) -> bool:
        """Whether it compiled, and the compiled program needs no more memory than the devices have."""
        return not self.record["failed"] and self.record["memory"]["fits"]

    @property
    def needed(self) -> float:
        """Bytes of device memory; a lower bound if the compiler refused the size, infinite if it failed otherwise."""
        return math.inf if self.record["failed"] else self.record["memory"]["needed"]

    @property
    def step_seconds(self) -> float:
        """Predicted duration of a step, with `host_seconds`; infinite without a program."""
        return self.prediction.step_seconds + self.host_seconds if self.prediction else math.inf

    @property
    def speed(self) -> float:
        """Predicted tokens per second; 0 without a program."""
        return self.record.get("tokens", 0) / self.step_seconds


class Search:
    """Compiles `top` candidates, and up to as many more while one should be faster than the fastest that fits.

    It stops earlier if no other candidate should fit. `words(point)` are the words of a command line that resolve to
    the point's config, and `words(point, changes)` to that config with `changes`. Records are kept in `folder`.
    """

    def __init__(
        self, costing: Costing, space: Space, folder: Folder, words: Callable[..., list[str]], top: int
    ) -> None:
        self._costing, self._space, self._folder, self._words, self._top = costing, space, folder, words, top
        self.results: list[Result] = []
        self._left = list(costing.candidates)
        self._running: dict[Running, Candidate] = {}
        self._seconds: list[float] = []

    def run(self, say: Callable[[str], None]) -> None:
        """Fills `results` from kept records, then by compiling; passes lines about its progress to `say`.

        Ends its processes if it is interrupted.
        """
        for candidate in list(self._left):
            if record := kept(self._folder.file(self._config(candidate))):
                self._left.remove(candidate)
                self.results.append(self._result(candidate, record))
                self._seconds += record.get("seconds", {}).values()
        if self.results:
            say(f"{counted(len(self.results), 'point')} compiled before")
        spoken = time.monotonic()
        try:
            while self._start() or self._running:
                time.sleep(0.1)
                for running in list(self._running):
                    if (record := running.result()) is not None:
                        self._seconds.append(time.monotonic() - running.begun)
                        self.results.append(self._result(self._running.pop(running), record))
                        self._start()  # before the next line, which counts the running compilations
                        say(f"{self._progress()}: {self._verdict()}")
                        spoken = time.monotonic()
                if time.monotonic() - spoken >= QUIET_SECONDS:
                    say(f"{self._progress()}: still compiling {self._still_compiling()}")
                    spoken = time.monotonic()
        finally:
            for running in self._running:
                running.end()

    @property
    def progress_kept(self) -> str:
        """A line for the user: how many of the results the same command would find again."""
        if self._folder.temporary:
            return (
                "nothing is kept, because jax_cache_dir is empty, or your loss, batch_transform or eval_metrics "
                "may change: the same command starts again"
            )
        found = sum(kept(self._folder.file(self._config(each.candidate))) is not None for each in self.results)
        return f"{counted(found, 'point')} kept; the same command continues from there"

    def advice(self) -> Result:
        """Compiles changes to the candidate that needs the least memory, until one fits; returns its result.

        The result's record has the `changes` that reduce memory, as `advise` returns them. If the candidate failed to
        compile, nothing is tried, and its result is returned as it is.
        """
        nearest = min(self.results, key=lambda each: each.needed)
        if nearest.record["failed"]:
            return nearest
        config, memory, point = self._config(nearest.candidate), nearest.record["memory"], nearest.candidate.point

        def compiled(changed: Config, keys: Mapping[str, Any]) -> Any:
            return self._compiled(changed, self._words(point, keys)).get("memory")

        found = advise(config, self._space.topology, memory["needed"], memory["capacity"], compiled)
        return nearest._replace(record={**nearest.record, "changes": found})

    def _compiled(self, config: Config, words: list[str]) -> Record:
        if (record := kept(self._folder.file(config))) is None:
            running = self._folder.start(config, words)
            try:
                while (record := running.result()) is None:
                    time.sleep(0.1)
            finally:
                running.end()
        return record

    def _start(self) -> bool:
        """Starts as many compilations as there are processes for; returns whether it started any."""
        before = len(self._running)
        while len(self._running) < processes() and (candidate := self._next()):
            self._left.remove(candidate)
            self._running[self._folder.start(self._config(candidate), self._words(candidate.point))] = candidate
        return len(self._running) > before

    def _result(self, candidate: Candidate, record: Record) -> Result:
        if "collectives" not in record:
            return Result(candidate, record, None, 0.0)
        moved, on_host = [Collective(**each) for each in record["collectives"]], record["memory"]["host"]
        kept = on_host[SAVED] * candidate.point.batch["gradient_accumulation_steps"]
        waits = host.seconds(self._space.topology, on_host["optimizer"], kept)
        return Result(candidate, record, candidate.costs._replace(moved=moved).predict(self._space.constants), waits)

    def _config(self, candidate: Candidate) -> Config:
        return self._space.config.replace(**candidate.point.keys)

    def _next(self) -> Candidate | None:
        """Chooses the candidate to compile next, None if none should start now.

        That is the fastest that should fit, by estimates that results so far correct. The first half of `top` are of
        different kinds of mesh, because errors of estimates are similar within a kind. Beyond `top`, it must also be
        faster than the fastest that fits, if any does. If none should fit, and none does, the smallest ones are chosen
        until NEAREST have been tried.
        """
        tried = [*(each.candidate for each in self.results), *self._running.values()]
        best = max((each.speed for each in self.results if each.fits), default=0.0)
        if len(tried) >= 2 * self._top or not self._left:
            return None
        limit = self._costing.capacity * (1.0 if self.results else UNKNOWN_ERROR)
        fitting = [each for each in self._left if self._memory(each) <= limit and not self._saves_in_vain(each, tried)]
        if not fitting:
            done = best or self._running or len(tried) >= NEAREST
            return None if done else min(self._left, key=self._memory)
        if len(tried) >= self._top and best:
            fastest = max(fitting, key=self._speed)
            return fastest if self._speed(fastest) > best else None
        kinds = {each.point.kind for each in tried}
        if len(tried) < self._top / 2 and (others := [each for each in fitting if each.point.kind not in kinds]):
            return max(others, key=self._speed)
        return max(fitting, key=self._speed)

    def _saves_in_vain(self, candidate: Candidate, tried: list[Candidate]) -> bool:
        """Whether the same step was tried with another placement, and is not known to be too large for the devices.

        Placements only save memory, so the candidate is then not worth compiling. A step that failed to compile, such
        as for arrays that exceed host memory, is assumed to fail with any placement.
        """
        too_large = [each.candidate for each in self.results if not each.fits and not each.record["failed"]]
        return any(each.point[:-1] == candidate.point[:-1] and each not in too_large for each in tried)

    def _memory(self, candidate: Candidate) -> float:
        known = [each for each in self.results if not each.record["failed"]]
        return candidate.memory * _ratio(candidate, known, lambda each: each.needed / each.candidate.memory)

    def _speed(self, candidate: Candidate) -> float:
        known = [each for each in self.results if each.speed]
        return candidate.speed * _ratio(candidate, known, lambda each: each.speed / each.candidate.speed)

    def _progress(self) -> str:
        done = len(self.results)
        count = max(self._top, done + len(self._running))
        if not self._seconds:
            return f"compiled {done} of {count}"
        # A refusal takes seconds, another compilation minutes. The first to finish are the short ones, so their mean
        # would be too short: count the time of the running ones too.
        spent = sum(self._seconds) + sum(time.monotonic() - running.begun for running in self._running)
        left = (count - done) * spent / len(self._seconds) / processes()
        return f"compiled {done} of {count}, about {duration(left)} left"

    def _verdict(self) -> str:
        result = self.results[-1]
        if result.record["failed"]:
            verdict = f"failed: {result.record['failed'].splitlines()[0][:100]}"
        else:
            speed = f", {result.speed:,.0f} tokens/s" if result.fits else ", does not fit"
            verdict = f"{readable(result.record['memory']['needed'])} of {readable(self._costing.capacity)}{speed}"
        return f"{result.candidate.point.words}: {verdict}"

    def _still_compiling(self) -> str:
        now = time.monotonic()
        return " and ".join(
            f"{candidate.point.words} (for {duration(now - running.begun)})"
            for running, candidate in self._running.items()
        )


def _ratio(candidate: Candidate, known: list[Result], ratio: Callable[[Result], float]) -> float:
    """Median ratio of found to estimated values for the compiled points most like the candidate; 1 if none is known."""
    for traits in _traits(candidate.point):
        if ratios := [ratio(each) for each in known if traits in _traits(each.candidate.point)]:
            return statistics.median(ratios)
    return 1.0


def _traits(point: Point) -> list[tuple[Any, ...]]:
    """Lists traits of a point, the most specific first: if two points share one, their estimates should err alike."""
    # Gradients are reduced in another way if there are several micro-batches, or a sharded optimizer.
    how = sorted(point.variant.items()), point.batch["gradient_accumulation_steps"] > 1
    return [(point.mesh, point.policy, *how), (point.kind, *how), how, (point.kind,), ()]
