"""Reaches the answers to other trainers' names, which are imported once something is not understood."""

from types import SimpleNamespace
from typing import Any

from src.config.schema import KEYS
from src.system.errors import did_you_mean
from src.system.imports import optional

# What is answered if src/extras/ has been deleted: MinText's own names are all that is known.
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
    """Returns the module `src/extras/migration_hints.py`."""
    return optional("migration_hints") or _NOTHING_KNOWN
