"""Converts a checkpoint's position in its data to a position in the data that the config describes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from src.config.dataset_spec import SETTINGS, all_specs, train_specs, train_weights
from src.config.schema import Data
from src.data.batch_schedule import RAMP_KEYS
from src.data.fingerprint import EVALUATION, TOKENIZER_KEYS
from src.data.mixture import Mixture
from src.data.rules import RULES_FACT, describe_rules, rules_of
from src.data.stream_positions import documents_consumed, remap_position
from src.data.types import DataPosition
from src.system.errors import UserError, changed_keys, first_few

# The keys that can change each entry of the data's fingerprint: `accept_changes` with one of them accepts the change.
# Error messages recommend the first.
SOURCE_KEYS = ("dataset_path", *(keys[0] for keys in SETTINGS.values()), "datasets", "use_sft")
HELD_OUT_KEYS = ("eval_interval", "eval_fraction", "eval_dataset_path", "eval_dataset_name", "eval_datasets")
_ACCEPTED_BY = """
global batch: per_device_batch_size gradient_accumulation_steps
batch ramp: RAMP
packing of conversations: packing SOURCE
long_documents: long_documents packing
max_target_length: max_target_length
packing: packing
batch_transform: batch_transform
data_shuffle_seed: data_shuffle_seed
code batch_transform: batch_transform
code loss: loss
data rules: data_rules
source max_document_bytes: max_document_bytes SOURCE
source pieces: SOURCE max_document_bytes
source part: HELD_OUT SOURCE
source weights: datasets SOURCE
source code: dataset_factory SOURCE
source seed: data_shuffle_seed SOURCE
source vocab_size: vocab_size SOURCE
tokenizer: TOKENIZER
chat template: tokenizer_path use_sft
sft_train_on_completion_only: sft_train_on_completion_only use_sft
evaluation: EVALUATION eval_metrics decode_metrics evaluation
"""
_GROUPS = {
    "RAMP": RAMP_KEYS,
    "SOURCE": SOURCE_KEYS,
    "HELD_OUT": HELD_OUT_KEYS,
    "TOKENIZER": TOKENIZER_KEYS,
    "EVALUATION": HELD_OUT_KEYS[2:],
}
ACCEPTED_BY = {
    entry: tuple(key for word in keys.split() for key in _GROUPS.get(word, (word,)))
    for entry, _, keys in (line.partition(": ") for line in _ACCEPTED_BY.strip().splitlines())
}
LATER = {"file", "contents", "lines", "code", EVALUATION}  # first words of entries that older fingerprints lack
Facts = Mapping[str, Any]  # a checkpoint's meta, or a data fingerprint

# Entries about batches, which do not depend on the data.
_SIZES = ("global batch", "batch ramp", "max_target_length")
BATCH_FACTS = {*_SIZES, "long_documents", "packing", "batch_transform", "data_shuffle_seed"}


class Fact(NamedTuple):
    """Identifies the subject of an entry of `data_fingerprint`."""

    source: str | None  # the source's name, "" for a single source; None for entries about the run
    name: str  # as in the source's own fingerprint; the whole entry if it is about the run

    @classmethod
    def of(cls, entry: str, sources: Collection[str]) -> Self:
        """Parses an entry's name, from the fingerprint of a run with these sources."""
        entry = entry.removeprefix(f"{EVALUATION} ")
        for source in sorted(filter(None, sources), key=len, reverse=True):
            if entry.startswith(prefix := f"source {source} "):
                return cls(source, entry.removeprefix(prefix))
        if entry.startswith("source ") and entry != "source weights":
            return cls("", entry.removeprefix("source "))
        return cls(None, entry)

    @property
    def is_file(self) -> bool:
        """Whether the entry is the size of a file; fingerprints list sizes only if there are few files."""
        return self.source is not None and self.name.startswith("file ")


def data_position(
    step: int, streams: np.ndarray, meta: Facts, data: Data, accept_changes: Sequence[str], fingerprint: Facts
) -> tuple[DataPosition, list[str]]:
    """Finds the point at which a checkpoint's run continues in the data of `fingerprint`; also returns messages.

    `streams` are the checkpoint's positions, int32 [B, S, 2]. If the user accepts another global batch size, row length
    or mixture, each source continues after the number of documents, or rows of tokens, already taken. Raises UserError
    if the data differ and `accept_changes` does not allow it, or if the data are one stream per process, and the number
    of processes differs.
    """
    messages = accepted_changes(meta, data, accept_changes, fingerprint)
    messages += describe_rules(rules_of(fingerprint))
    streams, moved = remapped_streams(streams, meta, data, fingerprint["global batch"])
    everyones = meta.get("streams", [{}] * jax.process_count())
    if len(everyones) != jax.process_count():
        raise UserError(
            f"the data are streams, one per process: the checkpoint is of {len(everyones)} processes, and this job has "
            f"{jax.process_count()}. Use the checkpoint's number; numbered documents (dataset_type=parquet, "
            "array_record, tokens, or grain.MapDataset) resume with any number"
        )
    place = DataPosition(streams, *rows_consumed(step, meta, data, fingerprint), everyones[jax.process_index()])
    return place, [*messages, *moved]


