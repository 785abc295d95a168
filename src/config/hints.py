"""Loads the hints about other trainers' names, once a name or value is not understood."""

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
    """Imports `src/extras/migration_hints.py`, or a substitute without hints."""
    return optional("migration_hints") or _NOTHING_KNOWN
