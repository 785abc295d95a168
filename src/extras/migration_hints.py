"""Explains other trainers' names, from the tables in migration_hints.yml, and suggests what to type."""

import difflib
import fnmatch
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from src.config.load import joined
from src.config.schema import KEYS
from src.config.yaml import CONFIGS, NOTHING, Plain, dump, literal, parse, parse_argument, read_file
from src.system.errors import UserError, did_you_mean, from_here

TABLE = Path(__file__).with_suffix(".yml")
NOTHING_TO_TYPE = "nothing to type"
MESH_AXES, RETIRED_FLAGS = "Mesh axes", "Retired XLA flags"
LEFT_OPEN = re.compile(r"=(NAME|FOLDER|FILE|TEXT)\b")  # in the table: values that only the user knows


class Hint(NamedTuple):
    """An answer to another trainer's key: whether it is accepted, without effect, and a sentence that explains it."""

    accepted: bool
    sentence: str
    instead: str = ""  # words to type instead, if they are certain


class Renamed(NamedTuple):
    """Another trainer's name for keys of ours. In `template`, the words to type, `...` stands for the value.

    {0} and {1} stand for the entries of a list. A dict has a template for each value, and "*" for any other.
    """

    program: str
    template: str | dict[str, str]

    def hint(self, key: str, value: Any) -> Hint:
        """Says what to type instead of `key`=`value`; accepts an empty value, or one with nothing to type instead."""
        typed, certain = _fill(self.template, value)
        words, _, note = typed.partition("  # ")
        if not typed or value in NOTHING:
            return Hint(True, f"{self.program}'s {key}={_spell(value)} is already the behavior here; ignored")
        sentence = f"{key} is a {self.program} name; type {words} instead{f' ({note})' if note else ''}"
        return Hint(False, sentence, words if certain else "")


class Explained(NamedTuple):
    """Another trainer's key without an equivalent: `why` says what MinText does instead.

    `accepted` is the value that has no effect, and so may be given; "..." is any, None is none.
    """

    program: str
    why: str
    accepted: Any

    def hint(self, key: str, value: Any) -> Hint:
        """Explains what `key` means here; accepts `key`=`value` if `accepted` allows the value."""
        program, why, accepted = self
        if accepted == "...":
            return Hint(True, f"{program}'s {key} has no effect here: {why}")
        if accepted is None:
            return Hint(False, f"{program}'s {key}: {why}")
        if _same(value, accepted):
            return Hint(True, f"{program}'s {key}={_spell(value)} changes nothing: {why}")
        return Hint(False, f"{program}'s {key}={_spell(value)}: {why} ({key}={_spell(accepted)} is accepted)")


@functools.cache
def read_table() -> dict[str, dict[str, Any]]:
    """Returns the tables of migration_hints.yml, by program, and the tables `MESH_AXES` and `RETIRED_FLAGS`.

    The file's head describes the tables.
    """
    return read_file(TABLE)


@functools.cache
def known_names() -> dict[str, Renamed | Explained]:
    """Maps the names of all programs' keys, some of them fnmatch patterns, to what each means here."""
    names: dict[str, Renamed | Explained] = {}
    for program, table in read_table().items():
        names |= {name: Renamed(program, template) for name, template in table.get("names", {}).items()}
        for row in table.get("explained", ()):
            for name, equals, value in (key.partition("=") for key in row["keys"]):
                accepted = value if value == "..." else parse(value, str(TABLE)) if equals else None
                names[name] = Explained(program, row["why"], accepted)
    return names


def migration_hint(key: str, value: Any) -> Hint | None:
    """Returns the answer to `key`=`value` (parsed) if `key` is another trainer's name; else None."""
    names = known_names()
    name = key if key in names else next((name for name in names if fnmatch.fnmatchcase(key, name)), None)
    return names[name].hint(key, value) if name else None


def meant(key: str) -> str:
    """Suggests similar keys, ` Did you mean ...?`, knowing other trainers' words for mesh axes; else ""."""
    axes = read_table()[MESH_AXES]
    match = re.fullmatch(rf"(ici|dcn)_({'|'.join(axes)})(_parallelism)?", key)
    return did_you_mean(f"{match[1]}_{axes[match[2]]}_parallelism" if match else key, KEYS)


def value_hint(key: str, value: Any) -> str:
    """Suggests what to type instead of another trainer's `value` for a `key` that both have; "" if there is nothing."""
    match _about_value(key, value):
        case None:
            return ""
        case {"type": words}:
            return f" ({value}: `{words}`)"
        case why:
            return f" ({value}: {why or NOTHING_TO_TYPE})"


def own_value(key: str, value: Any) -> Any:
    """Converts MaxText's parsed `value` for a shared `key` to MinText's spelling; unchanged if no table has it."""
    hint = _about_value(key, value)
    return Plain(hint["type"].removeprefix(f"{key}=")) if isinstance(hint, dict) else value


def is_maxtext_default(key: str, value: Any) -> bool:
    """Tells whether `value`, given for a `key` without effect in this config, may be ignored: as MaxText's default."""
    return _about_value(key, value) == ""


