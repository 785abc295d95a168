"""Configurations in Python: get_config() of a file wherever a YAML file is taken, a ConfigDict in the place of argv."""

import dataclasses
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from ml_collections.config_dict import placeholder

from src import train
from src.run.resolve_config import load
from src.system.errors import UserError
from tests import runs

HEAD = "from ml_collections import ConfigDict\n\n\ndef get_config():\n"
BASE = runs.BASE
ROOT = Path(__file__).parents[2]


def returning(*lines):
    return HEAD + "".join(f"    {line}\n" for line in ("config = ConfigDict()", *lines, "return config"))


def test_a_python_file_is_taken_wherever_a_yaml_file_is(write):
    write("model.py", returning("config.base_emb_dim = 8 * 8", "config.mlp_activations = ('gelu',)"))
    write("below.py", returning("config.learning_rate = 2**-7", "config.run_name = '007'", "config.prompt = None"))
    upper = write("upper.yml", "base_config: below.py\nsteps: 6\n")
    config = load([str(upper), f"model_name={upper.parent}/model.py"])
    assert (config.model.base_emb_dim, config.model.mlp_activations) == (64, ("gelu",))
    assert (config.step.learning_rate, config.decoding.prompt) == (2**-7, "")
    assert (config.run.run_name, config.run.steps) == ("007", 6)
    first = write("first.py", returning("config.base_config = 'upper.yml'", "config.steps = 7"))
    assert load([str(first)]).run.steps == 7
    assert load([str(first), "steps=8"]).run.steps == 8
    assert load([str(first)]).step.learning_rate == 2**-7


def test_the_example_of_the_readme_loads(write):
    (example,) = re.findall(r"```python\n(.*?get_config.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert load([str(write("mine.py", example))]).model.base_mlp_dim == 1024


def test_sections_of_a_config_dict_are_mappings(write):
    path = write("mine.py", returning("config.remat_policy = 'custom'", "config.remat_custom = dict(mlpwo='device')"))
    assert load([str(path)]).step.remat_custom == {"mlpwo": "device"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = 3\n", ["no function get_config()", "ConfigDict"]),
        (HEAD + "    return 1 / 0\n", ["line 5", "ZeroDivisionError", "division by zero"]),
        (HEAD + "    raise SystemExit(3)\n", ["line 5", "SystemExit"]),
        ("import nowhere_to_be_found\n", ["line 1", "ModuleNotFoundError", "nowhere_to_be_found"]),
        ("def get_config(:\n", ["line 1", "SyntaxError"]),
        (HEAD + "    return {'steps': 3}\n", ["type dict", "ConfigDict"]),
        (HEAD + "    pass\n", ["type NoneType", "ConfigDict"]),
        (returning("config.stpes = 3"), ["unknown key stpes", "steps"]),
        (returning("config.steps = '3'"), ["steps", "an integer", 'a string ("3")']),
        (returning("config.steps = object()"), ["steps: its value is not a number, text, list or mapping"]),
    ],
)
def test_mistakes_in_a_python_file(write, text, parts):
    path = write("mine.py", text)
    for argv in ([str(path)], [BASE, f"model_name={path}"]):
        with pytest.raises(UserError) as error:
            load(argv)
        for part in ("mine.py", *parts):
            assert part in str(error.value)


def test_a_required_value_that_is_not_set_is_named(write):
    with pytest.raises(UserError, match="the ConfigDict: steps: "):
        load(ConfigDict({"steps": placeholder(int, required=True)}))
    path = write("gone.yml", "")
    path.unlink()
    with pytest.raises(UserError, match=r"there is no file .*gone\.py"):
        load([str(path.with_suffix(".py"))])


@pytest.mark.parametrize("kind", [ConfigDict, FrozenConfigDict])
def test_a_config_dict_stands_for_a_command_line(kind):
    keys = {"steps": 3, "learning_rate": 1, "base_config": "quickstart.yml"}
    assert load(kind(keys)) == load(["configs/quickstart.yml", "steps=3", "learning_rate=1"])
    with pytest.raises(UserError, match=r"unknown key stpes \(in the ConfigDict\)\. Did you mean steps"):
        load(kind({"stpes": 3}))


def test_a_run_is_trained_from_a_config_dict(tmp_path):
    keys = {**runs.TINY, "dataset_type": "synthetic", "steps": 1, "base_output_directory": str(tmp_path)}
    result = train.main(ConfigDict(keys))
    assert int(result.state.step) == 1


def test_config_is_sections_and_a_flat_mapping():
    config = load([BASE, "steps=3"])
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    keys = [field.name for section in sections for field in dataclasses.fields(section)]
    assert sorted(keys) == sorted(config), "one key in one section"
    assert config.replace(steps=4, mlp_activations=["gelu"]).model.mlp_activations == ("gelu",)
    with pytest.raises(KeyError):
        config.replace(stpes=4)
