"""Names the facts on which the sequence of training batches depends, so that a resumed run sees what changed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from src.data.rules import RULES_FACT
from src.data.types import Fingerprint, InputSpec, TrainData
from src.errors import changed_keys


class Fact(NamedTuple):
    """Says what an entry of `data_fingerprint` is about."""

    source: str | None  # the source's name, "" for the only one; None where the entry is about the run
    name: str  # the fact, as the source's own fingerprint has it; the entry itself where it is about the run

    @classmethod
    def of(cls, entry: str, sources: Sequence[str]) -> Self:
        """Reads an entry of a run with these sources."""
        for source in sorted(filter(None, sources), key=len, reverse=True):
            if entry.startswith(prefix := f"source {source} "):
                return cls(source, entry.removeprefix(prefix))
        if entry.startswith("source ") and entry != "source weights":
            return cls("", entry.removeprefix("source "))
        return cls(None, entry)

    @property
    def is_file(self) -> bool:
        """Says whether it is one file's size, which fingerprints list only where files are few."""
        return self.source is not None and self.name.startswith("file ")


def data_fingerprint(inputs: InputSpec, data: TrainData, global_batch: int) -> Fingerprint:
    """Returns all facts on which training batches depend: while they are equal, so is the batch of each step."""
    facts: Fingerprint = {}
    for name, source in zip(data.names, data.sources, strict=True):
        prefix = f"source {name} " if name else "source "
        facts |= {f"{prefix}{fact}": value for fact, value in source.fingerprint().items()}
    if len(data.sources) > 1:
        shares = (f"{name} {weight:g}" for name, weight in zip(data.names, data.weights, strict=True))
        facts["source weights"] = ", ".join(shares)
    tokenizer = inputs.tokenizer.fingerprint() if inputs.tokenizer else {}
    facts |= {f"tokenizer {fact}": value for fact, value in tokenizer.items()}
    if inputs.data.use_sft:
        template = (inputs.tokenizer.chat_template or "").encode()
        facts["chat template"] = hashlib.sha256(template).hexdigest()[:16]
        facts["sft_train_on_completion_only"] = inputs.data.sft_train_on_completion_only
        if inputs.batch.packing:
            facts["packing of conversations"] = "whole"  # they were cut before
    if not inputs.batch.packing and inputs.batch.long_documents == "truncate":
        facts["long_documents"] = inputs.batch.long_documents
    if inputs.batch.batch_transform:
        facts["batch_transform"] = inputs.batch.batch_transform
    return facts | {
        RULES_FACT: inputs.rules,
        "global batch": global_batch,
        "max_target_length": inputs.batch.max_target_length,
        "packing": inputs.batch.packing,
        "data_shuffle_seed": inputs.data.data_shuffle_seed,
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], of: str = "") -> list[str]:
    """Lists how two fingerprints differ, fact by fact, each name preceded by `of`."""
    changes = []
    for name in changed_keys(old, new):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += differences(before, after, f"{of}{name} ")
        else:
            changes.append(f"{of}{name} {before!r} there, {after!r} here")
    return changes
