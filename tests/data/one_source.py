"""Data of one source, as a configuration without `datasets` and `eval_datasets` gives them."""

from src.data.types import EvalSet, TrainData


def alone(source):
    """To train on."""
    return TrainData(("",), (source,), (1.0,))


def held_out(source, steps=-1):
    """To evaluate on."""
    return EvalSet("", source, steps)
