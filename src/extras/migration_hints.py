"""Answers other trainers' names from the tables of docs/from_maxtext_and_pax.md, and says which command was meant."""

import difflib
import fnmatch
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from src import shipped
from src.config.load import joined
from src.config.schema import KEYS
from src.config.yaml import CONFIGS, NOTHING, Plain, dump, literal, parse, parse_argument
from src.system.errors import UserError, did_you_mean, from_here

PAGE = shipped("docs") / "from_maxtext_and_pax.md"
# What others call the axes of the mesh in the keys of their sizes.
MESH_WORDS = {
    **{"dp": "data", "replica": "data", "stage": "pipeline", "pp": "pipeline", "cp": "context", "sp": "context"},
    **{"ep": "expert", "model": "tensor", "mdl": "tensor", "tp": "tensor"},
}
NOTHING_TO_TYPE = "nothing to type"
RETIRED_FLAGS = "Retired XLA flags"
LEFT_OPEN = re.compile(r"=(NAME|FOLDER|FILE|TEXT)\b")  # in the page: what only the user knows


class Hint(NamedTuple):
    """Answers another trainer's key: it is accepted (and changes nothing here) or not, and a sentence says why."""

    accepted: bool
    sentence: str
    instead: str = ""  # the words to type for it, where that is certain


class Renamed(NamedTuple):
    """Tells what to type instead: `...` stands for the value, {0} {1} for a list's entries; a dict maps values."""

    program: str
    template: str | dict[str, str]

    def hint(self, key: str, value: Any) -> Hint:
        """Returns what to say to `key`=`value`."""
        typed, certain = _fill(self.template, value)
        words, _, note = typed.partition("  # ")
        if not typed or value in NOTHING:
            return Hint(True, f"{key}={_spell(value)}, of {self.program}, is what happens here anyway")
        sentence = f"{key} is a name of {self.program}; type {words} instead{f' ({note})' if note else ''}"
        return Hint(False, sentence, words if certain else "")


class Explained(NamedTuple):
    """Explains what MinText does instead, and which value is accepted all the same: "..." is any, None none."""

    program: str
    why: str
    accepted: Any

    def hint(self, key: str, value: Any) -> Hint:
        """Returns what to say to `key`=`value`."""
        program, why, accepted = self
        if accepted == "...":
            return Hint(True, f"{key}, of {program}, has no effect here: {why}")
        if accepted is None:
            return Hint(False, f"{key}, of {program}: {why}")
        if _same(value, accepted):
            return Hint(True, f"{key}={_spell(value)}, of {program}, changes nothing: {why}")
        return Hint(False, f"{key}={_spell(value)}, of {program}: {why} ({key}={_spell(accepted)} is accepted)")


class Page(NamedTuple):
    """Holds the page's tables, by name."""

    names: dict[str, Renamed | Explained]
    values: dict[tuple[str, str], str]  # of keys that MaxText and MinText both have: `key=value`, or what to say
    sizes: dict[str, str]  # sizes that a program has together -> what else they imply there
    flags: dict[str, dict[str, str]]  # of XLA, retired: what to type instead, by value; * is any other


@functools.cache
def read_page() -> Page:
    """Returns the tables of the page. The first of a program has names, then come those that have no other name.

    A third one has sizes of models, from which the program derives further ones.

    Where src/ and configs/ were copied without docs/, there are none: such a run knows MinText's names alone.
    """
    names: dict[str, Renamed | Explained] = {}
    values: dict[tuple[str, str], str] = {}
    sizes: dict[str, str] = {}
    flags: dict[str, dict[str, str]] = {}
    program = table = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else ():
        if line.startswith("## "):
            program = table = line[3:]
        elif line.startswith(("| Keys |", "| Sizes |", f"| {program} |")):
            table = line.split(" | ")[0].removeprefix("| ")
        elif line.startswith("| `"):
            left, right = (cell.strip() for cell in line.strip("| ").split(" | "))
            keys = [code.partition("=") for code in re.findall(r"`([^`]*)`", left)]
            if table == "Sizes":
                sizes[keys[0][0]] = right.strip("`")
            elif table == "Keys":
                for name, equals, value in keys:
                    accepted = value if value == "..." else parse(value, str(PAGE)) if equals else None
                    names[name] = Explained(program, right, accepted)
            elif program == RETIRED_FLAGS:
                flags[keys[0][0]] = _by_value(right)
            elif keys[0][1]:
                values[keys[0][0], keys[0][2]] = right
            else:
                names[keys[0][0]] = Renamed(program, right.strip("`") if right.startswith("`") else _by_value(right))
    return Page(names, values, sizes, flags)


def _by_value(cell: str) -> dict[str, str]:
    return dict(re.findall(rf"(\S+): (?:`([^`]*)`|{NOTHING_TO_TYPE})", cell))


