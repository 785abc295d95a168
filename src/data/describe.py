"""Describes a run's data in the words of its header."""

from collections.abc import Sequence

import numpy as np

from src.config.source_spec import SourceSpec
from src.data.document_stream import DocumentStream
from src.data.types import Conversation, EvalSet, InputSpec, RowSource, Source, TrainData
from src.errors import counted

_CONVERSATIONS_LOOKED_AT = 256  # of each source
_FEW = 0.03  # of a source's documents: if no more are cut, the header does not mention it


def describe_data(specs: Sequence[SourceSpec], data: TrainData) -> list[str]:
    """Returns a line for each source: its type, where it is from, how much it has, and its share of the rows."""
    lines = []
    for spec, source, weight in zip(specs, data.sources, data.weights, strict=True):
        place = " ".join(filter(None, (spec.settings["dataset_name"], spec.path, spec.settings["dataset_factory"])))
        if spec.type == "text" and not place:
            place = "the Python standard library's source"
        line = ", ".join(filter(None, (place, amount(source))))
        share = f", {weight / sum(data.weights):.4g} of the rows" if spec.name else ""
        lines.append(f"{spec.name}: " * bool(spec.name) + f"{spec.type}: {line}{share}")
    return lines


def describe_eval_set(data: EvalSet) -> str:
    """Returns a line for an evaluation set: what it is, and how much of it an evaluation takes."""
    facts = data.source.fingerprint()
    part = f"{facts['part']}: " if "part" in facts else f"{facts['type']}: "
    taken = "one epoch" if data.steps == -1 else f"{data.steps:,} batches"
    return f"{data.name}: " * bool(data.name) + f"{part}{amount(data.source)}, {taken} per evaluation"


def amount(source: Source | RowSource) -> str:
    """Returns how much data a source has, in words, and how many of its documents are cut, if they are not few."""
    if isinstance(source, RowSource):
        return f"{counted(source.row_count, 'row')} per epoch" if source.row_count else "random tokens"
    count, cut = len(source), 0.0
    if (keys := source.document_keys()) is not None:  # equal for the pieces of a document, which follow each other
        pieces = np.diff(np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]])))
        count, cut = len(pieces), float((pieces > 1).mean())
    share = f"{cut:.0%} of them " * (cut < 1)
    cuts = f", {share}cut into pieces by max_document_bytes" * (cut > _FEW)
    return counted(count, "conversation" if isinstance(source[0], Conversation) else "document") + cuts


def describe_conversations(spec: InputSpec, data: TrainData) -> str:
    """Says how many conversations are cut and what counts in the loss, judging by the first ones of each source."""
    looked_at = cut = rewritten = 0
    for name, source in zip(data.names, data.sources, strict=True):
        stream = DocumentStream(spec, source, name)
        for ordinal in range(min(len(source), _CONVERSATIONS_LOOKED_AT)):
            found = stream.documents(ordinal)
            looked_at += 1
            rewritten += len(found) > 1
            cut += any(len(document.ids) - 1 > spec.batch.max_target_length for document in found)
    longer = f"{cut:,} of {looked_at:,} looked at are longer than a row of {spec.batch.max_target_length:,} and cut"
    if not spec.data.sft_train_on_completion_only:
        return f"{longer}; all tokens count"
    turns = f", in {rewritten:,} each turn in an example of its own: the template rewrites earlier turns"
    return f"{longer}; what the assistant says counts{turns if rewritten else ''}"
