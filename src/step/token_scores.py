"""Scores each target of a batch, for evaluations that need more than the sum of the loss, and for DPO's loss."""

import jax
import jax.numpy as jnp

from src.data.types import NOT_TEXT
from src.step.loss import LogitsOf, of_logits
from src.step.plan import Batch, StepPlan
from src.step.tiles import in_tiles


def text_sums(logits_of: LogitsOf, hidden_BTD: jax.Array, inputs: Batch, plan: StepPlan) -> dict[str, jax.Array]:
    """Sums `loss_sum` over the loss mask, `text_nats` over its tokens of text, and `text_bytes`, their UTF-8 bytes.

    `not_text` counts tokens of data that is not text. Ends of documents count only in `loss_sum`. The inputs are
    `in_zigzag`.
    """
    mask_BT, bytes_BT = inputs["loss_mask"], inputs["text_bytes"]
    is_text_BT = (mask_BT > 0) & (bytes_BT >= 0)

    tiles, shards = plan.step.num_vocab_tiling, plan.layout.shards("norm_length")
    nats_BT = -token_scores(logits_of, hidden_BTD, inputs["targets"], tiles, shards)[0]
    return {
        "loss_sum": jnp.sum(nats_BT * mask_BT),
        "text_nats": jnp.sum(nats_BT * is_text_BT),
        "text_bytes": jnp.sum(jnp.where(is_text_BT, bytes_BT, 0)),
        "not_text": jnp.sum((mask_BT > 0) & (bytes_BT == NOT_TEXT)),
    }


def token_scores(
    logits_of: LogitsOf, hidden_BTD: jax.Array, targets_BT: jax.Array, tiles: int, shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Scores each target: its log-probability [B, T], in nats, and whether it is the most likely token, bool [B, T].

    `tiles` and `shards` divide the work as in `in_tiles`; `logits_of` maps hidden states to logits.
    """

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BtD, targets_Bt = tile
        logits_BtV = logits_of(hidden_BtD)
        log_normaliser_Bt, target_logit_Bt = of_logits(logits_BtV, targets_Bt, jnp.arange(logits_BtV.shape[-1]))
        return target_logit_Bt - log_normaliser_Bt, jnp.argmax(logits_BtV, axis=-1) == targets_Bt

    def whole(tiled: jax.Array) -> jax.Array:
        parts = tiled.reshape(tiles, -1, shards, tiled.shape[2] // shards)
        return jnp.moveaxis(parts, 0, 2).reshape(targets_BT.shape)

    arrays = hidden_BTD, targets_BT
    if tiles == 1:
        return of_tile(arrays)
    log_probs, likeliest = jax.lax.map(jax.checkpoint(of_tile), in_tiles(arrays, tiles, shards))
    return whole(log_probs), whole(likeliest)
