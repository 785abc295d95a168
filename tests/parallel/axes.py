"""Four models and many meshes, and what one run of a model on a mesh gives: its first gradients and three losses."""

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.tree_util import keystr

from src.step.state import batch_sharding
from tests.tiny import GPT3, Trainer, assert_close, packed_rows

LENGTH, ROWS, STEPS = 32, 16, 3

COMMON = {"max_target_length": LENGTH, "base_num_decoder_layers": 4, "learning_rate": 3e-3}
HEADS = {"base_num_kv_heads": 4}
WINDOW = "{attention_type: local_sliding, sliding_window_size: 7, rope_max_timescale: 100}"
MODELS = {
    "dense": HEADS,
    "windowed": {
        **HEADS,
        "base_num_decoder_layers": 9,
        "decoder_segments": f"[{{repeats: 4, pattern: [{WINDOW}, {{}}]}}, {{pattern: [{WINDOW}]}}]",
        "attn_logits_soft_cap": 20,
        "qk_norm": "head",
        "normalization_placement": "both",
        "scale_embedding": "true",
        "logits_via_embedding": "true",
    },
    "latent experts": {
        "base_num_decoder_layers": 5,
        "decoder_segments": "[{pattern: [{num_experts: 1, shared_experts: 0}]}, {repeats: 4, pattern: [{}]}]",
        "attention_type": "mla",
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 16,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": "true",
        "n_routing_groups": 4,
        "topk_routing_group": 2,
        "norm_topk_prob": "true",
        "load_balance_loss_weight": 0.01,
        "mtp_num_layers": 1,
    },
    "gpt3": {**GPT3, **HEADS},
}


class Job:
    """A model on a mesh; `devices` None: all that there are."""

    def __init__(self, model, devices=None, rows=ROWS, **keys):
        devices = devices or len(jax.devices())
        self.trainer = Trainer(devices=devices, initial=False, **{**COMMON, **MODELS[model], **keys})
        self.rows = rows

    def first_gradients(self):
        """Of the first step, by weight: with b1 = 0 Adam's first moment after it is its gradient, and goes back."""
        self.step(0, b1=np.float32(0), clip=np.float32(0))
        moment = whole(self.trainer.state.opt[0].mu)
        self.trainer.state = self.trainer.random_state()
        return moment

    def losses(self):
        """Of the first steps, each on rows of its own."""
        return [self.step(number)["loss"] for number in range(STEPS)]

    def evaluation(self, number):
        """The sums that rows `number` evaluate to: one document each, as with packing=false, and then padding."""
        trainer, batch = self.trainer, packed_rows(number, self.rows, LENGTH)
        first = batch["segment_ids"] == 1
        batch |= {"segment_ids": first.astype(np.int32), "loss_mask": first.astype(np.float32)}
        return jax.device_get(trainer.eval_step(trainer.state.weights, batch))

    def step(self, number, **hparams):
        """Update `number` with some hyper-parameters changed; returns the metrics."""
        trainer = self.trainer
        batch = jax.device_put(packed_rows(number, self.rows, LENGTH), batch_sharding(trainer.plan.layout))
        hparams = {**trainer.hparams(number), **hparams}
        trainer.state, metrics = trainer.train_step(trainer.state, batch, hparams)
        return jax.device_get(metrics)


def whole(tree):
    """Arrays of all processes' devices as NumPy's, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): np.asarray(process_allgather(leaf, tiled=True)) for path, leaf in leaves}


def assert_same(found, expected):
    """The first gradients to a thousandth of the greatest of each weight, the losses to 1e-4 of themselves."""
    (gradients, losses), (expected_gradients, expected_losses) = found, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    assert_close(gradients, expected_gradients, tolerance=1e-3)
