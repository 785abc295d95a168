"""Describes the datasets that a configuration names, each by the same few settings."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from src.config.schema import Data
from src.system.errors import UserError

# Maximum sum of a mixture's weights as whole numbers. The order in which rows come from its sources repeats after as
# many rows as this sum.
MAX_PERIOD = 100_000

# The settings of a dataset, each with its config keys for training and for evaluation. An entry of `datasets` or
# `eval_datasets` uses the names here; a setting that it omits comes from these keys.
SETTINGS = {
    "dataset_type": ("dataset_type", "dataset_type"),
    **{"dataset_path": ("dataset_path", "eval_dataset_path"), "dataset_name": ("dataset_name", "eval_dataset_name")},
    "split": ("train_split", "eval_split"),
    **{key: (key, key) for key in ("dataset_column", "array_record_format", "dataset_factory")},
}
# The key that stands in for an evaluation key without a value, by the `dataset_type` of both datasets: TFDS has one
# folder for all of its datasets.
SHARED = {"tfds": {"eval_dataset_path": "dataset_path"}}
ENTRY_KEYS = {"datasets": ("name", "weight", *SETTINGS), "eval_datasets": ("name", "eval_steps", *SETTINGS)}


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The settings of one dataset to train or evaluate on, which `data.open.open_source` opens."""

    name: str  # of an entry of `datasets` or `eval_datasets`; empty if top-level keys describe the dataset
    max_document_bytes: int
    is_eval: bool = False  # it is an evaluation set, which keys such as eval_split describe
    # The fields below are in the order of SETTINGS.
    dataset_type: str = ""
    dataset_path: str = ""
    dataset_name: str = ""
    split: str = ""
    dataset_column: str = ""  # the field of a record with its text or token ids
    array_record_format: str = ""
    dataset_factory: str = ""

    def key(self, setting: str) -> str:
        """Names a setting in messages as a user finds it: `eval_dataset_path`, or `datasets, books: dataset_path`."""
        if not self.name:
            return SETTINGS[setting][self.is_eval]
        return f"{'eval_datasets' if self.is_eval else 'datasets'}, {self.name}: {setting}"

    def setting(self, setting: str) -> str:
        """Formats the setting as a user writes it, for a message: `dataset_path=books/*.txt`."""
        return f"{self.key(setting)}={getattr(self, setting)}"


def train_specs(data: Data) -> list[DatasetSpec]:
    """Lists the datasets that a run trains on: the entries of `datasets`, or the one that top-level keys describe."""
    return _specs(data, data.datasets, is_eval=False)


def eval_specs(data: Data) -> list[DatasetSpec]:
    """Lists the datasets to evaluate on: the entries of `eval_datasets`, or the one that top-level keys describe.

    Call it only if `names_eval_data`; otherwise these keys describe no dataset.
    """
    return _specs(data, data.eval_datasets, is_eval=True)


def all_specs(data: Data) -> list[DatasetSpec]:
    """Lists the datasets to train on, then those to evaluate on, unless these are held out of the training data."""
    return train_specs(data) + (eval_specs(data) if names_eval_data(data) else [])


def all_synthetic(data: Data) -> bool:
    """Returns whether all data of a run are synthetic, for training and for evaluation."""
    return all(spec.dataset_type == "synthetic" for spec in all_specs(data))


def train_weights(data: Data) -> tuple[float, ...]:
    """Returns the weight of each dataset of `train_specs`: its relative number of rows."""
    return tuple(entry.get("weight", 1.0) for entry in data.datasets) or (1.0,)


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Scales weights to the smallest whole numbers in their ratio.

    Raises UserError if one is negative, all are 0, or the sum of the whole numbers exceeds MAX_PERIOD.
    """
    # Read from decimal digits: 0.1 is a tenth, not the nearest binary fraction.
    fractions = [Fraction(str(weight)) for weight in weights]
    if any(fraction < 0 for fraction in fractions) or not any(fractions):
        raise UserError(f"the weights of datasets are {list(weights)}: expected none below 0, and at least one above")
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*counts)
    counts = [count // divisor for count in counts]
    if sum(counts) > MAX_PERIOD:
        raise UserError(
            f"the weights of datasets, {list(weights)}, have the ratios {counts}: write them with fewer "
            f"digits, so that these numbers add up to at most {MAX_PERIOD:,}"
        )
    return counts


def names_eval_data(data: Data) -> bool:
    """Returns whether evaluation data are named, or synthetic like the training data; if not, some are held out."""
    named = data.eval_datasets or data.eval_dataset_path or (data.dataset_type == "tfds" and data.eval_dataset_name)
    types = {data.dataset_type, *(spec.dataset_type for spec in train_specs(data))}
    return bool(named) or types == {"synthetic"}


def _specs(data: Data, entries: Sequence[Mapping[str, Any]], is_eval: bool) -> list[DatasetSpec]:
    found = []
    for entry in entries or ({},):  # without entries, top-level keys describe one dataset
        same_type = entry.get("dataset_type", data.dataset_type) == data.dataset_type
        instead = SHARED.get(data.dataset_type, {}) if same_type else {}
        settings = {
            name: entry.get(
                name, getattr(data, keys[is_eval]) or getattr(data, instead.get(keys[is_eval], keys[is_eval]))
            )
            for name, keys in SETTINGS.items()
        }
        found.append(DatasetSpec(entry.get("name", ""), data.max_document_bytes, is_eval, **settings))
    return found
