"""Opens the data that the keys name, and imports only what reads their format."""

from src.config.schema import Evaluation
from src.config.source_spec import SourceSpec, eval_specs, names_eval_data, train_specs, train_weights
from src.data.held_out import train_validation_split
from src.data.streams import StreamSource
from src.data.types import EvalSet, InputSpec, RowSource, Source, TrainData
from src.errors import UserError


def open_sources(inputs: InputSpec, evaluation: Evaluation) -> tuple[TrainData, list[EvalSet]]:
    """Opens the data to train on, and to evaluate on if the run does: only then are training data held out.

    Raises UserError if data can't be read, or nothing can be held out.
    """
    specs = train_specs(inputs.data)
    sources = [open_source(spec, inputs) for spec in specs]
    eval_sets: list[EvalSet] = []
    if evaluation.eval_interval > 0 and names_eval_data(inputs.data):
        eval_sets = open_eval_sets(inputs, evaluation)
    elif evaluation.eval_interval > 0:
        sources[0], held_out = train_validation_split(sources[0], inputs.data.eval_fraction)
        eval_sets = [EvalSet("", held_out, evaluation.eval_steps)]
    return TrainData(tuple(spec.name for spec in specs), tuple(sources), train_weights(inputs.data)), eval_sets


def open_eval_sets(inputs: InputSpec, evaluation: Evaluation) -> list[EvalSet]:
    """Opens the data that a run of this config evaluates on, or would. Raises UserError as `open_sources` does."""
    data, steps = inputs.data, evaluation.eval_steps
    if names_eval_data(data):
        counts = [entry.get("eval_steps", steps) for entry in data.eval_datasets] or [steps]
        specs = zip(eval_specs(data), counts, strict=True)
        return [EvalSet(spec.name, open_source(spec, inputs), count) for spec, count in specs]
    if data.datasets:
        raise UserError("nothing is held out of datasets: name data to evaluate on with eval_datasets")
    source = open_source(train_specs(data)[0], inputs)
    return [EvalSet("", train_validation_split(source, data.eval_fraction)[1], steps)]


def open_source(spec: SourceSpec, inputs: InputSpec) -> Source | RowSource:
    """Opens one set of data. Raises UserError if it can't be read, or what reads it is not installed."""
    try:
        source = _open(spec, inputs)
    except ImportError as error:
        extra = "streams" if spec.dataset_type == "hf" else "data"
        missing = f"{spec.setting('dataset_type')}: {error.name} is not installed"
        raise UserError(f"{missing}. bash setup.sh {extra} installs it") from error
    if isinstance(source, StreamSource):
        source.check_hosts_differ()
    return source


def _open(spec: SourceSpec, inputs: InputSpec) -> Source | RowSource:
    match spec.dataset_type:
        case "text" if inputs.data.use_sft:
            if not spec.dataset_path:
                raise UserError(f"use_sft=true reads .jsonl files of conversations: set {spec.key('dataset_path')}")
            from src.data.conversations import ConversationSource

            return ConversationSource(spec.dataset_path, spec.key("dataset_path"), inputs)
        case "text":
            from src.data.readers.text import TextSource

            text = spec.dataset_path, spec.max_document_bytes, spec.key("dataset_path"), spec.dataset_column
            return TextSource(*text, inputs.rules)
        case "synthetic":
            from src.data.readers.synthetic import SyntheticSource

            # Evaluation's seed is unlike every training seed, which is at least 0: the two must share no row.
            seed = -1 - inputs.data.data_shuffle_seed if spec.is_eval else inputs.data.data_shuffle_seed
            return SyntheticSource(inputs.vocab_size, inputs.batch.max_target_length, seed)
        case "tfds":
            from src.data.readers.tfds import TfdsSource

            return TfdsSource(spec)
        case "array_record":
            from src.data.readers.array_record import ArrayRecordSource

            return ArrayRecordSource(spec, inputs.rules)
        case "parquet":
            from src.data.readers.parquet import ParquetSource

            return ParquetSource(spec, inputs.rules)
        case "hf":
            from src.data.readers.hf import open_hf

            return open_hf(spec, inputs)
        case "tokens":
            from src.data.readers.tokens import TokenDocuments, TokenRows

            packed = inputs.batch.packing
            source = TokenRows(spec, inputs.batch.max_target_length) if packed else TokenDocuments(spec)
            source.check(inputs.vocab_size, inputs.tokenizer.fingerprint() if inputs.tokenizer else None)
            return source
        case _:
            from src.data.readers.custom import open_custom

            return open_custom(spec, inputs)
