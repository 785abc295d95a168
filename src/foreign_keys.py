"""Answers MaxText's and Pax's names, from the table in foreign_keys.yml.

`python -m src.foreign_keys > docs/from_maxtext_and_pax.md` writes the table as a page.
"""

import fnmatch
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.config_yaml import NOTHING, Plain, base, dump, literal, parse

TABLE = Path(__file__).with_suffix(".yml")
PROGRAMS = ("MaxText", "Pax")


@dataclass(frozen=True)
class Answer:
    """What a foreign key gets: accepted (it changes nothing here) or not, and a sentence."""

    accepted: bool
    sentence: str


@functools.cache
def table() -> dict[str, Any]:
    """foreign_keys.yml: a section a program, in each `renamed`, `absent` and `no_effect`."""
    return parse(TABLE.read_text(encoding="utf-8"), str(TABLE))


def answer(key: str, value: Any) -> Answer | None:
    """What to say to `key`=`value`, a parsed value, where `key` is a name of MaxText's or Pax's; else None."""
    for name_fits in (str.__eq__, fnmatch.fnmatchcase):
        for program in PROGRAMS:
            section = table()[program]
            for name, template in section["renamed"].items():
                if name_fits(key, name):
                    return _renamed(program, key, value, template)
            for group in section["absent"]:
                for name in group["keys"]:
                    if name_fits(key, name):
                        return _absent(program, key, value, group, name)
            for group in section["no_effect"]:
                for name in group["keys"]:
                    if name_fits(key, name):
                        return Answer(True, f"{key}, of {program}, has no effect here: {group['why']}")
    return None


def value_hint(key: str, value: Any) -> str:
    """What to type instead of MaxText's `value` for a `key` that both have; empty where there is nothing to say."""
    hint = table()["MaxText"]["values"].get(key, {}).get(str(value), "")
    return f" (MaxText's {value}: {hint})" if hint else ""


def _renamed(program: str, key: str, value: Any, template: str | dict[str, str]) -> Answer:
    typed = _fill(template, value)
    if typed == "":
        return Answer(True, f"{key}={_spell(value)}, of {program}, is what happens here anyway")
    return Answer(False, f"{key} is a name of {program}; type {typed} instead")


def _absent(program: str, key: str, value: Any, group: Mapping[str, Any], name: str) -> Answer:
    if isinstance(group["keys"], list):
        return Answer(False, f"{key}, of {program}: {group['why']}")
    off = group["keys"][name]
    if _same(value, off):
        return Answer(True, f"{key}={_spell(value)}, of {program}, changes nothing: {group['why']}")
    return Answer(False, f"{key}={_spell(value)}, of {program}: {group['why']} ({key}={_spell(off)} is accepted)")


def _fill(template: str | dict[str, str], value: Any) -> str:
    """`template` with the value in it; where it answers value by value, that answer, or all of them."""
    if isinstance(template, dict):
        bare = Plain(_spell(value).rpartition(".")[2])  # jnp.bfloat16 and layers.GELU are Python in Pax's files
        for theirs, typed in template.items():
            if _same(value, Plain(theirs)) or _same(bare, Plain(theirs)):
                return typed
        return " or ".join(dict.fromkeys(typed for typed in template.values() if typed))
    if "{0}" not in template:
        return template.replace("{}", _spell(value))
    entries = value if isinstance(value, list) else []
    if len(entries) != len(re.findall(r"{\d}", template)):
        return re.sub(r"{\d}", "...", template)
    return template.format(*entries)


def _same(value: Any, other: Any) -> bool:
    return ("" if value in NOTHING else literal(value)) == ("" if other in NOTHING else literal(other))


def _spell(value: Any) -> str:
    return str(value) if isinstance(value, str) else dump(literal(value)).replace('"', "")


def _typed_keys(template: str | dict[str, str]) -> Iterator[str]:
    """The keys of base.yml that a `renamed` entry says to type."""
    texts = template.values() if isinstance(template, dict) else [template]
    for key in re.findall(r"(\w+)[\w.]*=", " ".join(texts)):
        if key in base().defaults:
            yield key


