"""Finds which fields the function of the user that `batch_transform` names adds to a batch."""

from collections.abc import Mapping

import jax

from src.config.schema import BatchKeys

Fields = Mapping[str, jax.ShapeDtypeStruct]  # that a function adds to those of BATCH_ARRAYS: what a row has of each


def added_fields(batch: BatchKeys, vocab_size: int) -> Fields:
    """Returns the fields that `batch_transform` adds; none without one. Raises UserError as `UserTransform`."""
    if not batch.batch_transform:
        return {}
    from src.data.user_transform import UserTransform

    return UserTransform(batch, vocab_size).fields
