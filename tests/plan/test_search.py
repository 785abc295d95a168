"""Which candidates are compiled, what an interrupted search keeps, and that its command lines mean its points."""

import dataclasses
import json
import random

import pytest

from src.config.load import diff_from_base
from src.extras.aot.hlo import Collective
from src.extras.aot.memory import SAVED
from src.extras.aot.topology import parse_topology
from src.extras.plan import advice, compiling, output, search
from src.extras.plan.costing import cost
from src.extras.plan.points import Space
from src.parallel.chips import GPU_HOSTS
from src.run import resolve_config
from src.system.disk import new_file
from tests.tiny import load

CPUS = parse_topology("cpu-8", 1)._replace(chip=GPU_HOSTS["a3"])


class Done:
    """A compilation that is finished as soon as it is asked for."""

    begun = 0.0

    def __init__(self, file):
        self.file = file

    def result(self):
        return compiling.kept(self.file)

    def end(self):
        pass


class Compiler:
    """Stands for a folder and the compiler: a step's memory and duration are its estimate's, times what a test says."""

    def __init__(self, path, space, costs, memory=lambda candidate: 1.0, duration=lambda candidate: 1.0):
        self.path, self.space, self.costs, self.memory, self.duration = path, space, costs, memory, duration
        self.folder = compiling.Folder.of(space.config.replace(jax_cache_dir=str(path)), space.topology)
        self.started = []

    def file(self, config):
        return self.folder.file(config)

    def start(self, config, words):
        candidate = next(
            each for each in self.costs.candidates if self.space.config.replace(**each.point.keys) == config
        )
        self.started.append(candidate)
        needed = round(candidate.memory * self.memory(candidate))
        seconds = candidate.prediction.step_seconds * self.duration(candidate)
        record = {
            "failed": "",
            "tokens": candidate.costs.tokens_per_step,
            "memory": {
                "needed": needed,
                "capacity": self.costs.capacity,
                "left": self.costs.capacity - needed,
                "fits": needed <= self.costs.capacity,
                "host": {"optimizer": 0, SAVED: 0},
            },
            "step_seconds": seconds,
            "compiler_message": "",
        }
        with new_file(self.file(config)) as file:
            file.write(json.dumps(record).encode())
        return Done(self.file(config))


class Told(search.Search):
    """Takes a step's duration from the record."""

    def _result(self, candidate, record):
        prediction = candidate.prediction._replace(step_seconds=record["step_seconds"])
        return search.Result(candidate, record, prediction, 0.0)


@pytest.fixture(scope="module")
def found():
    space = Space(load(), CPUS, ("ici_pipeline_parallelism",), 16)
    return space, cost(space)


def searched(found, compiler, top, say=lambda line: None):
    space, costs = found
    result = Told(costs, space, compiler, lambda point: [], top)
    result.run(say)
    return result.results


def test_the_first_half_has_a_candidate_of_each_kind_of_mesh(found, tmp_path):
    compiler = Compiler(tmp_path, *found)
    results = searched(found, compiler, 8)
    assert len(results) >= 8
    assert len({candidate.point.kind for candidate in compiler.started[:4]}) == 4
    fastest = max(found[1].candidates, key=lambda each: each.speed)
    assert max(results, key=lambda each: each.speed).candidate.speed == fastest.speed


def test_a_kind_of_mesh_that_is_slower_than_estimated_is_left(found, tmp_path):
    estimated = max(found[1].candidates, key=lambda each: each.speed)

    def duration(candidate):
        return 3.0 if candidate.point.kind == estimated.point.kind else 1.0

    truth = max(found[1].candidates, key=lambda each: each.speed / duration(each))
    assert truth.point.kind != estimated.point.kind
    results = searched(found, Compiler(tmp_path, *found, duration=duration), 8)
    best = max(results, key=lambda each: each.speed)
    assert best.speed == pytest.approx(truth.speed)