def _about_value(key: str, value: Any) -> Any:
    rows = read_table()["MaxText"]["values"].get(key, {}).items()
    return next((hint for theirs, hint in rows if _same(value, Plain(theirs))), None)


def retired_flag(name: str, value: str) -> str | None:
    """Returns what to type for a retired XLA flag; "" if XLA does it by default, None if flag or value is unknown."""
    rows = read_table()[RETIRED_FLAGS].get(name, {}).items()
    return next((typed for theirs, typed in rows if theirs == "*" or _same(Plain(value), Plain(theirs))), None)


def environment_notes(variables: Iterable[str]) -> list[str]:
    """Warns about each environment variable that would set a key in MaxText (M_STEPS) but does nothing here."""
    keys = {name: name[2:].lower() for name in variables if name.startswith("M_") and name.isupper()}
    return [
        f"{name} in the environment, with which MaxText sets a key, has no effect here: type {key}=..."
        for name, key in sorted(keys.items())
        if key in KEYS or migration_hint(key, Plain("..."))
    ]


def _fill(template: str | dict[str, str], value: Any) -> tuple[str, bool]:
    """Returns the words to type for `value`, and whether they are certain: complete, and meant for this value.

    A value that a dict lacks gives all of the dict's answers.
    """
    if isinstance(template, dict):
        # Pax's files contain Python such as jnp.bfloat16 and layers.GELU.
        bare = Plain(_spell(value).rpartition(".")[2])
        for theirs, typed in template.items():
            if _same(value, Plain(theirs)) or _same(bare, Plain(theirs)) or fnmatch.fnmatchcase(bare, theirs):
                certain = (theirs != "*" or "..." in typed) and not LEFT_OPEN.search(typed)
                return typed.replace("...", _spell(value)), certain
        return " or ".join(dict.fromkeys(typed for typed in template.values() if typed)), False
    if "{0}" not in template:
        return template.replace("...", _spell(value)), not LEFT_OPEN.search(template)
    entries = value if isinstance(value, list) else []
    if len(entries) != len(re.findall(r"{\d}", template)):
        return re.sub(r"{\d}", "...", template), False
    return template.format(*entries), True


def _same(value: Any, other: Any) -> bool:
    return ("" if value in NOTHING else literal(value)) == ("" if other in NOTHING else literal(other))


def _spell(value: Any) -> str:
    return str(value) if isinstance(value, str) else dump(literal(value)).replace('"', "")


def corrected_command(argv: Sequence[str], load: Callable[[Sequence[str]], object]) -> str:
    """Suggests the whole corrected command as a line; "" if nothing changes, or if `load` rejects the result.

    Also "" if the command names several files.
    """
    words = [corrected for word in joined(argv) for corrected in _corrected(word)]
    words += _implied(argv, {word.partition("=")[0] for word in words})
    files = [word for word in words if "=" not in word]  # a name that stands for a recipe adds a file: the last one
    words = [*files[-1:], *(word for word in words if "=" in word)]
    if words == list(argv) or sum("=" not in word for word in joined(argv)) > 1:
        return ""
    try:
        load(words)
    except (UserError, OSError):
        return ""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    module = module if module.startswith("src.") else "src.train"
    return f"\nType: {shlex.join([from_here(sys.executable), '-m', module, *words])}"


def _implied(argv: Sequence[str], given: set[str]) -> list[str]:
    """Lists settings beyond the `given` keys that another program derives from sizes on its command line.

    If a size is missing, which only the other program knows, or is not divisible, the result is a word that no command
    accepts.
    """
    typed = {key.lstrip("-"): value for key, _, value in (word.partition("=") for word in joined(argv))}
    settings: list[str] = []
    for names, template in (row for table in read_table().values() for row in table.get("sizes", {}).items()):
        sizes = {name: typed[name] for name in names.split() if typed.get(name, "").isdecimal()}
        if sizes and len(sizes) < len(names.split()):
            return [f"unknown={names}"]
        for one, sign, other in re.findall(r"{(\w+)([/*])(\w+)}", template) if sizes else ():
            a, b = int(sizes[one]), int(sizes.get(other, other))
            if not b or (sign == "/" and a % b):
                return [f"unknown={one}"]
            template = template.replace(f"{{{one}{sign}{other}}}", str(a // b if sign == "/" else a * b))
        settings += template.split() if sizes else []
    return [setting for setting in settings if setting.partition("=")[0] not in given]


def _corrected(word: str) -> list[str]:
    """Translates a word of a command line if its meaning is certain; else returns it unchanged."""
    key, equals, text = word.lstrip("-").partition("=")
    if not equals and not Path(word).exists() and (CONFIGS / Path(word).name).is_file():
        return [f"configs/{Path(word).name}"]  # such as src/maxtext/configs/base.yml
    if not equals or key.partition(".")[0] in KEYS:
        return [f"{key}{equals}{text}"]
    if hint := migration_hint(key, parse_argument(text, None, key)):
        return [] if hint.accepted else shlex.split(hint.instead) or [word]
    near = difflib.get_close_matches(key, KEYS, n=2, cutoff=0.9)
    return [f"{near[0]}={text}"] if len(near) == 1 else [word]
