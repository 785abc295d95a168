"""Names the facts on which training batches and evaluations depend, so that a run sees what changed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from src.config.source_spec import names_eval_data
from src.data.rules import RULES_FACT
from src.data.types import EvalSet, Fingerprint, InputSpec, RowSource, Source, TrainData
from src.system.errors import TransientError, UserError, changed_keys
from src.system.user_code import code_digests

EVALUATION = "evaluation"  # begins each entry on which evaluations depend, and training does not
TOKENIZER_KEYS = ("tokenizer_path", "tokenizer_type", "dataset_type")  # they alter the entries of the tokenizer
LATER = {"file", "contents", "lines", "code", EVALUATION}  # what entries that older fingerprints lack begin with


class Fact(NamedTuple):
    """Says what an entry of `data_fingerprint` is about."""

    source: str | None  # the source's name, "" for the only one; None where the entry is about the run
    name: str  # the fact, as the source's own fingerprint has it; the entry itself where it is about the run

    @classmethod
    def of(cls, entry: str, sources: Sequence[str]) -> Self:
        """Reads an entry of a run with these sources."""
        entry = entry.removeprefix(f"{EVALUATION} ")
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


def data_fingerprint(inputs: InputSpec, data: TrainData, rows: int, eval_sets: Sequence[EvalSet] = ()) -> Fingerprint:
    """Returns all facts on which the batches of training, of `rows` rows, and of evaluations depend.

    While they are equal, so are the batches. It also has digests of the user's code, even of a loss and of metrics.
    """
    facts: Fingerprint = {}
    read = [("source", *each) for each in zip(data.names, data.sources, strict=True)]
    if names_eval_data(inputs.data):  # else they are a part of the training data
        read += [(f"{EVALUATION} source", each.name, each.source) for each in eval_sets]
    for kind, name, source in read:
        prefix = f"{kind} {name} " if name else f"{kind} "
        facts |= {f"{prefix}{fact}": value for fact, value in source.fingerprint().items()}
    if len(data.sources) > 1:
        shares = (f"{name} {weight:g}" for name, weight in zip(data.names, data.weights, strict=True))
        facts["source weights"] = ", ".join(shares)
    tokenizer = inputs.tokenizer.fingerprint() if inputs.tokenizer else {}
    facts |= {f"tokenizer {fact}": value for fact, value in tokenizer.items()}
    if inputs.data.use_sft:
        templates = inputs.tokenizer.chat_template, inputs.tokenizer.tool_template
        template = "".join(each or "" for each in templates[: inputs.rules])  # by the first rules no tools were shown
        facts["chat template"] = hashlib.sha256(template.encode()).hexdigest()[:16]
        facts["sft_train_on_completion_only"] = inputs.data.sft_train_on_completion_only
        if inputs.batch.packing:
            facts["packing of conversations"] = "whole"  # they were cut before
    if not inputs.batch.packing and inputs.batch.long_documents == "truncate":
        facts["long_documents"] = inputs.batch.long_documents
    if inputs.batch.batch_transform:
        facts["batch_transform"] = inputs.batch.batch_transform
    for key in ("batch_transform", "loss", "eval_metrics", "decode_metrics"):
        if name := inputs.config[key]:
            entry = f"{EVALUATION} code {key}" if "metrics" in key else f"code {key}"
            facts |= {f"{entry} {module}": digest for module, digest in code_digests(name, key).items()}
    return facts | {
        RULES_FACT: inputs.rules,
        "global batch": rows,
        "max_target_length": inputs.batch.max_target_length,
        "packing": inputs.batch.packing,
        "data_shuffle_seed": inputs.data.data_shuffle_seed,
    }


def check_unchanged(deciding: Sequence[Source | RowSource], others: Sequence[Source | RowSource]) -> list[str]:
    """Returns a line for sources whose files were written since the last call.

    Raises UserError if the contents of a `deciding` source changed: the run learns from it, or it may end the run.
    """
    lines = []
    for source in (*deciding, *others):
        for listing in getattr(source, "listings", ()):
            try:
                line, differs = listing.written_since()
            except (UserError, TransientError) as error:  # a file that is gone, or a store that does not answer
                if isinstance(error, UserError) and source in deciding:
                    raise
                line, differs = f"nobody can tell whether the data changed: {error}", False
            if differs and source in deciding:
                raise UserError(
                    f"{line}. Steps since the last checkpoint may have learned from that and are not saved. Restore "
                    "the data and give the same command; with these data it says how to accept the change"
                )
            lines += [line] * bool(line)
    return lines


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
