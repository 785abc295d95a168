"""Answers `--help`: how a command is used, what its own keys do, and the names of the others by group."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from src.config.base_yml import key_lines
from src.config.migration_hints import migration_hint, with_own_mesh_word
from src.config.schema import KEYS
from src.config.yaml import Plain
from src.errors import did_you_mean


class Usage(NamedTuple):
    """How a command is used.

    text: what it does, and its command lines.
    groups: the groups of base.yml whose keys are its own, by how their titles begin.
    """

    text: str
    groups: tuple[str, ...] = ()


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
    groups: dict[str, list[str]] = {}
    for key in KEYS.values():
        groups.setdefault(key.group, []).append(key.name)
    own = [group for group in groups if group.startswith(usage.groups)]
    explained = (f"\n{group}\n" + "\n".join(key_lines(KEYS[key]) for key in groups.pop(group)) for group in own)
    return "\n".join(
        [
            usage.text,
            *explained,
            "\nKeys, with their defaults in configs/base.yml" if not own else "\nAll other keys",
            *(f"\n{group}\n{textwrap.indent(textwrap.fill('  '.join(groups[group]), 118), '  ')}" for group in groups),
        ]
    )