def accepted_changes(meta: Facts, data: Data, accept_changes: Sequence[str], fingerprint: Facts) -> list[str]:
    """Describes each change since the checkpoint in a line; raises UserError unless all are accepted.

    EVALUATION in `accept_changes` accepts all changes that affect only evaluations.
    """
    old = {RULES_FACT: rules_of(meta["data"]), **meta["data"]}
    sources = {*source_names(meta), *(spec.name for spec in all_specs(data))}
    facts = {name: Fact.of(name, sources) for name in {**old, **fingerprint}}
    # Older checkpoints lack some kinds of facts. If only one side has facts of a kind, these are not compared.
    kinds = {
        name: {(fact.source, word.split(" ")[0]) for word in (name, fact.name) if word.split(" ")[0] in LATER}
        for name, fact in facts.items()
    }
    known = set.intersection(*({kind for name in listing for kind in kinds[name]} for listing in (old, fingerprint)))
    unknown = [name for name in facts if (name in old) != (name in fingerprint) and not kinds[name] <= known]
    changes = {
        name: f"{name}: {_changed(old.get(name), fingerprint.get(name), facts[name])}"
        for name in changed_keys(old, fingerprint)
        if name not in unknown
    }
    accepting = {name: accepted_by(name, facts[name]) for name in changes}
    if refused := [name for name in changes if not set(accept_changes).intersection(accepting[name])]:
        refused.sort(key=lambda name: not facts[name].is_file)  # sizes of files tell a user the most
        listed = first_few((f"  {changes[name]}" for name in refused), "\n")
        keys = ", ".join(dict.fromkeys(accepting[name][0] for name in refused))
        if BATCH_FACTS.issuperset(refused):
            what = "The checkpoint's run had different batches"
            batch_keys = ", ".join(key for name in refused for key in accepting[name])
            restore = f"Give {batch_keys} and as many devices as before"
        else:
            what, restore = "The checkpoint was saved with other data or code than the config describes", "Restore them"
        raise UserError(
            f"{what} (old -> new):\n{listed}\n"
            f"{restore}, or accept the changes, after which examples may repeat or be missed: accept_changes=[{keys}]"
        )
    missing = dict.fromkeys(name.partition(" source ")[0] for name in fingerprint if name in unknown)
    lines = [f"not compared, because the checkpoint lacks it: {first_few(missing)}"] * bool(missing)
    said = ("changed" if name.startswith(EVALUATION) else "accepted" for name in changes)
    return [*lines, *map(": ".join, zip(said, changes.values(), strict=True))]


def _changed(old: Any, new: Any, fact: Fact) -> str:
    if fact.is_file and old is None:
        return f"added, {new} bytes"
    return f"removed, it had {old} bytes" if fact.is_file and new is None else f"{old} -> {new}"


def accepted_by(entry: str, fact: Fact) -> tuple[str, ...]:
    """Lists the keys that accept a change of this entry of the data's fingerprint, if `accept_changes` names one."""
    of_mixture = fact.source and not fact.is_file
    by_default = ("datasets", *SOURCE_KEYS) if of_mixture else SOURCE_KEYS
    beginnings = (entry, " ".join(entry.split(" ")[:2]), entry.split(" ")[0])
    return next((ACCEPTED_BY[each] for each in beginnings if each in ACCEPTED_BY), by_default)


def remapped_streams(streams: np.ndarray, meta: Facts, data: Data, rows: int) -> tuple[np.ndarray, list[str]]:
    """Converts the packing streams' positions to the current sources and number of rows: int32 [B, S, 2].

    Also returns messages. New sources start from the beginning.
    """
    old_names, names = source_names(meta), [spec.name for spec in train_specs(data)]
    if old_names == names and len(streams) == rows:
        return streams, []
    new = [name for name in names if name not in old_names]
    messages = [f"the data of {name or 'the run'} start from the beginning" for name in new]
    columns = [np.zeros_like(streams[:, 0]) if name in new else streams[:, old_names.index(name)] for name in names]
    if rows != len(streams):
        taken = sum(int(documents_consumed(column).sum()) for column in columns)
        note = f"the global batch changed: the data continue after {taken:,} documents or pieces of them"
        messages += [note] * bool(streams.any())  # all positions of numbered rows are 0
        columns = [remap_position(column, rows) for column in columns]
    return np.stack(columns, axis=1), messages


def rows_consumed(step: int, meta: Facts, data: Data, fingerprint: Facts) -> tuple[int, dict[str, int]]:
    """Counts the rows since the mixture, batch or row length last changed, and each source's rows before that.

    After a change the mixture's schedule restarts, and sources without packing streams continue after their own rows;
    if the length of a row changed, pre-tokenized data continue after the same number of tokens.
    """
    old = meta["data"]
    names, weights = source_names(meta), meta.get("mixture", {"weights": [1.0]})["weights"]
    taken, before = meta.get("rows_taken", step * old["global batch"]), meta.get("rows_before", {})
    same_sources = (names, weights) == ([spec.name for spec in train_specs(data)], list(train_weights(data)))
    if same_sources and all(old.get(size) == fingerprint.get(size) for size in _SIZES):
        return taken, dict(before)
    mixture = Mixture(weights)
    rows = {name: before.get(name, 0) + mixture.count(index, taken) for index, name in enumerate(names)}
    if fingerprint["packing"]:  # without packing, each row is one document of any length
        lengths = old["max_target_length"], fingerprint["max_target_length"]
        rows = {name: count * lengths[0] // lengths[1] for name, count in rows.items()}
    return 0, rows


def source_names(meta: Facts) -> list[str]:
    """Lists the names of the sources in a checkpoint's positions."""
    return meta.get("mixture", {"names": [""]})["names"]
