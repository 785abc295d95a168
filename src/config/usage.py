"""Describes how a command is used, and answers `--help`."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Usage(NamedTuple):
    """Describes a command for --help."""

    text: str  # what it does, and its command lines
    groups: tuple[str, ...] = ()  # prefixes of the titles in base.yml that its own keys are under

    @property
    def command(self) -> str:
        """The command's name, such as src.train."""
        return re.findall(r"python -m (\S+)", self.text)[0]


TRAIN = Usage(
    """Trains a model.
CONFIG is a YAML file, a Python file with get_config(), or the folder of a run to continue (with another run_name:
to start again). Without CONFIG, key=value arguments apply to configs/base.yml.

python -m src.train CONFIG [key=value ...]        such as: python -m src.train configs/quickstart.yml steps=100"""
)


def help_for(argv: Iterable[str], usage: Usage = TRAIN) -> str | None:
    """Returns the answer to `--help` or `--help WORD`; None without `--help`. Raises UserError for an unknown WORD."""
    words = list(argv)
    for position, argument in enumerate(words):
        if argument in ("--help", "-h"):
            from src.config import base_yml

            topics = [topic for topic in words[position + 1 :] if "=" not in topic]
            return (
                base_yml.help_text(topics[0]) if topics else base_yml.overview(usage.text, usage.command, usage.groups)
            )
    return None
