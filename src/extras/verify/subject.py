"""The subject of the checks: a small config with random weights and a packed batch, and runs of its training step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from src.config.schema import MESH_AXES, Config
from src.extras.verify.rows import NotApplicable
from src.model.params import Tree, Weights, by_path, dotted
from src.parallel.mesh import make_layout
from src.step.loss import LossFunction, next_token_loss
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan
from src.step.state import TrainState, abstract_state, batch_sharding, init_state
from src.step.trace import plan_step
from src.step.train_step import compile_steps

ROWS = 8  # rows of a micro-batch, which every mesh of eight devices can shard
LENGTH, LONGER = 48, 80  # tokens of a row; for models with the gated delta rule, more than one of its chunks
COUNTED = 0.7  # share of the documents' targets that count in the loss
HALVED = 0.5  # share of these targets that count half
# Means of random weights, by a part of their names; others have 0. With this decay_bias a delta rule's state lasts
# about 20 tokens. With 0 it lasted two, and its faults hardly showed: over three seeds, a wrong gradient of its inverse
# changed some weight's gradient by 2 to 4 times check b's bound, and now by 19 to 27 times.
# Gemma 4 does not scale its scores: with a mean of 1 for query_norm, softmax was so sharp that no slope along its
# embedding agreed.
MEANS = {"query_norm": 0.5, "scale": 1.0, "decay_bias": -3.0}
# So large that an update changes most digits of a weight: its float32 then holds the digits of the gradient.
SGD_RATE = 1024.0

Sizes = Mapping[str, int]  # of a mesh: devices along each axis of more than one


class Result(NamedTuple):
    """The gradients and metrics of a step, and its new `stats`."""

    gradients: dict[str, np.ndarray]  # by the weights' dotted paths, in float64
    metrics: dict[str, float]
    stats: dict[str, np.ndarray]  # by path: the new biases of routers


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raises FloatingPointError if a step made no update because its loss or gradient was not finite."""
    if not bool(metrics["finite"]):
        raise FloatingPointError(f"the loss ({float(metrics['loss'])}) or a gradient of the step is not finite")


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A small config, with the weights and the batch that all of its plans use."""

    config: Config
    seed: int = 0

    def plan(self, devices: int = 1, **keys: Any) -> StepPlan:
        """Plans a step of the config, changed by `keys`, on the first `devices` virtual devices.

        Raises Unsupported if it cannot run there.
        """
        config = self.config.replace(**keys)
        plan = plan_step(config, make_layout(config.mesh, jax.devices()[:devices]))
        if not of_pairs(config):
            return plan
        from src.extras.preferences.pairs import pair_fields

        return dataclasses.replace(plan, fields=pair_fields(config.batch.max_target_length))

    @property
    def rows(self) -> int:
        """Rows of a batch: each of eight devices can take an equal part of each micro-batch."""
        return ROWS * self.config.step.gradient_accumulation_steps

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.batch.max_target_length

    @functools.cached_property
    def reference_plan(self) -> StepPlan:
        """The plan of the unchanged config on one device; raises as `plan` does."""
        return self.plan()

    @functools.cached_property
    def weights(self) -> Any:
        """Random nested weights, normal with standard deviation 0.2 around their MEANS: no bias is 0 and no scale 1."""
        rng = np.random.default_rng(self.seed)

        def draw(path: Any, weight: Any) -> np.ndarray:
            mean = next((mean for part, mean in MEANS.items() if part in jax.tree_util.keystr(path)), 0.0)
            return (mean + rng.normal(scale=0.2, size=weight.shape)).astype(weight.dtype)

        return jax.tree.map_with_path(draw, self.reference_plan.shapes)

    @functools.cached_property
    def batch(self) -> dict[str, Any]:
        """Rows of two or three documents of random lengths, or one without packing, and padding.

        The last row is one document, without padding. Some targets do not count in the loss, like a prompt's, and some
        count half, as a batch_transform may weigh them. For the loss of DPO, documents 1 and 2 of a row are a pair of
        answers, and the reference is random.
        """
        rng, vocab, length = np.random.default_rng(self.seed), self.config.model.vocab_size, self.length
        tokens = rng.integers(0, vocab, (self.rows, length + 1), dtype=np.int32)
        segment_ids, positions = np.zeros((2, self.rows, length), np.int32)
        for row in range(self.rows):
            cuts = np.sort(rng.choice(np.arange(1, length), size=rng.integers(2, 4), replace=False))
            cuts = cuts if self.config.batch.packing else cuts[-1:]
            cuts = cuts if row < self.rows - 1 else [length]
            for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False), start=1):
                segment_ids[row, start:end] = index
                positions[row, start:end] = np.arange(end - start)
        mask = ((segment_ids > 0) & (rng.random(segment_ids.shape) < COUNTED)).astype(np.float32)
        mask[rng.random(mask.shape) < HALVED] /= 2
        texts = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}
        batch = {**texts, "segment_ids": segment_ids, "positions": positions}
        if not of_pairs(self.config):
            return batch
        from src.extras.preferences.pairs import pair_batch

        return pair_batch(batch, None) | {"reference": rng.normal(scale=9.0, size=(self.rows, 2)).astype(np.float32)}

    @functools.cached_property
    def loss(self) -> LossFunction:
        """The loss function that the config names, or `next_token_loss`; raises as `loss_function` does."""
        if not self.config.step.loss:
            return next_token_loss
        from src.step.user_loss import loss_function

        return loss_function(self.config.step.loss)

    def result(self, plan: StepPlan, *batches: dict[str, Any]) -> Result:
        """Runs a step on each batch, and computes the gradients from the weights' change in the last one.

        `plan` must have the keys PLAIN_DESCENT. The step is the one that src.train compiles, with all reductions of
        gradients over devices and micro-batches. Earlier steps have the rate 0: they leave the weights as they are, but
        change the step's number, on which dropout depends, and routers' biases. Without `batches`, runs one step on
        `batch`. Raises like `steps`.
        """
        before = plan.split(self.weights)
        zeros: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_state(plan))
        batches = batches or (self.batch,)
        rates = [*[0.0] * (len(batches) - 1), SGD_RATE]
        state, metrics = self.last(plan, dataclasses.replace(zeros, weights=before), rates, batches)
        old, new = flat(before.trainable), flat(state.weights.trainable)
        gradients: dict[str, Any] = {path: (np.float64(old[path]) - np.float64(new[path])) / SGD_RATE for path in old}
        numbers: dict[str, float] = {
            name: float(x) for name, x in metrics.items() if not isinstance(x, dict) and np.ndim(x) == 0
        }
        return Result(gradients, numbers, flat(state.weights.stats))

    def steps(
        self, plan: StepPlan, state: TrainState, rates: Sequence[float], batches: Sequence[dict[str, Any]] = ()
    ) -> Iterator[tuple[TrainState, Any]]:
        """Yields the state and metrics after each training step, at these learning rates, on `batches` or on `batch`.

        A state is valid only until the next step. Raises NotApplicable like `check_fields`, and FloatingPointError like
        `check_finite`.
        """
        self.check_fields(plan)
        abstract = abstract_state(plan)
        train_step, _ = compile_steps(plan, abstract, loss=self.loss)
        # A copy, because steps reuse the memory of their state, and the weights may share it.
        state = jax.device_put(jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, abstract))
        for rate, batch in zip(rates, batches or [self.batch] * len(rates), strict=True):
            placed = jax.device_put(batch, batch_sharding(plan.layout, plan.fields))
            hparams = hparams_at(plan.step, self.config.run.steps, 0) | {"learning_rate": np.float32(rate)}
            state, metrics = train_step(state, placed, hparams)
            check_finite(metrics)
            yield state, metrics

    def last(
        self, plan: StepPlan, state: TrainState, rates: Sequence[float], batches: Sequence[dict[str, Any]] = ()
    ) -> tuple[TrainState, Any]:
        """Returns the state and metrics after the last of these `steps`, in host memory; raises as they do."""
        *_, found = self.steps(plan, state, rates, batches)
        return jax.device_get(found)

    def first_state(self, plan: StepPlan) -> TrainState:
        """The state before the first step, with the plan's optimizer and the subject's weights."""
        return init_state(plan, jax.tree.map(jnp.asarray, plan.split(self.weights)))

    def check_fields(self, plan: StepPlan) -> None:
        """Raises NotApplicable if a batch_transform adds fields, which `batch` lacks."""
        if plan.fields.keys() - self.batch.keys():
            transform = self.config.batch.batch_transform
            raise NotApplicable(f"batch_transform={transform} adds fields, which these batches lack")

    @functools.cached_property
    def reference(self) -> Result:
        """The result of a step of plain gradient descent on one device; raises as `plan` and `result` do."""
        return self.result(self.plan(**PLAIN_DESCENT))

    def forward(self, plan: StepPlan, function: Callable[..., Any]) -> Any:
        """Compiles and runs `function(decoder)` with the weights; returns arrays in host memory."""
        return jax.device_get(jax.jit(lambda weights: function(plan.decoder(weights)))(self.placed(plan)))

    def placed(self, plan: StepPlan) -> Weights:
        """The weights as arrays with the plan's shardings."""
        return jax.device_put(plan.split(self.weights), plan.split(plan.shardings))

    def with_weights(self, weights: Tree) -> "Subject":
        """The same config with other weights."""
        other = dataclasses.replace(self)
        vars(other)["weights"] = weights  # instead of the cached property
        return other


