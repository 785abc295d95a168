"""Numbers the rules by which data become batches, so that a run keeps the rules that it began with.

A code change that gives other tokens for the same data, seed and step needs a new version: the old code stays, for an
`InputSpec` with older `rules`.
"""

from collections.abc import Mapping
from typing import Any

PRESENT_RULES = 2
RULES_FACT = "data rules"  # an entry of the data's fingerprint

# The changes of each version, as printed to the user.
_CHANGES = {
    2: "rows that share a document begin at different offsets in it; in a folder, linked folders are read, but not "
    "pictures, patches, JSON objects and names that begin with _; a byte order mark is not text; a bos or eos spelled "
    "in a text is not doubled; chats use tools, system, chat_template_kwargs, weight and train"
}


def rules_of(fingerprint: Mapping[str, Any]) -> int:
    """Reads the version from a checkpoint's data fingerprint; the first checkpoints do not record one."""
    return fingerprint.get(RULES_FACT, 1)


def describe_rules(version: int) -> list[str]:
    """Returns a line about the changes after the rules `version` that a run keeps, in a list; [] if there are none."""
    changes = "; ".join(_CHANGES[later] for later in range(version + 1, PRESENT_RULES + 1))
    line = f"the run keeps its data rules, version {version}; with the present ones (accept_changes=[data_rules])"
    return [f"{line} {changes}"] if changes else []
