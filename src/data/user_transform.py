"""Applies the user's function named by `batch_transform`, and finds the fields that it adds to a batch."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from src.config.schema import BatchKeys
from src.data.packing import empty_batch
from src.data.types import BATCH_ARRAYS, RowArrays
from src.system.errors import UserError, changed_keys
from src.system.user_code import call, class_name, load_function

MAX_WEIGHT = 1e30  # of a token in the loss, positive or negative
_TAKEN = ("dropout_keys", "text_bytes")  # fields that steps and evaluations add to a batch


class UserTransform:
    """Applies `batch_transform` to a host's rows; `fields` are the fields that it adds to a batch."""

    def __init__(self, batch: BatchKeys, vocab_size: int) -> None:
        """Loads the function, and finds its fields; raises as `load_function` and `apply_transform` do."""
        self._function = load_function(batch.batch_transform, "batch_transform")
        self._vocab_size = vocab_size
        self.fields = _added_fields(self._function, batch.max_target_length, vocab_size)

    def __call__(self, rows: RowArrays) -> RowArrays:
        """Transforms rows as `apply_transform` does."""
        return apply_transform(self._function, self._vocab_size, rows, self.fields)


def _added_fields(
    function: Callable[[RowArrays], RowArrays], length: int, vocab_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Finds the fields that the function adds, by applying it to two rows of padding of this length.

    A step is compiled for these fields, maybe on a machine without the data. Raises UserError for unsuitable fields.
    """
    rows = empty_batch(2, length)
    added = {name: x for name, x in _returned(function, rows).items() if name not in rows}
    for name, x in added.items():
        is_named = isinstance(name, str) and name not in _TAKEN
        if x.shape[:1] != (2,) or x.dtype.kind not in "biuf" or x.dtype.itemsize > 4 or not is_named:
            raise UserError(
                f"batch_transform added {name}: {x.dtype} {list(x.shape)}, to a batch of 2 rows. Expected shape [2, "
                "...], numbers of at most 32 bits (.astype(np.int32), np.float32), and a name other than "
                f"{' or '.join(_TAKEN)}"
            )
    fields = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in sorted(added.items())}
    apply_transform(function, vocab_size, empty_batch(2, length), fields)
    return fields


def apply_transform(
    function: Callable[[RowArrays], RowArrays],
    vocab_size: int,
    batch: RowArrays,
    fields: Mapping[str, jax.ShapeDtypeStruct] = {},
) -> RowArrays:
    """Applies the function `batch_transform` to this host's rows of `BATCH_ARRAYS`.

    The function may change the arrays in place. It returns the same names, shapes and dtypes, and the `fields` that it
    adds. Raises UserError if the function returns other arrays, or returns values that the model can't take: ids
    outside the vocabulary, negative positions or segment ids, or weights in `loss_mask` beyond MAX_WEIGHT or NaN; also
    as `call` does if the function raises.
    """
    rows = len(batch["tokens"])
    expected = {name: f"{array.dtype} {list(array.shape)}" for name, array in batch.items()}
    expected |= {name: f"{field.dtype} {[rows, *field.shape]}" for name, field in fields.items()}
    arrays = _returned(function, batch)
    returned = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
    if different := changed_keys(expected, returned):
        listed = "\n".join(f"  {n}: {expected.get(n, 'none')} -> {returned.get(n, 'none')}" for n in different)
        raise UserError(
            f"batch_transform returned unexpected arrays (expected -> returned):\n{listed}\n"
            "Expected the names, shapes and dtypes of its input, and the fields that it adds to two rows of padding"
        )
    ids, whole, any_number = (0, vocab_size - 1), (0, np.iinfo(np.int32).max), (-MAX_WEIGHT, MAX_WEIGHT)
    ranges = {"tokens": ids, "targets": ids, "segment_ids": whole, "positions": whole, "loss_mask": any_number}
    for name, (low, high) in ranges.items():
        unfit = ~((arrays[name] >= low) & (arrays[name] <= high))  # NaN is outside every range
        if unfit.any():
            raise UserError(
                f"batch_transform returned {name} with the value {arrays[name][unfit][0]}: expected {low} to {high}"
            )
    return arrays


def _returned(function: Callable[[RowArrays], RowArrays], batch: RowArrays) -> RowArrays:
    changed = call("batch_transform", function, dict(batch))
    if not isinstance(changed, Mapping):
        raise UserError(
            f"batch_transform returned a value of type {class_name(changed)}: expected a dict of "
            f"{', '.join(BATCH_ARRAYS)}, and any fields that it adds"
        )
    return {name: np.asarray(array) for name, array in changed.items()}
