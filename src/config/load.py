"""Resolves a command's configuration: defaults, model file, the user's config files, key=value; checked and frozen."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from src.config import run_configs, yaml
from src.config.checks import check_config
from src.config.hints import hints
from src.config.keys import frozen
from src.config.model_checks import check_value, read_list
from src.config.requirements import OF_TRAIN, TYPED, Requires, Setting, may_be_unused, to_settings
from src.config.schema import KEYS, Config, defaults
from src.config.yaml import BASE, CONFIGS, NOTHING, Plain, convert, dump, file_name, literal, parse_argument, parse_keys
from src.system.errors import UserError, changed_keys, clipped

ENTRY_LISTS = ("datasets", "eval_datasets", "optimizer_rules", "load_weights_rules")  # entries.py reads them

# Reads a model of another program, given its folder or hf://ORG/NAME, or only its tokenizer if the second argument is
# true. Returns keys as `parse_keys` does; None if the folder has no such model. The config does not know these formats.
FolderReader = Callable[[str, bool], Mapping[str, Any] | None]


def load(
    argv: Sequence[str] | ConfigDict,
    notes: list[str] | None = None,
    *,
    uses_weights: bool = False,
    command: str = "",
    read_folder: FolderReader = lambda folder, tokenizer_only: None,
) -> Config:
    """Resolves a command line: a config file or a run's folder (else base.yml), then `key=value` arguments.

    Precedence, lowest first: base.yml, the model file that `model_name` names, the config file's chain of
    `base_config` files, the config file, the arguments. A mapping or list replaces the one below it; a dotted key
    (`logical_axis_rules.mlp=[]`) sets one entry of a mapping. A run's folder sets every key, also those of the model.

    `argv` is the command line without the program, or a ConfigDict in place of a config file. `notes` receives a line
    for each key that is given twice, or accepted without effect, such as another trainer's or another `command`'s
    ("": no keys are reported as another command's). With `uses_weights`, the folder of a run in place of a config file,
    or of the model that `model_name` names, is the default of `load_parameters_path`.

    Raises UserError with all problems in one message, and OSError if a path cannot be looked up.
    """
    if isinstance(argv, str | Mapping) or not all(isinstance(word, str) for word in argv):
        expected = 'a list of words, such as ["configs/base.yml", "steps=100"], or an ml_collections.ConfigDict'
        raise UserError(f"expected {expected}, got {argv!r}")
    resolve = functools.partial(_load, uses_weights=uses_weights, command=command, read_folder=read_folder)
    try:
        return resolve(argv, [] if notes is None else notes)
    except UserError as error:
        is_typed = not isinstance(argv, ConfigDict)
        line = hints().corrected_command(argv, lambda words: resolve(words, [])) if is_typed else ""
        raise UserError(f"{error}{line}") from None


def _load(
    argv: Sequence[str] | ConfigDict, notes: list[str], uses_weights: bool, command: str, read_folder: FolderReader
) -> Config:
    problems: list[str] = []
    run, files, words = None, [], list(argv)
    if isinstance(argv, ConfigDict):
        from src.config.python_config import config_dict_keys

        files, words = _chain(Path("the ConfigDict"), problems, config_dict_keys(argv, "the ConfigDict")), []
    elif not argv:
        problems.append("the first argument is a YAML file or a run's folder, as in `configs/quickstart.yml steps=100`")
    elif "=" not in argv[0] and not argv[0].startswith("-"):
        del words[0]
        if run := run_configs.run_folder(file_name(argv[0])):
            with _collected(problems):
                from_run = {"load_parameters_path": str(run), "load_full_state_path": "", "load_ema": Plain("false")}
                weights = from_run if uses_weights else {}
                files = to_settings(run_configs.run_keys(run) | weights, f"in {run}")
        else:
            files = _chain(Path(argv[0]), problems)
    arguments = list(_arguments(words, problems))
    last = {setting.key: str(setting.value) for setting in arguments}
    for key in dict.fromkeys(each.key for each in arguments if str(each.value) != last[each.key]):
        notes.append(f"{key} is given more than once; using the last value, {key}={last[key]}")
    model_name = _model_name([*files, *arguments])
    model: list[Setting] = []
    if not run and model_name:
        from src.config import named_model

        with _collected(problems):
            model = named_model.model_settings(
                model_name, uses_weights, read_folder, lambda path: _read(path, problems), problems
            )
            unaware, aware = named_model.split_at_name(model_name, files)
            meant = {setting.key for setting in (*aware, *arguments)}
            problems += named_model.replaced_settings(model_name, model, unaware, meant)
    elif run and model_name != _model_name(files):
        problems.append(f"model_name={model_name}: {run} is a run, and a run keeps its own model")
    settings = [*model, *files, *arguments]
    below: list[Setting] = []
    if any(setting.key == "run_name" for setting in settings):
        from src.config.older_runs import former_defaults

        below = former_defaults(settings)
    config, failed = _resolve([*below, *settings], problems, notes)
    # If `model_name` is the folder of a run, keep the name that its model has in that run.
    config["model_name"] = next((str(setting.value) for setting in model if setting.key == "model_name"), model_name)
    unread: Sequence[Requires] = OF_TRAIN if command == "src.train" else ()
    if command not in ("", "src.train"):
        from src.config.unread_keys import UNREAD

        unread = UNREAD.get(command, ())
    sound = {key: value for key, value in config.items() if key not in failed}
    if found := check_config(config, failed):  # some may be due to keys that the command does not read
        from src.config.unused_keys import keys_not_read

        of_read = check_config(config, failed, keys_not_read(sound, command, unread))
        problems += [each for each in found if each in of_read]
    # Do not report settings in a run's own config.yml: it lists every key, including keys without effect.
    chosen = [setting for setting in files if not (run or setting.where.endswith(f"/{run_configs.CONFIG}"))]
    unused: Sequence[tuple[str, str]] = ()
    if may_be_unused([*chosen, *arguments], sound, command, unread):
        from src.config.unused_keys import unused_keys

        unused = unused_keys([*chosen, *arguments], sound, notes, command, unread)
    for key, sentence in unused:
        (notes if hints().is_maxtext_default(key, config.get(key)) else problems).append(sentence)
    problems = [clipped(problem) for problem in dict.fromkeys(problems)]
    if len(problems) > 1:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UserError(f"{len(problems)} problems with this configuration:{listed}")
    if problems:
        raise UserError(problems[0])
    if config["steps"] == -1:
        config["steps"] = config["learning_rate_schedule_steps"]
    return Config.of(config)


@contextlib.contextmanager
def _collected(problems: list[str]) -> Generator[None]:
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def _arguments(arguments: Sequence[str], problems: list[str]) -> Iterator[Setting]:
    if "=" in arguments:  # such as `steps = 20`
        problems.append(f"{' '.join(arguments)}: type key=value without spaces around =, as in steps=20")
        return
    for key, value in itertools.pairwise(arguments):
        if key in KEYS and "=" not in value and not value.startswith("-"):
            problems.append(f"{key} {value}: type key=value, as in {key}={value}")
            return
    for argument in joined(arguments):
        key, equals, text = argument.lstrip("-").partition("=")
        if problem := yaml.unprintable(argument, is_name=key not in KEYS or not KEYS[key].any_text):
            problems.append(f"{argument!a}: {problem}")
        elif not equals:
            problems.append(f"{argument}: expected key=value, after the YAML file if there is one")
        elif argument.startswith("-") and key.partition(".")[0] in KEYS:
            problems.append(f"{argument}: keys are typed without dashes, {key}={text}")
        else:
            with _collected(problems):
                yield Setting(key, parse_argument(text, _default(key), key), TYPED)


def joined(argv: Sequence[str]) -> Iterator[str]:
    """Joins flags and values of a command line: `--steps 100` as `--steps=100`, `--verbose` as `--verbose=true`."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("--") and "=" not in word:
            takes_next = words and "=" not in words[0] and not words[0].startswith("--")
            word += f"={words.pop(0) if takes_next else 'true'}"
        yield word


def _default(key: str) -> Any:
    """Looks up the default of a key or a dotted entry; None if it has no default."""
    key, dot, entry = key.partition(".")
    default = KEYS[key].default if key in KEYS else None
    return default.get(entry) if dot and isinstance(default, Mapping) else default


def _chain(path: Path, problems: list[str], keys: dict[str, Any] | None = None) -> list[Setting]:
    """Reads a config file and the chain of its `base_config` files; returns their settings, the lowest file's first.

    base.yml is left out. `keys`, of a ConfigDict, are used in place of the file `path`. Adds problems to `problems`.
    """
    settings: list[Setting] = []
    visited: list[Path] = []
    if path.parts[:1] == ("configs",) and not path.exists() and CONFIGS.parent.joinpath(path).is_file():
        path = CONFIGS.parent / path  # configs/ is found from any folder, even if only the package is installed
    while (resolved := Path(os.path.realpath(path))) != BASE:
        if resolved in visited:
            problems.append(f"base_config goes round in a circle: {' -> '.join(map(str, [*visited, resolved]))}")
            break
        visited.append(resolved)
        keys = _read(path, problems) if keys is None else keys
        below = file_name(str(keys.pop("base_config", "")))
        settings = to_settings(keys, f"in {path}") + settings
        if not below:
            break
        beside = path.parent / below
        path, keys = beside if beside.is_file() else CONFIGS / below, None
    return settings


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    with _collected(problems):
        if not path.is_file():
            from src.config import not_found

            raise UserError(not_found.no_config(path))
        if path.suffix != ".py":
            return yaml.read_file(path)
        from src.config.python_config import read_python

        return read_python(path)
    return {}


def _model_name(settings: Sequence[Setting]) -> str:
    """Picks the model name with the highest precedence; empty for no model, which MaxText calls default."""
    names = ["", *(setting.value for setting in settings if setting.key == "model_name")]
    return "" if names[-1] in (*NOTHING, "default") else file_name(str(names[-1]))


def _resolve(settings: Sequence[Setting], problems: list[str], notes: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Applies the settings in order to the defaults; returns all keys' values, and the keys with an invalid setting.

    Problems are added to `problems`, and answers to other trainers' keys to `problems` or `notes`.
    """
    config = defaults()
    failed: set[str] = set()
    for setting in settings:
        key, dot, entry = setting.key.partition(".")
        if key not in config:
            if hint := hints().migration_hint(setting.key, setting.value):
                (notes if hint.accepted else problems).append(hint.sentence)
            else:
                similar = hints().meant(setting.key) or " `--help` lists all keys."
                problems.append(f"unknown key {setting.key} ({setting.where}).{similar}")
        elif dot and not isinstance(config[key], Mapping):
            problems.append(f"{setting.key} ({setting.where}): {key} is not a mapping, so it has no entry {entry}")
            failed.add(key)
        else:
            try:
                value = _own(setting.key, setting.value)
                config[key] = frozen({**config[key], entry: value}) if dot else value
            except ValueError as error:
                problem = f"{setting.key} ({setting.where}): {error}"
                end = "" if problem.endswith((".", "?")) else "."
                problems.append(f"{problem}{end} {key}: {KEYS[key].comment}")
                failed.add(key)
    return config, failed


def _own(key: str, value: Any) -> Any:
    """Converts a value to its key's type; if it is invalid, tries it as another trainer's spelling.

    Raises ValueError if that is not of the key's type either.
    """
    with contextlib.suppress(ValueError):
        typed = _typed(key, value)
        if "." in key or not check_value(key, typed):
            return typed
    return _typed(key, hints().own_value(key, value))


def _typed(key: str, value: Any) -> Any:
    if key == "decoder_segments":
        from src.config.segments import read_segment

        return read_list(value, "segment", read_segment)
    if key in ENTRY_LISTS:
        from src.config.entries import read_entries

        return read_entries(key, value)
    default = _default(key)  # None for an unknown key or entry, which a check reports
    return frozen(literal(value) if default is None else convert(value, default))


def to_yaml(config: Mapping[str, Any]) -> str:
    """Writes the whole configuration as YAML, which `from_yaml` reads back as equal values."""
    return "".join(f"{key}: {dump(config[key])}\n" for key in KEYS)


def from_yaml(text: str) -> dict[str, Any]:
    """Reads the keys that this or another version's `to_yaml` wrote; raises UserError if malformed or mistyped."""
    config = {}
    for key, value in parse_keys(text, "the run's config.yml").items():
        try:
            config[key] = _typed(key, value)
        except ValueError as error:
            raise UserError(f"{key} in the run's config.yml: {error}") from None
    return config


def diff_from_base(config: Mapping[str, Any]) -> list[str]:
    """Formats a line for each key that differs from its default, with both values; mapping entries have dotted keys."""
    old, new = _dotted(defaults()), _dotted(config)
    return [f"{key}: {dump(new.get(key))} (default {dump(old.get(key))})" for key in changed_keys(new, old)]


def _dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, declared in KEYS.items():
        is_mapping = isinstance(declared.default, Mapping)
        flat |= {f"{key}.{entry}": value for entry, value in config[key].items()} if is_mapping else {key: config[key]}
    return flat


def compare_runs(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Compares a run's configuration with a new one; returns the changes that a resumed run accepts, then the others.

    Both map keys to lines `KEY: OLD -> NEW`. A change of a key declared `resume_invariant`, which affects the weights,
    the data or their order, is accepted only if the new `accept_changes` names it. PER_LAUNCH_KEYS are not compared,
    and a key that the run's version did not have yet counts as its default.
    """
    old = {**defaults(), **old}
    changed = [key for key in changed_keys(new, old) if key not in run_configs.PER_LAUNCH_KEYS]
    changes = {key: f"{key}: {dump(old.get(key))} -> {dump(new.get(key))}" for key in changed}
    identity = {key.name for key in KEYS.values() if key.resume_invariant} - set(new["accept_changes"])
    breaking = {key: changes.pop(key) for key in changed if key in identity}
    return changes, breaking
