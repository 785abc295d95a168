"""The sets of data that a configuration names, each described by the same few settings."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from src.config.schema import Data
from src.system.errors import UserError

# The order of a mixture's sources repeats after as many rows as its weights, as whole numbers, add up to.
MAX_PERIOD = 100_000

# A setting of one set of data: the config key that gives it for training, and the one for evaluation. An entry of
# `datasets` or `eval_datasets` gives it by its name here, and what it leaves out is taken from these keys.
SETTINGS = {
    "dataset_type": ("dataset_type", "dataset_type"),
    **{"dataset_path": ("dataset_path", "eval_dataset_path"), "dataset_name": ("dataset_name", "eval_dataset_name")},
    "split": ("train_split", "eval_split"),
    **{key: (key, key) for key in ("dataset_column", "array_record_format", "dataset_factory")},
}
ENTRY_KEYS = {"datasets": ("name", "weight", *SETTINGS), "eval_datasets": ("name", "eval_steps", *SETTINGS)}


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """One set of data."""

    name: str  # of an entry of `datasets` or `eval_datasets`; empty for the one that the keys themselves describe
    max_document_bytes: int
    is_eval: bool = False  # it is named by the keys for evaluation
    # SETTINGS, in their order.
    dataset_type: str = ""
    dataset_path: str = ""
    dataset_name: str = ""
    split: str = ""
    dataset_column: str = ""  # the field of a record that has its text, or its ids
    array_record_format: str = ""
    dataset_factory: str = ""

    def key(self, setting: str) -> str:
        """Returns what a message calls a setting: the key that a user changes, such as `eval_dataset_path`."""
        if not self.name:
            return SETTINGS[setting][self.is_eval]
        return f"{'eval_datasets' if self.is_eval else 'datasets'}, {self.name}: {setting}"

    def setting(self, setting: str) -> str:
        """Returns the setting as a user wrote it, for a message: `dataset_path=books/*.txt`."""
        return f"{self.key(setting)}={getattr(self, setting)}"


def train_specs(data: Data) -> list[DatasetSpec]:
    """Returns the sets of data that a run trains on: the entries of `datasets`, or the one that the keys describe."""
    return _specs(data, data.datasets, is_eval=False)


def eval_specs(data: Data) -> list[DatasetSpec]:
    """Returns the sets that a run evaluates on: the entries of `eval_datasets`, or the one that the keys describe."""
    return _specs(data, data.eval_datasets, is_eval=True)


def all_specs(data: Data) -> list[DatasetSpec]:
    """Returns the sets of data that are named, to train and to evaluate on."""
    return train_specs(data) + (eval_specs(data) if names_eval_data(data) else [])


def all_synthetic(data: Data) -> bool:
    """Returns whether no data of a run, to train or to evaluate on, are text."""
    return all(spec.dataset_type == "synthetic" for spec in all_specs(data))


def train_weights(data: Data) -> tuple[float, ...]:
    """Returns how many rows of each set of `train_specs` there are, in proportion."""
    return tuple(entry.get("weight", 1.0) for entry in data.datasets) or (1.0,)


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Returns the least whole numbers in proportion; raises UserError if one is negative, all are 0, or too long."""
    # By way of their digits: 0.1 is a tenth, not the nearest binary fraction.
    fractions = [Fraction(str(weight)) for weight in weights]
    if any(fraction < 0 for fraction in fractions) or not any(fractions):
        raise UserError(f"the weights of datasets are {list(weights)}: expected none below 0, and one above")
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*counts)
    counts = [count // divisor for count in counts]
    if sum(counts) > MAX_PERIOD:
        raise UserError(
            f"the weights of datasets, {list(weights)}, are in the proportion of {counts}: write them with fewer "
            f"digits, so that these numbers add up to {MAX_PERIOD:,} at most"
        )
    return counts


def names_eval_data(data: Data) -> bool:
    """Returns whether data to evaluate on are named, or random; else they are a part of the training data."""
    named = data.eval_datasets or data.eval_dataset_path or (data.dataset_type == "tfds" and data.eval_dataset_name)
    return bool(named) or all(spec.dataset_type == "synthetic" for spec in train_specs(data))


def _specs(data: Data, entries: Sequence[Mapping[str, Any]], is_eval: bool) -> list[DatasetSpec]:
    shared = {setting: getattr(data, keys[is_eval]) for setting, keys in SETTINGS.items()}
    if shared["dataset_type"] == "tfds":  # whose path is the folder of all datasets
        shared["dataset_path"] = shared["dataset_path"] or data.dataset_path
    named = [(entry["name"], {name: entry.get(name, shared[name]) for name in SETTINGS}) for entry in entries]
    return [DatasetSpec(name, data.max_document_bytes, is_eval, **each) for name, each in named or [("", shared)]]
