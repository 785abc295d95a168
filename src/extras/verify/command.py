"""`python -m src.verify`: shrinks a config, runs checks, prints and writes what they found."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from src.config.schema import Config
from src.config.usage import Usage
from src.extras.command_files import check_outputs, write_output
from src.extras.verify import meshes
from src.extras.verify.subject import FAIL, NOT_APPLICABLE, PASS, Row, Subject
from src.run.run_setup import configured
from src.system.errors import UserError, show
from src.system.imports import named

USAGE = Usage(
    """Checks a config, and the code that it runs, in small and on virtual devices: before chips are rented.

python -m src.verify CONFIG [key=value ...] [mesh=all|as_configured|AXIS=N,...] [checks=all|LETTERS] [report=FILE]
    a meshes   b derivatives   c rewrites   d documents   e movement   f resume   g decoding   h counts   i conversion
    j compiled program. Without checks=: a, b, d, e."""
)
FAILED = 3  # exit code


class Check(NamedTuple):
    """A check: its rows, and what it says of itself."""

    rows: str  # module:function of the subject; a's also takes meshes
    title: str


CHECKS = {"a": Check("src.extras.verify.meshes:rows", "every mesh computes what one device does")}
DEFAULT = "abde"


class Report(NamedTuple):
    """All rows; the exit code is 3 if any failed."""

    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """0, or 3 if a row failed."""
        return FAILED * any(row.status == FAIL for row in self.rows)


def main(argv: Sequence[str]) -> Report | None:
    """Runs the command line `argv`; returns what was found, None for --help; raises UserError."""
    own, words = _own(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", meshes.DEVICES)
    config = configured(words, USAGE, joins=False)
    if config is None:
        return None
    letters = _letters(own["checks"])
    if own["report"]:
        check_outputs({"report": own["report"]})
    raise NotImplementedError


def _own(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates verify's own arguments, which are no keys of the config."""
    own = dict.fromkeys(("mesh", "checks", "report", "golden"), "")
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            words.append(word)
    return own, words