@dataclasses.dataclass(frozen=True)
class Context:
    """The input of every check: the small config, the whole one, and the command's arguments."""

    subject: Subject
    whole: Config  # the config before it was made small
    meshes: Sequence[Sizes] = ()  # check `a` runs a step on each
    compiled: Sequence[Sizes] = ()  # check `j` compiles a step for each
    golden: Path | None = None


# Plain gradient descent on all trained weights: the update is the gradient times the rate.
PLAIN_DESCENT: dict[str, Any] = {
    "opt_type": "sgd",
    "optimizer_rules": (),
    "adam_weight_decay": 0.0,
    "gradient_clipping_threshold": 0.0,
    "mup_base_emb_dim": 0,
    "skip_step_on_spikes": False,
    "ema_decay": 0.0,
}


def of_pairs(config: Config) -> bool:
    """Whether the loss is DPO's, for which the rows of a batch are pairs of answers (src.train_dpo)."""
    return config.step.loss == "src.step.dpo:dpo_loss"


@contextlib.contextmanager
def optimized(most: bool) -> Generator[None]:
    """Within this context, programs are compiled with XLA's usual optimizations, or if not `most`, with few.

    With few they compile sooner, and run longer.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not most)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def in_every_layer(config: Config, key: str, change: Callable[[Any], Any]) -> Config:
    """Changes a layer setting in the model's section, and wherever a pattern of layers sets it."""
    segments = [
        {
            **entry,
            "pattern": [{**keys, **({key: change(keys[key])} if key in keys else {})} for keys in entry["pattern"]],
        }
        for entry in config.model.decoder_segments
    ]
    return config.replace(**{key: change(config[key]), "decoder_segments": segments})


def flat(tree: Tree) -> dict[str, Any]:
    """Flattens nested weights into a dict by dotted paths."""
    return {dotted(path): leaf for path, leaf in by_path(tree).items()}


def mesh_keys(sizes: Mapping[str, int]) -> dict[str, int]:
    """The config's keys for a mesh of these axes, such as {"tensor": 2}; all others have one device."""
    return {f"ici_{word}_parallelism": sizes.get(axis, 1) for axis, word in MESH_AXES.items()}
