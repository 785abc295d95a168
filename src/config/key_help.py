"""Answers `--help`: how a command is used, what its own keys do, and the names of the others by group."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from src.config.base_yml import key_lines, keys_by_group
from src.config.migration_hints import migration_hint, with_own_mesh_word
from src.config.schema import KEYS
from src.config.yaml import Plain
from src.errors import did_you_mean


class Usage(NamedTuple):
    """How a command is used."""

    text: str  # what it does, and its command lines
    groups: tuple[str, ...] = ()  # how the titles of base.yml begin whose keys are its own


TRAIN = Usage(
    """Trains a model.

python -m src.train CONFIG [key=value ...]        such as: python -m src.train configs/base.yml steps=100
python -m src.train --help KEY                    what a key does, and its default

CONFIG is a YAML file, a Python file with get_config(), or the folder of a run, which then goes on (with another
run_name: begins anew); without one, configs/base.yml."""
)


def help_for(argv: Sequence[str], usage: Usage = TRAIN) -> str | None:
    """Returns what `--help` or `--help KEY` asks for in a command line of this usage; None where it has no `--help`."""
    for position, argument in enumerate(argv):
        if argument in ("--help", "-h"):
            topics = [topic for topic in argv[position + 1 :] if "=" not in topic]
            return help_text(topics[0]) if topics else _overview(usage)
    return None


def help_text(key: str) -> str:
    """Returns base.yml's lines about a key, under its group's title; for another name, what to type or the nearest."""
    if key in KEYS:
        return f"{KEYS[key].group}\n{key_lines(KEYS[key])}"
    if hint := migration_hint(key, Plain("...")):
        return hint.sentence
    return f"there is no key {key}.{did_you_mean(with_own_mesh_word(key), KEYS)} --help alone lists all keys."


def _overview(usage: Usage) -> str:
    own, others = [], []
    for title, keys in keys_by_group().items():
        if title.startswith(usage.groups):
            own += [f"\n{title}", *map(key_lines, keys)]
        else:
            names = textwrap.fill("  ".join(key.name for key in keys), 118)
            others.append(f"\n{title}\n{textwrap.indent(names, '  ')}")
    heading = "\nAll other keys" if own else "\nKeys, with their defaults in configs/base.yml"
    return "\n".join([usage.text, *own, heading, *others])
