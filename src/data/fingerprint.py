"""Fingerprints the data and code that training batches and evaluations depend on, so that a run detects changes."""

import hashlib
from collections.abc import Sequence

from src.config.dataset_spec import names_eval_data
from src.data.rules import RULES_FACT
from src.data.types import EvalSet, Fingerprint, InputSpec, RowSource, Source, TrainData
from src.system.errors import TransientError, UserError

EVALUATION = "evaluation"  # prefix of the entries that affect evaluations but not training
TOKENIZER_KEYS = ("tokenizer_path", "tokenizer_type", "dataset_type")  # they change the tokenizer's entries


def data_fingerprint(inputs: InputSpec, data: TrainData, rows: int, eval_sets: Sequence[EvalSet] = ()) -> Fingerprint:
    """Collects the properties of data, tokenizer, keys and users' code that batches, of `rows` rows, depend on.

    Equal fingerprints do not prove equal batches, because large files are only sampled. Users' code means
    `batch_transform`, `loss` and metrics. Entries that only affect evaluations begin with EVALUATION. Raises as
    `code_digests` does.
    """
    facts: Fingerprint = {}
    read = [("source", *each) for each in zip(data.names, data.sources, strict=True)]
    if names_eval_data(inputs.data):  # otherwise evaluation data are held out of the training data
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
        assert inputs.tokenizer
        templates = inputs.tokenizer.chat_template, inputs.tokenizer.tool_template
        template = "".join(each or "" for each in templates[: inputs.rules])  # data rules 1 gave templates no tools
        facts["chat template"] = hashlib.sha256(template.encode()).hexdigest()[:16]
        facts["sft_train_on_completion_only"] = inputs.data.sft_train_on_completion_only
        if inputs.batch.packing:
            facts["packing of conversations"] = "whole"  # earlier versions cut conversations
    if not inputs.batch.packing and inputs.batch.long_documents == "truncate":
        facts["long_documents"] = inputs.batch.long_documents
    if inputs.batch.batch_transform:
        facts["batch_transform"] = inputs.batch.batch_transform
    for key in ("batch_transform", "loss", "eval_metrics", "decode_metrics"):
        if name := inputs.config[key]:
            from src.system.code_digests import code_digests

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
    """Returns a line for each set of files that was written since the run opened it, or that can't be checked.

    A write that changes nothing is reported once. Raises UserError if the files of a `deciding` source, one that the
    run learns from or that can end it, have changed in size or contents, or can't be read for a lasting reason.
    """
    lines = []
    for source in (*deciding, *others):
        for listing in getattr(source, "listings", ()):
            try:
                line, differs = listing.written_since()
            except (UserError, TransientError) as error:  # a missing file, or a store that does not answer
                if isinstance(error, UserError) and source in deciding:
                    raise
                line, differs = f"cannot tell whether the data changed: {error}", False
            if differs and source in deciding:
                raise UserError(
                    f"{line}. Steps since the last checkpoint may have learned from that and are not saved. Restore "
                    "the data and repeat the command; with the changed data, it reports how to accept them"
                )
            lines += [line] * bool(line)
    return lines
