"""Data of one source, as a configuration without `datasets` and `eval_datasets` gives them."""

import numpy as np

from src.data import eval_batches as evaluation
from src.data import fingerprint, loader, open
from src.data.types import DataPosition, EvalSet, InputSpec, TrainData


def alone(source):
    """To train on."""
    return TrainData(("",), (source,), (1.0,))


def held_out(source, steps=-1):
    """To evaluate on."""
    return EvalSet("", source, steps)


def inputs(config, tokenizer):
    return InputSpec.of(config, tokenizer)


def open_sources(config, tokenizer):
    return open.open_sources(inputs(config, tokenizer), config.evaluation)


class train_batches:
    """The loader's batches, each as one dict of its arrays, `data_position` and, of conversations, `cuts`."""

    def __init__(self, config, data, tokenizer, rows, global_batch, rows_taken=0, position=None):
        """`position` is of these rows."""
        streams = None
        if position is not None:
            streams = np.zeros((global_batch, *position.shape[1:]), np.int32)
            streams[list(rows)] = position
        start = DataPosition(streams, rows_taken)
        self._batches = loader.train_batches(inputs(config, tokenizer), data, rows, global_batch, start)
        self._has_cuts = config.data.use_sft
        self.close = self._batches.close

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        cuts = {"cuts": batch.cuts} if self._has_cuts else {}
        return batch.arrays | {"data_position": batch.stream_positions} | cuts


def eval_batches(config, data, tokenizer, rows, global_batch, position=None):
    rolls = config.evaluation.eval_mode == "rolling"
    return evaluation.EvalBatches(inputs(config, tokenizer), data, rows, global_batch, rolls, position)


def data_fingerprint(config, data, tokenizer, global_batch):
    return fingerprint.data_fingerprint(inputs(config, tokenizer), data, global_batch)