def test_an_interrupted_search_continues_with_what_is_compiled(found, tmp_path):
    lines = []

    def interrupt(line):
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    first = Compiler(tmp_path, *found)
    with pytest.raises(KeyboardInterrupt):
        searched(found, first, 6, interrupt)
    kept = [candidate.point for candidate in first.started]
    said, second = [], Compiler(tmp_path, *found)
    results = searched(found, second, 6, said.append)
    assert said[0] == f"{len(kept)} points compiled before"
    assert not any(candidate.point in kept for candidate in second.started)
    assert {id(each.candidate) for each in results} >= {id(candidate) for candidate in second.started}
    assert len(results) == len(kept) + len(second.started) >= 6
    third = Compiler(tmp_path, *found)
    assert len(searched(found, third, 6)) == len(results)
    assert not third.started


def test_an_interrupt_ends_what_still_compiles(found, tmp_path, monkeypatch):
    ended = []

    class Endless(Done):
        def result(self):
            return None

        def end(self):
            ended.append(self.file)

    def interrupt(seconds):
        raise KeyboardInterrupt

    compiler = Compiler(tmp_path, *found)
    monkeypatch.setattr(compiler, "start", lambda config, words: Endless(compiler.file(config)))
    monkeypatch.setattr(search, "processes", lambda: 2)
    monkeypatch.setattr(search.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        searched(found, compiler, 6)
    assert len(ended) == 2


def test_lines_count_what_still_compiles(found, tmp_path, monkeypatch):
    """The first compilation takes a second, as a refusal does, the others 300 seconds, by a clock of the test's own."""
    now = [1000.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(search.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(search, "processes", lambda: 2)

    class Takes(Done):
        def result(self):
            return super().result() if now[0] >= self.end_at else None

    compiler = Compiler(tmp_path, *found)

    def start(config, words):
        done = Takes(Compiler.start(compiler, config, words).file)
        done.begun, done.end_at = now[0], now[0] + (1 if len(compiler.started) == 1 else 300)
        return done

    monkeypatch.setattr(compiler, "start", start)
    lines = []
    searched(found, compiler, 4, lines.append)
    points = [candidate.point.words for candidate in compiler.started]
    assert lines[0].startswith(f"compiled 1 of 4, about 0:03 left: {points[0]}: ")
    assert lines[1] == (  # 122 seconds and one result, three compilations left, two at a time
        f"compiled 1 of 4, about 3:03 left: still compiling {points[1]} (for 1:01) and {points[2]} (for 1:00)"
    )
    assert [line.partition(" left: ")[0] for line in lines[2:5]] == [
        f"compiled 1 of 4, about {left}" for left in ("6:03", "9:03", "12:03")
    ]
    assert lines[5].startswith(f"compiled 2 of 4, about 5:00 left: {points[1]}: ")
    for candidate in compiler.started:
        file = compiler.file(found[0].config.replace(**candidate.point.keys))
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": {"compiling": 100.0}}))
    monkeypatch.setattr(search, "QUIET_SECONDS", 20)
    count, lines = len(compiler.started), []
    searched(found, compiler, 8, lines.append)
    assert lines[0] == f"{count} points compiled before"
    expected = round((8 - count) * (100 * count + 2 * 20) / count / 2)  # seconds, two compilations begun 20 seconds ago
    assert lines[1].startswith(f"compiled {count} of 8, about {search.duration(expected)} left: still compiling ")


def test_no_line_says_that_nothing_is_left_while_more_follows(found, tmp_path, monkeypatch):
    """The first point just misses, so another follows though only one was asked for."""
    monkeypatch.setattr(search, "processes", lambda: 1)
    compiler = Compiler(tmp_path, *found)
    first = max(found[1].candidates, key=lambda each: each.speed)
    scale = 1.01 * found[1].capacity / first.memory
    compiler.memory = lambda candidate: scale if len(compiler.started) == 1 else 0.5
    lines = []
    searched(found, compiler, 1, lines.append)
    assert lines[0].startswith("compiled 1 of 2, ")
    assert len(lines) == len(compiler.started) == 2
    assert lines[1].startswith("compiled 2 of 2, about 0:00 left: ")


@pytest.mark.parametrize("failed", ["", "arrays in host memory need 208.00 GiB"])
def test_another_placement_is_tried_only_if_it_saves_memory_that_is_lacking(found, tmp_path, failed):
    first = found[1].candidates[0]
    again = first._replace(point=first.point._replace(placement={"num_vocab_tiling": 8}))
    tried = search.Search(found[1], found[0], Compiler(tmp_path, *found), lambda point: [], 1)
    assert not tried._saves_in_vain(again, [])
    tried.results = [search.Result(first, {"failed": failed, "memory": {"fits": False}}, None, 0.0)]
    assert tried._saves_in_vain(again, [first]) == bool(failed)


def test_a_prediction_has_the_programs_own_collectives_and_copies(found, tmp_path):
    candidate = found[1].candidates[0]
    moved = Collective("all-gather", ("fsdp",), "ici", times=3, whole_bytes=8, sent_bytes=450 * 10**6)
    memory = {"host": {"optimizer": 32 * 10**6, SAVED: 64 * 10**6}}
    record = {"failed": "", "collectives": [dataclasses.asdict(moved)], "memory": memory, "tokens": 9}
    compiler = Compiler(tmp_path, *found)
    result = search.Search(found[1], found[0], compiler, lambda point: [], 2)._result(candidate, record)
    assert result.prediction.ici_seconds == pytest.approx(3 * 450e6 / 450e9)
    assert result.prediction.compute_seconds == candidate.prediction.compute_seconds
    passes = candidate.point.batch["gradient_accumulation_steps"]
    assert result.host_seconds == pytest.approx(2 * 32e6 / 64e9 + passes * 64e6 / 64e9)
    assert result.speed == pytest.approx(9 / (result.prediction.step_seconds + result.host_seconds))


def test_a_record_belongs_to_one_program_and_its_surroundings(tmp_path, monkeypatch):
    config = load(jax_cache_dir=tmp_path)
    file = compiling.Folder.of(config, CPUS).file(config)
    assert file == compiling.Folder.of(config, CPUS).file(config.replace(learning_rate=0.5, log_period=7))
    assert file != compiling.Folder.of(config, CPUS).file(config.replace(remat_policy="full"))
    assert file != compiling.Folder.of(config, CPUS._replace(slices=2)).file(config)
    more = {compiling.Folder.of(config, CPUS).file(config.replace(compile_topology_num_slices=n)) for n in (1, 4, 8)}
    assert file in more
    assert len(more) == 3  # advice compiles a step for several numbers of slices
    assert file != compiling.Folder.of(config.replace(compile_xla_flags="--xla_a=1"), CPUS).file(config)
    for name, value in (
        ("XLA_FLAGS", "--xla_dump_to=/tmp/x"),
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "512"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert file != compiling.Folder.of(config, CPUS).file(config), name


def test_half_written_records_are_compiled_again(tmp_path):
    (tmp_path / "a.json").write_text('{"failed": "", "mem')
    assert compiling.kept(tmp_path / "a.json") is None


@pytest.mark.parametrize(
    "words",
    [
        ["configs/base.yml", "model_name=llama2-7b", "compile_topology=a3", "compile_topology_num_slices=4"],
        ["configs/recipes/maxtext-32b-v5e-256.yml", "compile_topology=v5e-256"],  # has a custom policy
        ["configs/recipes/pax-gpt3-xl-pipeline-v4-128.yml", "compile_topology=v4-128"],  # has stages
        ["configs/recipes/mixtral-8x7b-v5p-256.yml", "compile_topology=v5p-256", "steps=3"],
    ],
)
def test_command_lines_resolve_to_their_points(words):
    config = resolve_config.load(words)
    topology = parse_topology(config.aot.compile_topology, config.aot.compile_topology_num_slices)
    rows = round(config.batch.per_device_batch_size * topology.num_devices * config.step.gradient_accumulation_steps)
    space = Space(config, topology, ["compile_topology"], rows)
    request = output.Request(config, words, topology)
    meshes = list(space.meshes())
    generator = random.Random(7)
    for mesh in generator.sample(meshes, 12):
        points = list(of_mesh(space, mesh))
        for point in generator.sample(points, min(len(points), 2)):
            resolved = resolve_config.load(request.command_words(point), command="src.train_compile")
            assert diff_from_base(resolved) == diff_from_base(config.replace(**point.keys))


def of_mesh(space, mesh):
    alone = Space(space.config, space.topology, (), space.rows)
    alone.meshes = lambda: [mesh]
    return alone.points()


def test_what_a_run_costs_follows_from_its_tokens(found, tmp_path):
    results = searched(found, Compiler(tmp_path, *found), 4)
    request = output.Request(found[0].config, ["a.yml"], CPUS, train_tokens=1e9, price=2.0)
    first = output.rows(results, request)[0]
    hours = 1e9 / first.tokens_per_second / 3600
    assert first.days == pytest.approx(hours / 24)
    assert (first.device_hours, first.price) == (pytest.approx(8 * hours), pytest.approx(16 * hours))
    assert output.rows(results, request._replace(train_tokens=0.0))[0].days is None


def test_if_nothing_fits_the_nearest_is_reported(found, tmp_path):
    capacity = found[1].capacity
    compiler = Compiler(tmp_path, *found, memory=lambda candidate: 2 * capacity / candidate.memory)
    results = searched(found, compiler, 2)
    assert not output.rows(results, output.Request(found[0].config, [], CPUS))
    record = results[0].record | {
        "changes": [{"keys": {"mu_dtype": "bfloat16"}, "fits": True, "compiled": 9, "cost": ""}]
    }
    lines = list(output.nearest_lines(results[0]._replace(record=record), output.Request(found[0].config, [], CPUS)))
    assert lines[0].startswith("nothing fits. The nearest needs 79.11 GiB more than the 79.11 GiB per device: ")
    assert lines[1].startswith("would help  python -m src.train_compile ")
    assert lines[1].partition(" mu_dtype=bfloat16\n    compiled: ")[2].startswith("9 B, fits")


def test_changes_that_help_are_compiled_like_points_and_written_as_whole_commands(found, tmp_path, monkeypatch):
    """The nearest point's command with the changed keys in place of its own; a second search compiles nothing."""
    space, costs = found
    compiler = Compiler(tmp_path, *found, memory=lambda candidate: 1e9)
    words = ["configs/base.yml", "num_vocab_tiling=1", "remat_policy=none"]
    request = output.Request(space.config, words, CPUS)
    change = advice.Change({"num_vocab_tiling": 4, "packing": False}, "time", space.config.replace(packing=False), 60)
    monkeypatch.setattr(advice, "changes", lambda *arguments: iter([change]))
    started = []

    def start(config, words):
        if config.batch.packing:
            return Compiler.start(compiler, config, words)
        started.append(words)
        memory = {"needed": 60, "capacity": 80, "left": 20, "fits": True, "host": {}}
        with new_file(compiler.file(config)) as file:
            file.write(json.dumps({"failed": "", "memory": memory}).encode())
        return Done(compiler.file(config))

    monkeypatch.setattr(compiler, "start", start)
    for _ in range(2):
        result = Told(costs, space, compiler, request.command_words, 2)
        result.run(lambda line: None)
        nearest = result.advice()
        assert nearest.record["changes"] == [
            {"keys": change.keys, "cost": "time", "estimated": 60, "compiled": 60, "fits": True}
        ]
    assert len(started) == 1
    assert {"num_vocab_tiling=4", "packing=false"} < set(started[0])
    assert "num_vocab_tiling=1" not in started[0]
    changes = json.loads(output.report_json(request, costs, result.results, {}, nearest))["changes"]
    command = output.command_line(request, nearest.candidate.point, change.keys)
    assert changes == [nearest.record["changes"][0] | {"command": command}]
    assert "changes" not in json.loads(output.report_json(request, costs, result.results, {}))
    *_, line = output.nearest_lines(nearest, request)
    assert line.startswith("would help  python -m src.train_compile configs/base.yml ")
    assert line.endswith("num_vocab_tiling=4 packing=false\n    compiled: 60 B, fits; time")
