"""Applies the function of the user that `batch_transform` names."""

from collections.abc import Callable, Mapping

import numpy as np

from src.data.types import RowArrays
from src.errors import UserError, changed_keys
from src.user_code import call, class_name

MAX_WEIGHT = 1e30  # of a token in the loss, either way


def apply_transform(function: Callable[[RowArrays], RowArrays], vocab_size: int, batch: RowArrays) -> RowArrays:
    """Returns what the function `batch_transform` makes of this host's rows, those of `BATCH_ARRAYS`.

    It may change them in place, and returns the same names, shapes and dtypes. Raises UserError where it raises,
    returns others, or values that the model can't take: ids outside the vocabulary, positions below 0, or NaN.
    """
    expected = {name: f"{array.dtype} {list(array.shape)}" for name, array in batch.items()}
    changed = call("batch_transform", function, dict(batch))
    if not isinstance(changed, Mapping):
        raise UserError(
            f"batch_transform returned a value of type {class_name(changed)}: expected a dict of {', '.join(expected)}"
        )
    arrays = {name: np.asarray(array) for name, array in changed.items()}
    found = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
    if different := changed_keys(expected, found):
        listed = "\n".join(f"  {n}: {expected.get(n, 'none')} -> {found.get(n, 'none')}" for n in different)
        raise UserError(
            f"batch_transform returned other arrays than it was given (given -> returned):\n{listed}\n"
            "Expected the same names, shapes and dtypes"
        )
    ids, whole, any_number = (0, vocab_size - 1), (0, np.iinfo(np.int32).max), (-MAX_WEIGHT, MAX_WEIGHT)
    ranges = {"tokens": ids, "targets": ids, "segment_ids": whole, "positions": whole, "loss_mask": any_number}
    for name, (least, most) in ranges.items():
        unfit = ~((arrays[name] >= least) & (arrays[name] <= most))  # NaN is within no range
        if unfit.any():
            raise UserError(
                f"batch_transform returned {name} with the value {arrays[name][unfit][0]}: expected {least} to {most}"
            )
    return arrays
