"""Numbers the rules by which data become batches, so that a run keeps the rules that it began with.

A change of the code after which the same data, seed and step give other tokens belongs to a new version: the old code
stays, for an `InputSpec` of older `rules`.
"""

from collections.abc import Mapping
from typing import Any

PRESENT_RULES = 2
RULES_FACT = "data rules"  # an entry of the data's fingerprint

# What each version changed.
_CHANGES = {
    2: "rows that share a document begin at different places of it; of a folder, linked folders are read and pictures, "
    "patches, JSON objects and names that begin with _ are not; a byte order mark is not text; a bos or eos that a "
    "text spells is not doubled; chats heed tools, system, chat_template_kwargs, weight and train"
}


def rules_of(fingerprint: Mapping[str, Any]) -> int:
    """Returns the version by a checkpoint's fingerprint of the data; the first checkpoints do not name theirs."""
    return fingerprint.get(RULES_FACT, 1)


def describe_rules(version: int) -> list[str]:
    """Returns a line that says what a run of older rules does not do; none for the present rules."""
    changes = "; ".join(_CHANGES[later] for later in range(version + 1, PRESENT_RULES + 1))
    line = f"the run keeps its rules of data, version {version}; by the present ones (accept_changes=[data_rules])"
    return [f"{line} {changes}"] if changes else []