def migration_hint(key: str, value: Any) -> Hint | None:
    """Returns what to say to `key`=`value`, a parsed value, if `key` is a name of another trainer's; else None."""
    names = read_page().names
    name = key if key in names else next((name for name in names if fnmatch.fnmatchcase(key, name)), None)
    return names[name].hint(key, value) if name else None


def meant(key: str) -> str:
    """Returns ` Did you mean ...?` with keys like this one, in which a mesh axis may have another's word; or ""."""
    match = re.fullmatch(rf"(ici|dcn)_({'|'.join(MESH_WORDS)})(_parallelism)?", key)
    return did_you_mean(f"{match[1]}_{MESH_WORDS[match[2]]}_parallelism" if match else key, KEYS)


def value_hint(key: str, value: Any) -> str:
    """Returns what to type instead of others' `value` for a `key` that both have; "" if there is nothing to say."""
    hint = _about_value(key, value)
    return f" ({value}: {hint})" if hint else ""


def own_value(key: str, value: Any) -> Any:
    """Returns how MinText spells MaxText's parsed `value` for a `key` that both have: mostly as it is."""
    hint = _about_value(key, value)
    return Plain(hint.strip("`").removeprefix(f"{key}=")) if hint.startswith("`") else value


def is_maxtext_default(key: str, value: Any) -> bool:
    """Returns whether MaxText's base.yml has this `value` for a `key` without effect: typed, it asks for nothing."""
    return _about_value(key, value) == NOTHING_TO_TYPE


def _about_value(key: str, value: Any) -> str:
    rows = read_page().values.items()
    return next((hint for (name, theirs), hint in rows if name == key and _same(value, Plain(theirs))), "")


def retired_flag(name: str, value: str) -> str | None:
    """Returns what to type for a retired flag of XLA; "" if XLA does so by itself, None if this value is not listed."""
    rows = read_page().flags.get(name, {}).items()
    return next((typed for theirs, typed in rows if theirs == "*" or _same(Plain(value), Plain(theirs))), None)


def environment_notes(variables: Iterable[str]) -> list[str]:
    """Returns a line for each environment variable that would set a key in MaxText (M_STEPS), where it does nothing."""
    keys = {name: name[2:].lower() for name in variables if name.startswith("M_") and name.isupper()}
    return [
        f"{name} in the environment, by which MaxText sets a key, has no effect here: type {key}=... as an argument"
        for name, key in sorted(keys.items())
        if key in KEYS or migration_hint(key, Plain("..."))
    ]


def _fill(template: str | dict[str, str], value: Any) -> tuple[str, bool]:
    """Returns `template` with the value in it, and whether that is certain; of a dict's unknown value all answers."""
    if isinstance(template, dict):
        bare = Plain(_spell(value).rpartition(".")[2])  # jnp.bfloat16 and layers.GELU are Python in Pax's files
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
    """Returns a line with the whole corrected command, or "" unless `load` accepts it."""
    words = [corrected for word in joined(argv) for corrected in _corrected(word)]
    words += _implied(argv, {word.partition("=")[0] for word in words})
    files = [word for word in words if "=" not in word]  # of which a recipe that a word stands for is the last
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
    """Returns the settings beyond `given` keys that another program derives from sizes on its command line.

    Where it would derive them from sizes that only it knows, it is a word that no command takes.
    """
    typed = {key.lstrip("-"): value for key, _, value in (word.partition("=") for word in joined(argv))}
    settings: list[str] = []
    for names, template in read_page().sizes.items():
        sizes = {name: typed[name] for name in names.split() if typed.get(name, "").isdecimal()}
        if sizes and len(sizes) < len(names.split()):
            return [f"unknown={names}"]
        for one, sign, other in re.findall(r"{(\w+)([/*])(\w+)}", template) if sizes else ():
            a, b = int(sizes[one]), int(sizes.get(other, other))
            if not b or (sign == "/" and a % b):
                return [f"unknown={one}"]
            template = template.replace(f"{{{one}{sign}{other}}}", str(a // b if sign == "/" else a * b))
        settings += template.split() if sizes and template != NOTHING_TO_TYPE else []
    return [setting for setting in settings if setting.partition("=")[0] not in given]


def _corrected(word: str) -> list[str]:
    """Returns what a word of a command line certainly meant; the word itself where that is unknown."""
    key, equals, text = word.lstrip("-").partition("=")
    if not equals and not Path(word).exists() and (CONFIGS / Path(word).name).is_file():
        return [f"configs/{Path(word).name}"]  # such as src/maxtext/configs/base.yml
    if not equals or key.partition(".")[0] in KEYS:
        return [f"{key}{equals}{text}"]
    if hint := migration_hint(key, parse_argument(text, None, key)):
        return [] if hint.accepted else shlex.split(hint.instead) or [word]
    near = difflib.get_close_matches(key, KEYS, n=2, cutoff=0.9)
    return [f"{near[0]}={text}"] if len(near) == 1 else [word]
