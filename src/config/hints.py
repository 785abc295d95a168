"""Imports the hints about other trainers' names when they are first needed."""

from types import SimpleNamespace
from typing import Any

from src.config.schema import KEYS
from src.system.errors import did_you_mean
from src.system.imports import optional

# Used if src/extras/ has been deleted: only MinText's own names are known.
_NOTHING_KNOWN = SimpleNamespace(
    meant=lambda key: did_you_mean(key, KEYS),
    migration_hint=lambda key, value: None,
    value_hint=lambda key, value: "",
    own_value=lambda key, value: value,
    is_maxtext_default=lambda key, value: False,
    retired_flag=lambda name, value: None,
    environment_notes=lambda variables: [],
    corrected_command=lambda argv, load: "",
)


def hints() -> Any:
    """Returns the module `src/extras/migration_hints.py`, or a substitute without hints if it has been deleted."""
    return optional("migration_hints") or _NOTHING_KNOWN
