"""Finds the fields that the user's function named by `batch_transform` adds to a batch."""

from collections.abc import Mapping

import jax

from src.config.schema import BatchKeys

Fields = Mapping[str, jax.ShapeDtypeStruct]  # shape and dtype per row of each field added to BATCH_ARRAYS


def added_fields(batch: BatchKeys, vocab_size: int) -> Fields:
    """Finds the fields that `batch_transform` adds; {} if it is not set. Raises as `UserTransform` does."""
    if not batch.batch_transform:
        return {}
    from src.data.user_transform import UserTransform

    return UserTransform(batch, vocab_size).fields
