"""Answers other trainers' names, from the table in foreign_keys.yml.

`python -m src.config.foreign_keys > docs/from_maxtext_and_pax.md` writes the table as a page.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from src.config.yaml import NOTHING, Plain, dump, literal, parse

TABLE = Path(__file__).with_suffix(".yml")
# What others call the axes of the mesh in the keys of their sizes.
MESH_WORDS = {
    **{"dp": "data", "replica": "data", "stage": "pipeline", "pp": "pipeline", "cp": "context", "sp": "context"},
    **{"ep": "expert", "model": "tensor", "mdl": "tensor", "tp": "tensor"},
}
LEFT_OPEN = re.compile(r"=(NAME|FOLDER|FILE|TEXT)\b")  # in the table: what only the user knows


class Answer(NamedTuple):
    """What a foreign key gets: accepted (it changes nothing here) or not, and a sentence."""

    accepted: bool
    sentence: str
    instead: str = ""  # the words to type for it, where that is certain


@functools.cache
def table() -> dict[str, Any]:
    """foreign_keys.yml: a section a program."""
    return parse(TABLE.read_text(encoding="utf-8"), str(TABLE))


@functools.cache
def _entries() -> dict[str, tuple[Callable[..., Answer], str, tuple[Any, ...]]]:
    """By name, what makes its answer of its program, the key, the value and these arguments."""
    entries = {}
    for program, section in table().items():
        entries |= {name: (_renamed, program, (template,)) for name, template in section["renamed"].items()}
        for why, keys in reasons(section):
            entries |= {name: (_explained, program, (why, accepted)) for name, accepted in keys.items()}
    return entries


def answer(key: str, value: Any) -> Answer | None:
    """What to say to `key`=`value`, a parsed value, where `key` is a name of another trainer's; else None."""
    entries = _entries()
    name = key if key in entries else next((name for name in entries if fnmatch.fnmatchcase(key, name)), None)
    if name is None:
        return None
    make, program, arguments = entries[name]
    return make(program, key, value, *arguments)


def with_own_mesh_word(key: str) -> str:
    """Returns the key of a mesh axis's size (`ici_tp_parallelism`) with our word for the axis; others as they are."""
    match = re.fullmatch(rf"(ici|dcn)_({'|'.join(MESH_WORDS)})(_parallelism)?", key)
    return f"{match[1]}_{MESH_WORDS[match[2]]}_parallelism" if match else key


def value_hint(key: str, value: Any) -> str:
    """What to type instead of MaxText's `value` for a `key` that both have; empty where there is nothing to say."""
    hint = table()["MaxText"]["values"].get(key, {}).get(str(value), "")
    return f" (MaxText's {value}: {hint})" if hint else ""


def reasons(section: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What MinText does instead of a program's keys, and by key the one value that is accepted, or any or never."""
    for kind, accepted in (("absent", "never"), ("no_effect", "any")):
        for group in section.get(kind, []):
            keys = group["keys"]
            yield group["why"], keys if isinstance(keys, dict) else dict.fromkeys(keys, Plain(accepted))
    for feature, keys in section.get("missing", {}).items():
        yield f"{feature} is not in this version", keys


def _renamed(program: str, key: str, value: Any, template: str | dict[str, str]) -> Answer:
    typed, certain = _fill(template, value)
    words, _, note = typed.partition("  # ")
    if not typed:
        return Answer(True, f"{key}={_spell(value)}, of {program}, is what happens here anyway")
    sentence = f"{key} is a name of {program}; type {words} instead{f' ({note})' if note else ''}"
    return Answer(False, sentence, words if certain else "")


def _explained(program: str, key: str, value: Any, why: str, accepted: Any) -> Answer:
    if accepted == "any":
        return Answer(True, f"{key}, of {program}, has no effect here: {why}")
    if accepted == "never":
        return Answer(False, f"{key}, of {program}: {why}")
    if _same(value, accepted):
        return Answer(True, f"{key}={_spell(value)}, of {program}, changes nothing: {why}")
    return Answer(False, f"{key}={_spell(value)}, of {program}: {why} ({key}={_spell(accepted)} is accepted)")


def _fill(template: str | dict[str, str], value: Any) -> tuple[str, bool]:
    """`template` with the value in it, and whether it is known; else where it answers value by value, all answers."""
    if isinstance(template, dict):
        bare = Plain(_spell(value).rpartition(".")[2])  # jnp.bfloat16 and layers.GELU are Python in Pax's files
        for theirs, typed in template.items():
            if _same(value, Plain(theirs)) or _same(bare, Plain(theirs)) or fnmatch.fnmatchcase(bare, theirs):
                return typed, theirs != "*" and not LEFT_OPEN.search(typed)
        return " or ".join(dict.fromkeys(typed for typed in template.values() if typed)), False
    if "{0}" not in template:
        return template.replace("{}", _spell(value)), not LEFT_OPEN.search(template)
    entries = value if isinstance(value, list) else []
    if len(entries) != len(re.findall(r"{\d}", template)):
        return re.sub(r"{\d}", "...", template), False
    return template.format(*entries), True


def _same(value: Any, other: Any) -> bool:
    return ("" if value in NOTHING else literal(value)) == ("" if other in NOTHING else literal(other))


def _spell(value: Any) -> str:
    return str(value) if isinstance(value, str) else dump(literal(value)).replace('"', "")


def document() -> str:
    """The page docs/from_maxtext_and_pax.md."""
    lines = [
        "<!-- Written by `python -m src.config.foreign_keys`; edit src/config/foreign_keys.yml instead. -->",
        "",
        "# From MaxText, Pax and other trainers",
        "",
        "Where MaxText has the same thing, MinText's key has MaxText's name and takes its values, so that",
        "`python3 MaxText/train.py MaxText/configs/base.yml key=value ...` becomes",
        "`python -m src.train configs/base.yml key=value ...`. What differs is below. Typed on a command line or in a",
        "YAML file, each of these names gets the same answer there, and a mistyped one the nearest names. A `*` stands",
        "for any letters.",
    ]
    for program, section in table().items():
        lines += ["", f"## {program}", "", f"| {program} | MinText |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(template)} |" for name, template in section["renamed"].items()]
        for key, values in section.get("values", {}).items():
            lines += [f"| `{key}={value}` | {hint} |" for value, hint in values.items()]
        lines += ["", "Those with a value are accepted with that one, those with `=...` with any.", ""]
        lines += ["| Keys | What MinText does |", "|---|---|"]
        for why, keys in reasons(section):
            spelled = {
                name: {"any": "=...", "never": ""}.get(_spell(off), f"={_spell(off)}") for name, off in keys.items()
            }
            names = [f"`{name}{accepted}`" for name, accepted in spelled.items()]
            lines.append(f"| {', '.join(names)} | {why} |")
    return "\n".join(lines) + "\n"


def _cell(template: str | dict[str, str]) -> str:
    if isinstance(template, dict):
        cells = (f"{value}: {f'`{typed}`' if typed else 'nothing to type'}" for value, typed in template.items())
        return "; ".join(cells)
    return f"`{template.replace('{}', '...')}`"


if __name__ == "__main__":
    print(document(), end="")
