"""What the checks look at: a config in small, random weights and packed texts, and what a step makes of them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from src.config.schema import MESH_AXES, Config
from src.model.params import Tree, Weights, by_path, dotted
from src.parallel.mesh import make_layout
from src.step.loss import LossFunction, next_token_loss
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan
from src.step.state import TrainState, abstract_state, batch_sharding, init_state
from src.step.trace import plan_step
from src.step.train_step import compile_steps
from src.system.errors import UserError

ROWS = 8  # of a batch, for every mesh of eight devices
LENGTH, LONGER = 48, 80  # tokens of a row; longer than a chunk of the gated delta rule for models that have it
PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
# So large that an update changes most digits of a weight: its float32 then holds the digits of the gradient.
SGD_RATE = 1024.0


class Row(NamedTuple):
    """The outcome of one comparison."""

    check: str  # letter
    name: str  # what was compared
    status: str
    figure: float | None = None
    bound: float | None = None
    note: str = ""  # why it does not apply, or where and how it differs


class Result(NamedTuple):
    """What a step computes."""

    gradients: dict[str, np.ndarray]  # by the weights' dotted paths, in float64
    metrics: dict[str, float]
    stats: dict[str, np.ndarray]  # what else a step changes: the biases of routers


class NotApplicable(UserError):
    """What a check needs and these small batches, or the model, do not have."""


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raises FloatingPointError if a step made no update because its loss or gradient was not finite."""
    if not bool(metrics["finite"]):
        raise FloatingPointError(f"the loss ({float(metrics['loss'])}) or a gradient of the step is not finite")


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A small config, and what is the same in all of its variants."""

    config: Config
    seed: int = 0

    def plan(self, devices: int = 1, **keys: Any) -> StepPlan:
        """Plans the config with other keys; raises UserError if it cannot run so."""
        config = self.config.replace(**keys)
        return plan_step(config, make_layout(config.mesh, jax.devices()[:devices]))

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.batch.max_target_length

    @functools.cached_property
    def reference_plan(self) -> StepPlan:
        """The plan on one device."""
        return self.plan()

    @functools.cached_property
    def weights(self) -> Any:
        """Random weights in which no bias is zero and no scale one, nested as all weights are."""
        rng = np.random.default_rng(self.seed)

        def draw(path: Any, weight: Any) -> np.ndarray:
            center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
            return (center + rng.normal(scale=0.2, size=weight.shape)).astype(weight.dtype)

        return jax.tree.map_with_path(draw, self.reference_plan.shapes)

    @functools.cached_property
    def batch(self) -> dict[str, Any]:
        """Rows of two or three documents and padding, each of another length; of one document without packing."""
        rng, vocab, length = np.random.default_rng(self.seed), self.config.model.vocab_size, self.length
        tokens = rng.integers(0, vocab, (ROWS, length + 1), dtype=np.int32)
        segment_ids, positions = np.zeros((2, ROWS, length), np.int32)
        for row in range(ROWS):
            cuts = np.sort(rng.choice(np.arange(1, length), size=rng.integers(2, 4), replace=False))
            cuts = cuts if self.config.batch.packing else cuts[-1:]
            for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False), start=1):
                segment_ids[row, start:end] = index
                positions[row, start:end] = np.arange(end - start)
        mask = (segment_ids > 0).astype(np.float32)
        texts = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}
        return {**texts, "segment_ids": segment_ids, "positions": positions}

    @functools.cached_property
    def loss(self) -> LossFunction:
        """The loss that the config names."""
        if not self.config.step.loss:
            return next_token_loss
        from src.step.user_loss import loss_function

        return loss_function(self.config.step.loss)

    def result(self, plan: StepPlan, *batches: dict[str, Any]) -> Result:
        """Runs steps, and reads the gradients from the update that plain gradient descent makes in the last one.

        It is the training step itself, as src.train compiles it, with all that reduces gradients over devices and
        micro-batches. Earlier steps, on all batches but the last, have the rate 0: they leave the weights, but change
        the step's number, on which dropout depends, and routers' biases. Without `batches` it is one step on the batch.
        """
        before = plan.split(self.weights)
        zeros: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_state(plan))
        batches = batches or (self.batch,)
        rates = [*[0.0] * (len(batches) - 1), SGD_RATE]
        *_, (state, metrics) = self.steps(plan, dataclasses.replace(zeros, weights=before), rates, batches)
        old, new = flat(before.trainable), flat(jax.device_get(state.weights.trainable))
        gradients: dict[str, Any] = {path: (np.float64(old[path]) - np.float64(new[path])) / SGD_RATE for path in old}
        numbers: dict[str, float] = {
            name: float(x) for name, x in metrics.items() if not isinstance(x, dict) and np.ndim(x) == 0
        }
        return Result(gradients, numbers, flat(jax.device_get(state.weights.stats)))

    def steps(
        self, plan: StepPlan, state: TrainState, rates: Sequence[float], batches: Sequence[dict[str, Any]] = ()
    ) -> Iterator[tuple[TrainState, Any]]:
        """Yields the state and metrics after each training step, at these learning rates, on `batches` or on the batch.

        A state is valid until the next one. Raises NotApplicable as `check_fields`, and as `check_finite`.
        """
        self.check_fields(plan)
        abstract = abstract_state(plan)
        train_step, _ = compile_steps(plan, abstract, loss=self.loss)
        state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract))
        for rate, batch in zip(rates, batches or [self.batch] * len(rates), strict=True):
            placed = jax.device_put(batch, batch_sharding(plan.layout, plan.fields))
            hparams = hparams_at(plan.step, self.config.run.steps, 0) | {"learning_rate": np.float32(rate)}
            state, metrics = train_step(state, placed, hparams)
            check_finite(metrics)
            yield state, metrics

    def first_state(self, plan: StepPlan) -> TrainState:
        """The state before the first step, with the config's own optimizer and these weights."""
        return init_state(plan, jax.tree.map(jnp.asarray, plan.split(self.weights)))

    def check_fields(self, plan: StepPlan) -> None:
        """Raises NotApplicable if batches have further fields."""
        if plan.fields:
            transform = self.config.batch.batch_transform
            raise NotApplicable(f"batch_transform={transform} adds fields, which these batches lack")

    def attempt(self, devices: int, keys: Mapping[str, Any], batch: dict[str, Any] | None = None) -> Result | str:
        """A step with other keys, or why the model refuses them; a user's loss that fails there raises UserError."""
        try:
            plan = self.plan(devices, **keys)
        except UserError as error:
            return str(error).partition("\n")[0]
        try:
            return self.result(plan, batch or self.batch)
        except UserError as error:
            if error.__cause__ or isinstance(error, NotApplicable):  # the cause is what a user's loss raised
                raise
            return str(error).partition("\n")[0]  # from a layer that cannot run on this mesh

    @functools.cached_property
    def reference(self) -> Result:
        """A step on one device."""
        return self.result(self.plan(**PLAIN_DESCENT))

    def forward(self, plan: StepPlan, function: Callable[..., Any]) -> Any:
        """Compiles and runs `function(decoder)` with the weights."""
        return jax.device_get(jax.jit(lambda weights: function(plan.decoder(weights)))(self.placed(plan)))

    def placed(self, plan: StepPlan) -> Weights:
        """The weights as arrays with the plan's shardings."""
        return jax.device_put(plan.split(self.weights), plan.split(plan.shardings))

    def with_weights(self, weights: Tree) -> "Subject":
        """The same config with other weights."""
        other = dataclasses.replace(self)
        vars(other)["weights"] = weights  # instead of the cached property
        return other


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
    """Names the entries of nested weights by their dotted paths."""
    return {dotted(path): leaf for path, leaf in by_path(tree).items()}