def document() -> str:
    """The page docs/from_maxtext_and_pax.md."""
    return "\n".join([*_opening(), *_maxtext_page(), *_pax_page()]) + "\n"


def _opening() -> list[str]:
    return [
        "<!-- Written by `python -m src.foreign_keys`; edit src/foreign_keys.yml instead. -->",
        "",
        "# From MaxText and Pax",
        "",
        "Where MaxText has the same thing, MinText's key has MaxText's name and takes its values, so that",
        "`python3 MaxText/train.py MaxText/configs/base.yml key=value ...` becomes",
        "`python -m src.train configs/base.yml key=value ...`. What differs is below. Typed on a command line or in a",
        "YAML file, each of these names gets the same answer there, and a mistyped one the nearest names. A `*` stands",
        "for any letters.",
        "",
    ]


def _maxtext_page() -> list[str]:
    section = table()["MaxText"]
    lines = ["## MaxText", "", "### Another name here", "", "| MaxText | MinText |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(template)} |" for name, template in section["renamed"].items()]
    lines += ["", "### Other values", "", "| MaxText | MinText |", "|---|---|"]
    for key, values in section["values"].items():
        lines += [f"| `{key}={value}` | {hint} |" for value, hint in values.items()]
    return [*lines, *_absent_and_ignored(section)]


def _absent_and_ignored(section: Mapping[str, Any]) -> list[str]:
    lines = ["", "### Not here", "", "A value in the table is accepted: it is what MinText does.", ""]
    lines += ["| Keys | What MinText does |", "|---|---|"]
    for group in section["absent"]:
        if isinstance(group["keys"], list):
            names = [f"`{name}`" for name in group["keys"]]
        else:
            names = [f"`{name}={_spell(off)}`" for name, off in group["keys"].items()]
        lines.append(f"| {', '.join(names)} | {group['why']} |")
    lines += ["", "### Accepted without effect", "", "| Keys | Why |", "|---|---|"]
    for group in section["no_effect"]:
        lines.append(f"| {', '.join(f'`{name}`' for name in group['keys'])} | {group['why']} |")
    return lines


def _pax_page() -> list[str]:
    section = table()["Pax"]
    lines = ["", "## Pax", "", "### From Pax's variables and flags", "", "| Pax | MinText |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(template)} |" for name, template in section["renamed"].items()]
    lines += [
        "",
        "Pax's mesh shapes are [replica, data, mdl]: replicas of the weights (MinText's data), weights sharded over",
        "the batch's axis (fsdp), and within a layer (tensor).",
        "",
        "### From MinText's keys",
        "",
        "| MinText | Pax |",
        "|---|---|",
    ]
    backwards: dict[str, list[str]] = {}
    for name, template in section["renamed"].items():
        for key in dict.fromkeys(_typed_keys(template)):
            backwards.setdefault(key, []).append(f"`{name}`")
    lines += [f"| `{key}` | {', '.join(backwards[key])} |" for key in base().defaults if key in backwards]
    lines += [
        "",
        "### An experiment of Pax's",
        "",
        "`C4Spmd22BAdam2xv4_128`, 22 billion parameters on two slices of v4-128, on synthetic data:",
        "",
        "```bash",
        "python -m src.train configs/base.yml " + " \\\n  ".join(example_arguments()),
        "```",
    ]
    return [*lines, *_absent_and_ignored(section)]


def example_arguments() -> list[str]:
    """The example experiment of the table as arguments of MinText."""
    arguments = ["dataset_type=synthetic", "normalization=layer", "mlp_bias=true"]
    for name, value in table()["example"].items():
        parsed = parse(value, name)
        arguments += _fill(table()["Pax"]["renamed"][name], parsed).split()
    return arguments


def _cell(template: str | dict[str, str]) -> str:
    if isinstance(template, dict):
        return "; ".join(
            f"{value}: {f'`{typed}`' if typed else 'nothing to type'}" for value, typed in template.items()
        )
    return f"`{template.replace('{}', '...')}`"


if __name__ == "__main__":
    print(document(), end="")
