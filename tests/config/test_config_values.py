"""Every key with values that nobody means: each is accepted, and then works, or is answered by name."""

import os

import jax
import pytest

from src.config.load import from_yaml, to_yaml
from src.config.model_checks import check_value
from src.config.schema import KEYS, defaults
from src.config.yaml import MAX_DEPTH, MAX_NODES
from src.parallel.mesh import global_batch_size, make_layout
from src.run.resolve_config import load
from src.step.trace import plan_step
from src.system.errors import UserError
from tests.tiny import BASE, TINY, spec_of

VALUES = ("0", "word")
# Too large or small, no number, no value of its kind.
ALIKE = ("-1", "nan", "2147483648", "1e30", "1e-300", "inf", "", "[]", "{}")
PLANNED = ("-1", "0")  # what is accepted of the others differs little, and planning takes most of the time
ENTRIES = (
    *("remat_custom.context", "logical_axis_rules.mlp"),
    "decoder_segments=[{{repeats: {}, pattern: [{{}}]}}]",
    "decoder_segments=[{{repeats: 2, pattern: [{{head_dim: {}}}]}}]",
    "datasets=[{{name: a, dataset_type: synthetic, weight: {}}}]",
    "eval_datasets=[{{name: a, dataset_type: synthetic, eval_steps: {}}}]",
)


_PLANNED = set()


def plan_of(config):
    """Plans a step on 8 devices: abstract weights, shardings, batch; once for what `plan_step` reads of a config."""
    sections = repr((config.model, config.step, config.batch, config.mesh, config.evaluation.eval_metrics))
    if sections in _PLANNED:
        return
    layout = make_layout(config.mesh, jax.devices())
    global_batch_size(
        layout, config.batch.per_device_batch_size, config.step.gradient_accumulation_steps, "per_device_batch_size"
    )
    plan_step(config, layout)
    _PLANNED.add(sections)  # what fails is planned, and fails, for each key that leads to it


def accept(argument, is_planned=True):
    """Whether the argument is accepted and its config can be planned for; False where it is answered by its key."""
    keys = {key: value for key, value in TINY.items() if not argument.startswith(f"{key}=")}
    message = ""
    try:
        config = load([BASE, *(f"{key}={value}" for key, value in keys.items()), argument])
        assert from_yaml(to_yaml(config)) == config
        plan_of(config) if is_planned else spec_of(config)
    except UserError as error:
        message = str(error)
    assert not message or argument.partition("=")[0].partition(".")[0] in message, argument
    return not message


@pytest.mark.parametrize("value", [*VALUES, *(pytest.param(value, marks=pytest.mark.long) for value in ALIKE)])
def test_every_key_takes_a_value_or_names_itself(value):
    is_planned = value in PLANNED
    accepted = [key for key in KEYS if accept(f"{key}={value}", is_planned)]
    assert len(accepted) < len(KEYS) / 2
    for entry in ENTRIES:
        accept(entry.format(value) if "=" in entry else f"{entry}={value}", is_planned)


def test_the_largest_numbers_can_be_planned_for():
    """A number at its limit gives shapes, and one above it is answered with the limit."""
    accepted = 0
    sizes = ("base_", "head_dim", "vocab_size", "global_parameter_scale")
    for key in KEYS.values():
        if key.max is not None:
            accepted += accept(f"{key.name}={key.max}", is_planned=key.name.startswith(sizes))  # takes long
            with pytest.raises(UserError, match=f"{key.name}=.* at most {key.max:,}"):
                load([BASE, f"{key.name}={2 * key.max}"])
    assert accepted > 50


def test_every_number_has_an_end():
    for key, default in defaults().items():
        if type(default) in (int, float):
            assert check_value(key, type(default)(1e37)), key
            assert not check_value(key, default), key


