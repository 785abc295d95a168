"""Opens the data that a configuration names.

An item is a document: a text, its ids, or a conversation. Sources whose items are whole rows need no packing.
"""

from src.config.schema import Config
from src.config.source_spec import SourceSpec, eval_specs, names_eval_data, train_specs, train_weights
from src.data.held_out import train_validation_split
from src.data.types import EvalSet, RowSource, Source, Tokenizer, TrainData
from src.errors import UserError


def open_sources(config: Config, tokenizer: Tokenizer | None) -> tuple[TrainData, list[EvalSet]]:
    """Opens the data to train on, and to evaluate on if the run does: only then are training data held out.

    Raises:
        UserError: data in the config can't be read, or nothing can be held out.
    """
    return _open(config, tokenizer, evaluates=config.eval_interval > 0)


def open_eval_sets(config: Config, tokenizer: Tokenizer | None) -> list[EvalSet]:
    """Opens the data that a run of this config evaluates on, or would.

    Raises:
        UserError: as `open_sources` does.
    """
    if names_eval_data(config):
        return _open_eval(config, tokenizer)
    return _open(config, tokenizer, evaluates=True)[1]


def _open(config: Config, tokenizer: Tokenizer | None, evaluates: bool) -> tuple[TrainData, list[EvalSet]]:
    if evaluates and config.datasets and not names_eval_data(config):
        raise UserError("nothing is held out of datasets: name data to evaluate on with eval_datasets")
    specs = train_specs(config)
    sources = [open_source(spec, config, tokenizer) for spec in specs]
    evaluation: list[EvalSet] = []
    if evaluates and names_eval_data(config):
        evaluation = _open_eval(config, tokenizer)
    elif evaluates:
        sources[0], held_out = train_validation_split(sources[0], config.eval_fraction)
        evaluation = [EvalSet("", held_out, config.eval_steps)]
    return TrainData(tuple(spec.name for spec in specs), tuple(sources), train_weights(config)), evaluation


def _open_eval(config: Config, tokenizer: Tokenizer | None) -> list[EvalSet]:
    steps = [entry.get("eval_steps", config.eval_steps) for entry in config.eval_datasets] or [config.eval_steps]
    return [
        EvalSet(spec.name, open_source(spec, config, tokenizer), count)
        for spec, count in zip(eval_specs(config), steps, strict=True)
    ]


def open_source(spec: SourceSpec, config: Config, tokenizer: Tokenizer | None) -> Source | RowSource:
    """Opens one set of data, and imports only what reads its format.

    Args:
        spec: which.
        config: the run's.
        tokenizer: the run's, which token files must have been made with; None where nothing is text.

    Raises:
        UserError: it can't be read, or what reads it is not installed.
    """
    match spec.type:
        case "text" if config.use_sft:
            if not spec.path:
                raise UserError(f"use_sft=true reads .jsonl files of conversations: set {spec.key('dataset_path')}")
            from src.data.readers.conversations import ConversationSource

            return ConversationSource(spec.path, spec.key("dataset_path"))
        case "text":
            from src.data.readers.text import TextSource

            return TextSource(spec.path, spec.max_document_bytes, spec.key("dataset_path"), spec.column)
        case "synthetic":
            from src.data.readers.synthetic import SyntheticSource

            # Evaluation's seed is unlike every training seed, which is at least 0: the two must share no row.
            seed = -1 - config.data_shuffle_seed if spec.is_eval else config.data_shuffle_seed
            return SyntheticSource(config.vocab_size, config.max_target_length, seed)
        case "tfds":
            from src.data.readers.tfds import TfdsSource

            return TfdsSource(spec)
        case "array_record":
            from src.data.readers.array_record import ArrayRecordSource

            return ArrayRecordSource(spec)
        case "parquet":
            from src.data.readers.parquet import ParquetSource

            return ParquetSource(spec)
        case "tokens":
            from src.data.readers.tokens import TokenDocuments, TokenRows

            source = TokenRows(spec, config.max_target_length) if config.packing else TokenDocuments(spec)
            source.check(config.vocab_size, tokenizer.fingerprint() if tokenizer else None)
            return source
        case _:
            from src.data.readers.custom import custom_source

            return custom_source(spec, config)
