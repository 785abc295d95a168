"""Models small enough to compile in seconds, and batches for them, for the tests of the model and its step."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from src.checkpoint.resume import new_state
from src.model.params import Weights
from src.model.spec import model_spec
from src.parallel.mesh import MeshLayout, make_layout
from src.run import resolve_config
from src.step.loss import next_token_loss
from src.step.optimizer import hparams_at
from src.step.state import abstract_state, batch_sharding
from src.step.trace import plan_step
from src.step.train_step import compile_steps

BASE = str(Path(__file__).parents[1] / "configs" / "base.yml")
VOCAB, LENGTH = 97, 16
TINY = {
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_target_length": LENGTH,
    "dtype": "float32",
    "matmul_precision": "highest",
    "dataset_type": "synthetic",
    "remat_policy": "none",
    "scan_layers": "true",
    "steps": 20,
    "learning_rate": 1e-2,
}

GPT3 = {  # what a model of that family has otherwise
    "normalization": "layer",
    "position_type": "learned",
    "mlp_activations": "[gelu]",
    "mlp_bias": "true",
    "attention_bias": "true",
    "logits_via_embedding": "true",
}


def load(**overrides):
    """The config of a tiny model, a file below the overrides, as a user's is; a key `a__b` is the dotted a.b."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.writelines(f"{key}: {value}\n" for key, value in TINY.items())
        file.flush()
        return resolve_config.load([file.name, *(f"{key.replace('__', '.')}={it}" for key, it in overrides.items())])


def spec_of(config):
    return model_spec(config.model, config.step, config.batch.max_target_length)


def make(devices=1, **overrides):
    """A config and its plan on the first `devices` devices."""
    config = load(**overrides)
    return config, plan_step(config, make_layout(config.mesh, jax.devices()[:devices]))


def abstract_layout(config, platform="tpu", **sizes):
    """A layout of a config's rules on a mesh of devices that are nowhere, for what needs their number alone."""
    axes = config.mesh.mesh_axes
    mesh = AbstractMesh(
        tuple(sizes.get(name, 1) for name in axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    return type("AbstractLayout", (MeshLayout,), {"platform": platform})(mesh, config.mesh.logical_axis_rules)


class Trainer:
    """A state and its compiled steps, as train.py makes them; `initial=False` spares compiling the initial weights."""

    def __init__(self, devices=1, initial=True, **overrides):
        self.config, self.plan = make(devices, **overrides)
        self.abstract = abstract_state(self.plan)
        self.train_step, self.eval_step = compile_steps(self.plan, self.abstract)
        if initial:
            self.state = new_state(self.plan, self.abstract)
        else:
            self.state = self.random_state()

    def random_state(self):
        """The one before the first step with `random_weights`, always the same."""
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.abstract)
        state = dataclasses.replace(zeros, weights=self.plan.split(random_weights(self.plan)))
        return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, self.abstract))

    def hparams(self, number):
        return hparams_at(self.plan.step, self.config.run.steps, number)

    def step(self, batch, number):
        """Makes update `number` (from 0); returns its metrics as numbers and lists of such."""
        placed = jax.device_put(batch, batch_sharding(self.plan.layout))
        self.state, metrics = self.train_step(self.state, placed, self.hparams(number))
        return jax.tree.map(lambda value: value.tolist(), jax.device_get(metrics))


def packed_rows(seed, rows=8, length=LENGTH, vocab=VOCAB):
    """A batch whose rows hold random tokens in two or three segments and then padding, each of another length."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    segment_ids, positions = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, length), size=rng.integers(2, 4), replace=False))
        for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False), start=1):
            segment_ids[row, start:end] = index
            positions[row, start:end] = np.arange(end - start)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": (segment_ids > 0).astype(np.float32),
    }


def loss_and_gradients(plan, weights, batch):
    """Of the sum over the batch's tokens, compiled."""

    def loss(weights):
        return next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss

    return jax.jit(jax.value_and_grad(loss))(weights)


def random_weights(plan, seed=0):
    """Weights of the plan's shapes: no bias is zero and no scale one, and no initialiser is compiled for them."""
    rng = np.random.default_rng(seed)

    def draw(path, weight):
        center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return (center + rng.normal(scale=0.2, size=weight.shape)).astype(weight.dtype)

    return jax.tree.map_with_path(draw, plan.shapes)


def assert_close(tree, expected, tolerance):
    """Equal to `tolerance` times each array's greatest value, or a thousandth of the tree's if that is more.

    (Some gradients are zero but for rounding: a bias of all keys moves no softmax.)
    """
    greatest = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))

    def compare(path, x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-3 * greatest)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"

    jax.tree.map_with_path(compare, tree, expected)


def tree_bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
