"""Reads the settings of the model that `model_name` names."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from src.config import not_found, run_configs
from src.config.requirements import Setting, to_settings
from src.config.schema import KEYS, keys_of
from src.config.yaml import CONFIGS, Plain, convert, dump, read_file
from src.system.errors import UserError, first_few


def same_file(name: str, other: str) -> bool:
    """Returns whether two model names end in the same file name, without folders and `.yml`."""
    return Path(name).name.removesuffix(".yml") == Path(other).name.removesuffix(".yml")


def split_at_name(name: str, files: Sequence[Setting]) -> tuple[Sequence[Setting], Sequence[Setting]]:
    """Splits the settings of a chain of files, the lowest file's first: those not made for model `name`, and the rest.

    The rest begins with the lowest file that names this model and has no file above it that names another. If there is
    no such file, all settings are in the first part.
    """
    first = len(files)
    for naming in reversed([each for each in files if each.key == "model_name"]):
        if not same_file(name, str(naming.value)):
            break
        first = next(index for index, each in enumerate(files) if each.where == naming.where)
    return files[:first], files[first:]


def replaced_settings(name: str, model: Sequence[Setting], files: Sequence[Setting], meant: Set[str]) -> Iterator[str]:
    """Yields a problem if `files`, not made for model `name`, give other values to settings of its file, `model`.

    Keys in `meant`, which sources above these files set too, are not a problem.
    """
    of_model = {setting.key: setting.value for setting in model if setting.key in keys_of("model")}
    of_model.pop("vocab_size", None)  # it belongs to the tokenizer
    replaced = []
    for key, each in {each.key: each for each in files}.items():
        if key in of_model and key not in meant:
            with contextlib.suppress(UserError, ValueError):  # a value of the wrong type is reported elsewhere
                value, of_it = (convert(value, KEYS[key].default) for value in (each.value, of_model[key]))
                replaced += [(each, value, of_it)] * (value != of_it)
    if replaced:
        keys = first_few(f"{each.key}={dump(value)} replaces {dump(of_it)}" for each, value, of_it in replaced)
        yield (
            f"model_name={name} would not be that model: {replaced[0][0].where}, {keys}. Give a file that does not "
            "set these keys, such as configs/base.yml, or name the model in the file to change it in this way"
        )


def model_settings(
    name: str,
    uses_weights: bool,
    read_folder: Callable[[str, bool], Mapping[str, Any] | None],
    read_config: Callable[[Path], Mapping[str, Any]],
    problems: list[str],
) -> list[Setting]:
    """Reads the settings of model `name`: of a file in configs/models, or a path to a file, run or model folder.

    They include a tokenizer in the folder, or next to the file, and with `uses_weights` the folder as
    `load_parameters_path`. `read_folder`, a `load.FolderReader`, also reads hf://ORG/NAME; `read_config` reads a file.
    Keys in the file that do not describe a model are added to `problems`. Raises UserError if there is no such model,
    or the folder cannot be read.
    """
    try:
        run = run_configs.run_folder(name)
        keys = _keys_of_run(run) if run else read_folder(name, False)
    except UserError as error:
        raise UserError(f"model_name={name}: {error}") from None
    if keys is not None:
        if uses_weights:
            keys = {**keys, "load_parameters_path": name}
        return to_settings(keys, f"in {name}")
    path = Path(os.path.expanduser(name)) if name.endswith((".yml", ".py")) else CONFIGS / "models" / f"{name}.yml"
    if not path.is_file():
        raise UserError(not_found.no_model(name, path))
    settings = to_settings(read_config(path), f"in {path}")
    for setting in settings:
        if setting.key in KEYS and KEYS[setting.key].section != "model":
            problems.append(f"{path}: {setting.key} does not describe a model; a model file has only keys that do")
    return settings + to_settings(read_folder(str(path.parent), True) or {}, f"beside {path}")


def _keys_of_run(folder: Path) -> dict[str, Any]:
    """Reads the keys of a run's model and tokenizer, and its `model_name`; raises UserError if it can't be read."""
    keys = read_file(folder / run_configs.CONFIG)
    if keys.get("position_type") == "learned" and keys.get("trainable_position_size") == "-1":
        # -1 meant the run's length, and would now mean the command's.
        keys["trainable_position_size"] = keys.get("max_target_length", Plain(KEYS["max_target_length"].default))
    wanted = {*keys_of("model"), "model_name", "tokenizer_type", "tokenizer_path"}
    return {key: value for key, value in keys.items() if key in wanted}