def mesh_keys(sizes: Mapping[str, int]) -> dict[str, int]:
    """The config's keys for a mesh of these axes, such as {"tensor": 2}; all others have one device."""
    return {f"ici_{word}_parallelism": sizes.get(axis, 1) for axis, word in MESH_AXES.items()}


def attempted(find: Callable[[], str]) -> str:
    """Looks for the place of a failure that is certain; an error here must not replace that."""
    try:
        return find()
    except Exception as error:
        return f"its place was not found: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Yields each array's largest difference, relative to its largest value or a thousandth of the largest of all.

    Some gradients are zero but for rounding: a bias of all keys moves no softmax.
    """
    largest = max(float(np.max(np.abs(each))) for each in expected.values())
    for path, wanted in expected.items():
        scale = max(float(np.max(np.abs(wanted))), 1e-3 * largest)
        yield path, float(np.max(np.abs(np.float64(found[path]) - np.float64(wanted)))) / scale


# Parts of the weights' paths in the order in which a forward pass uses them; other weights are a mixer's.
ORDER = ("embedding", "attention_norm", "attention.", "attention.out", "feed_forward_norm", "router", "wi", "wo")
ORDER += ("final_norm", "mtp", "output")
LAST, AFTER = ORDER.index("wo"), (-1, 99)  # the last rank of a layer; the groups of weights before and after layers
LEAST_LOSS = 1e-3  # a user's loss may be zero but for rounding
MOST_REPEATS = 8  # of a shrunk group of layers: a longer first dim is not the layers'


def compared(
    check: str, name: str, found: Result, expected: Result, bound: float, parting: Callable[[], str] = str
) -> Row:
    """Compares two steps: token counts exactly, then losses, gradients and routers' biases.

    Names the quantity that differs most. If a loss differs, `parting` names where the forward passes part; if only
    gradients differ, the weight nearest to the loss is where the backward pass goes wrong first.
    """
    counts = [result.metrics["tokens"] for result in (found, expected)]
    if counts[0] != counts[1]:
        return Row(check, name, FAIL, abs(counts[0] - counts[1]), 0, f"{counts[0]:.0f} tokens, not {counts[1]:.0f}")
    losses = [metric for metric in expected.metrics if metric.endswith("loss")]
    values = {metric: (found.metrics[metric], expected.metrics[metric]) for metric in (*losses, "grad_norm")}
    sizes = {metric: abs(one - other) / max(abs(other), LEAST_LOSS) for metric, (one, other) in values.items()}
    gradients = dict(differences(found.gradients, expected.gradients))
    sizes |= {f"gradient of {path}": size for path, size in gradients.items()}
    if expected.stats:
        sizes |= {f"new value of {path}": size for path, size in differences(found.stats, expected.stats)}
    worst = max(sizes, key=lambda quantity: np.nan_to_num(sizes[quantity], nan=np.inf))
    wrong = [quantity for quantity, size in sizes.items() if not size <= bound]
    if not wrong:
        return Row(check, name, PASS, sizes[worst], bound)

    notes = [f"{worst}; {len(wrong)} of {len(sizes)} quantities differ"]
    if forward := [metric for metric in losses if metric in wrong]:
        notes += [f"{', '.join(forward)} too", *filter(None, [attempted(parting)])]
    elif any(not size <= bound for size in gradients.values()):
        notes += [f"nearest to the loss: {_nearest(found, expected, bound)}"]
    if all(not size <= bound for size in gradients.values()):
        pairs = [(expected.gradients[path], found.gradients[path]) for path in gradients]
        ratios = [np.vdot(right, wrong) / np.sum(right**2) for right, wrong in pairs]
        alike = np.ptp(ratios) < 0.01
        notes += [
            f"every gradient is {np.mean(ratios):.2f} times what it should be" if alike else "every gradient differs"
        ]
    return Row(check, name, FAIL, sizes[worst], bound, ", ".join(notes))


def _nearest(found: Result, expected: Result, bound: float) -> str:
    """Names the wrong gradient, of a layer if the weight is stacked, that the backward pass computes first."""
    places = {}
    for path, wanted in expected.gradients.items():
        layers = len(wanted) if path.startswith("segments.") and wanted.ndim > 1 else 1
        pairs = [(found.gradients[path], wanted)]
        if layers <= MOST_REPEATS and layers > 1:
            pairs = list(zip(found.gradients[path], wanted, strict=True))
        for layer, (one, other) in enumerate(pairs):
            (_, size) = next(differences({path: one}, {path: other}))
            rank = max((index for index, part in enumerate(ORDER) if part in path), default=2)
            _, group, place, *_ = path.split(".") if path.startswith("segments.") else ("", AFTER[rank > LAST], 0)
            if not size <= bound:
                places[f"{path}[{layer}]" if len(pairs) > 1 else path] = (int(group), layer, int(place), rank, size)
    return max(places, key=places.__getitem__, default="none by itself")
