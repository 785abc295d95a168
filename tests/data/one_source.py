"""Data of one source, as a configuration without `datasets` and `eval_datasets` gives them."""

from src.data import fingerprint, loader
from src.data.types import EvalSet, InputSpec, TrainData


def alone(source):
    """To train on."""
    return TrainData(("",), (source,), (1.0,))


def held_out(source, steps=-1):
    """To evaluate on."""
    return EvalSet("", source, steps)


def inputs(config, tokenizer):
    return InputSpec(config.data, config.batch, config.model.vocab_size, tokenizer)


def train_batches(config, data, tokenizer, *rest, **named):
    return loader.train_batches(inputs(config, tokenizer), data, *rest, **named)


def eval_batches(config, data, tokenizer, rows, global_batch, position=None):
    rolls = config.evaluation.eval_mode == "rolling"
    return loader.EvalBatches(inputs(config, tokenizer), data, rows, global_batch, rolls, position)


def data_fingerprint(config, data, tokenizer, global_batch):
    return fingerprint.data_fingerprint(inputs(config, tokenizer), data, global_batch)