REPEATED = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run_name: !!binary aGVsbG8=\n", ["line 1, column 11", "!!binary is not supported"]),
        ("remat_custom: !!set {a, b}\n", ["!!set"]),
        ("run_name: !!timestamp 2001-01-01\n", ["!!timestamp"]),
        ("steps: !!int x\n", ["!!int"]),
        ("datasets: &a [*a]\n", ["line 1, column 11", "recursive"]),
        ("remat_custom: &a {b: {c: *a}}\n", ["recursive"]),
        (REPEATED, [f"more than {MAX_NODES:,} values"]),
        (
            "a: &a []\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n or ''}]\n" for n in range(99)),
            [f"more than {MAX_DEPTH} levels"],
        ),
        (f"datasets: {'[' * 600}{']' * 600}\n", ["nested too deeply"]),
        (f"datasets: {'{a: ' * 60}{'}' * 60}\n", [f"more than {MAX_DEPTH} levels"]),
        ('run_name: "a\\0b"\n', ["run_name", "'\\x00' is not text"]),
        ('model_name: "a\\0b"\n', ["'\\x00' is not text"]),
        ('base_config: "a\\0b"\n', ["'\\x00' is not text"]),
        ('run_name: "\\ud800"\n', ["'\\ud800' is not text"]),
        (f"base_config: {'a' * 5000}.yml\n", ["aaa", "too long"]),
        ("base_config: .\n", ["is a folder"]),
    ],
)
def test_yaml_that_is_no_configuration(write, text, parts):
    with pytest.raises(UserError) as error:
        load([str(write("mine.yml", text))])
    assert len(str(error.value)) < 3000
    for part in parts:
        assert part in str(error.value)


def test_an_alias_repeats_a_layer(write):
    file = write("mine.yml", "decoder_segments: [{repeats: 8, pattern: [&local {head_dim: 64}, *local]}]\n")
    (segment,) = load([str(file)]).model.decoder_segments
    assert [dict(facts) for facts in segment["pattern"]] == [{"head_dim": 64}] * 2


@pytest.mark.parametrize("name", ["a\0b.yml", f"{'a' * 5000}.yml", "a/" * 3000, "loop.yml", "folder.yml", "\udcff.yml"])
def test_names_that_are_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.yml", "loop.yml")
    (tmp_path / "folder.yml").mkdir()
    for argv in ([name], [BASE, f"model_name={name}"]):
        with pytest.raises(UserError) as error:
            load(argv)
        assert len(str(error.value)) < 3000
        str(error.value).encode()  # it can be printed


def test_a_disk_that_fails_for_a_time_is_no_mistake_of_the_command(tmp_path):
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # which Linux answers with EIO
    with pytest.raises(OSError, match="Input/output error"):
        load([f"model_name={tmp_path}"])


@pytest.mark.parametrize("path", ["a" * 256, "a/" * 2100, "é" * 130])
def test_a_path_that_no_file_can_have_is_answered_with_its_key(path):
    keys = [key.name for key in KEYS.values() if key.is_path]
    assert len(keys) >= 15
    for key in [*keys, "datasets"]:
        with pytest.raises(UserError, match="is too long for a path"):
            load([BASE, f"datasets=[{{name: x, dataset_path: {path}}}]" if key == "datasets" else f"{key}={path}"])
    assert load([BASE, f"dataset_path={'é' * 127}/x", "load_parameters_path=/" + "a/" * 2000])


@pytest.mark.parametrize("value", ["&a [*a]", "[" * 600, "9" * 400, "9" * 6000, "-" * 99_999, "a\0b", "\udcff"])
def test_arguments_that_are_no_value(value):
    for key in ("steps", "datasets", "stpes"):
        with pytest.raises(UserError) as error:
            load([BASE, f"{key}={value}"])
        assert key in str(error.value)
        assert len(str(error.value)) < 3000
        str(error.value).encode()


def test_a_port_with_more_digits_than_python_reads_is_refused():
    with pytest.raises(UserError, match="must be HOST:PORT"):
        load([BASE, f"coordinator_address=host:{'9' * 6000}", "num_processes=2", "process_id=0"])
