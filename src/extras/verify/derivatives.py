"""Check b: the gradient of one device against finite differences of the loss that the step minimises.

A random direction moves every entry of one weight by the same amount, up or down. If a part of the gradient is missing
or doubled, the slope along such directions is wrong by about the norm of that part, whatever its angle to the rest: a
tied embedding's two gradients are nearly orthogonal.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from src.extras.verify.rows import FAIL, Row, not_applicable, unless_refused, worst
from src.extras.verify.subject import PLAIN_DESCENT, Context, Subject, flat, in_every_layer, optimized
from src.model.params import by_path, dotted, nested
from src.model.spec import layer_models
from src.step.loss import count_tokens, objective
from src.step.plan import Batch
from src.step.train_step import with_dropout_keys

# Relative to the gradient's norm. Three seeds of seven kinds of models gave at most 0.005. A tenth of a gradient that
# is missing or counted twice gives 0.1, half of it 0.4 to 1.
BOUND = 0.02
# Relative to a gradient's norm. Rounding gives 0.05 in int8 and 0.29 in fp8.
QUANTIZED_BOUNDS = {"int8": 0.2, "fp8": 0.9, "mxfp8": 0.9}
# A gradient whose norm is below the largest norm divided by WEAK is compared relative to that quotient: the slopes
# along it are mostly rounding.
WEAK = 30
SEQUENCES, TOKENS = 3, 12  # for models with experts: sequences that are tried in turn, and leading tokens of each
DIRECTIONS, ATTEMPTS = 6, 20  # directions per weight: compared, and at most tried
# Changes of an entry, largest first; a weight's entries have a standard deviation of 0.2 (`Subject.weights`). The first
# one tried is STEPS[USUAL], or a larger one if rounding would hide the third slope from there on: Granite's gradients
# are small.
STEPS, USUAL = tuple(2.0**-power for power in range(2, 14)), 2
LEFT_OUT = "left out directions in which, at every step size, rounding is too large or a router chooses otherwise"


def rows(context: Context) -> Iterator[Row]:
    """Compares each trained weight's gradient with slopes of the loss in random directions.

    A weight's figure is the root mean square error of at most DIRECTIONS slopes, relative to the norm of its gradient,
    or to a larger scale if the gradient is weak. With `quantization`, another row compares quantized gradients.
    """
    subject, name, figures, dropped = context.subject, "gradient against slopes of the loss", {}, 0
    weak = list[str]()
    unknown = [*subject.reference.gradients]
    for sequence in range(SEQUENCES):
        if not unknown:
            break
        loss = Loss(subject, sequence)
        norms = {path: float(np.linalg.norm(gradient)) for path, gradient in loss.gradients.items()}
        # Errors are relative to at least this, or rounding would hide even the third slope from the largest step on.
        least = max(np.nanmax([*norms.values()]) / WEAK, 2 * loss.rounding / STEPS[3] * 4 / BOUND)
        for path in tuple(unknown):
            scale, errors = max(norms[path], least), [] if np.isfinite(norms[path]) else [np.nan]
            for slope, direction in loss.slopes(path, scale * BOUND / 4):
                errors += [] if slope is None else [slope - float(np.sum(loss.gradients[path] * direction))]
                dropped += slope is None
                if len(errors) == DIRECTIONS:
                    break
            if errors:
                figures[path] = float(np.sqrt(np.mean(np.square(errors)))) / scale
                unknown.remove(path)
                weak += [path] if norms[path] < least else []
    if unknown and not subject.reference_plan.spec.has_experts:  # no router's choices can be the reason
        yield Row(name, FAIL, note=f"the loss has no slope that agrees at three step sizes along {', '.join(unknown)}")
    elif unknown:
        yield not_applicable(name, f"{LEFT_OUT}: all of {', '.join(unknown)}")
    if figures:
        notes = [f"{LEFT_OUT}: {dropped}"] * bool(dropped)
        scale = f"a {WEAK}th of the largest norm, or what rounding resolves"
        notes += [f"against {scale}, because theirs is smaller: {', '.join(weak)}"] * bool(weak)
        yield worst(name, figures, BOUND, "; ".join(notes))
    if kind := context.whole.step.quantization:
        yield unless_refused(f"gradients with quantization={kind}", functools.partial(quantized, subject, kind))


def quantized(subject: Subject, kind: str) -> Row:
    """Compares gradients of quantized matmuls with the gradients without quantization; only rounding may differ."""
    found, expected = subject.result(subject.plan(**PLAIN_DESCENT, quantization=kind)), subject.reference
    most = max(float(np.linalg.norm(gradient)) for gradient in expected.gradients.values())
    sizes = {
        path: float(np.linalg.norm(found.gradients[path] - gradient) / max(np.linalg.norm(gradient), most / WEAK))
        for path, gradient in expected.gradients.items()
    }
    return worst(f"gradients with quantization={kind}", sizes, QUANTIZED_BOUNDS[kind])


def smooth(activations: tuple[str, ...]) -> tuple[str, ...]:
    """Replaces relu by gelu, which has no kink; see `Loss`."""
    return tuple("gelu" if name == "relu" else name for name in activations)


class Loss:
    """The loss that a step minimises, as a function of one weight, and the gradients of that step.

    Relu is replaced by gelu, because finite differences across a kink are wrong. The loss also jumps if a changed
    weight makes a router choose other experts for a token. For models with experts, the batch is therefore only the
    first TOKENS tokens of row `sequence`: a change that is large compared with rounding then often leaves all choices
    as they were.
    """

    def __init__(self, subject: Subject, sequence: int = 0) -> None:
        if any("relu" in layer.mlp_activations for layer, _ in layer_models(subject.config.model)):
            subject = Subject(in_every_layer(subject.config, "mlp_activations", smooth), subject.seed)
        plan, self.batch, reference = subject.plan(**PLAIN_DESCENT), subject.batch, subject.reference
        if plan.spec.has_experts:
            plan = subject.plan(**PLAIN_DESCENT, gradient_accumulation_steps=1)
            self.batch = {name: x[sequence : sequence + 1, :TOKENS] for name, x in self.batch.items()}
            reference = subject.result(plan, self.batch)
        weights, parts = plan.split(subject.weights), plan.accumulation.micro_batches
        paths = {dotted(path): path for path in by_path(weights.trainable)}

        @jax.jit
        def total(flat: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, list[jax.Array]]:
            given, keyed = (weights, count_tokens(batch, plan)), with_dropout_keys(batch, jnp.int32(0), plan)
            trainable = nested({paths[name]: weight for name, weight in flat.items()})
            micro_batches = [{name: x[part::parts] for name, x in keyed.items()} for part in range(parts)]
            found = [objective(trainable, *given, each, plan, subject.loss) for each in micro_batches]
            reports = [by_path(report) for _, (_, report) in found]
            loads = [x for report in reports for path, x in report.items() if path[-1] == "expert_load"]
            return jnp.sum(jnp.stack([total for total, _ in found])), loads

        self.total, self.gradients = total, reference.gradients
        self.trainable = flat(weights.trainable)
        # The loss is evaluated hundreds of times, so it is optimized, except with experts, when it has few tokens.
        with optimized(not plan.spec.has_experts):
            before, self.loads = jax.device_get(total(self.trainable, self.batch))
        self.rounding = 2.0**-23 * abs(float(before))
        self.rng = np.random.default_rng(subject.seed)

    def after(self, path: str, change: np.ndarray) -> float:
        """The loss after `change` is added to one weight; NaN if it changes the load of an expert."""
        changed = {**self.trainable, path: (self.trainable[path] + change).astype(np.float32)}
        total, loads = jax.device_get(self.total(changed, self.batch))
        return float(total) if all(map(np.array_equal, loads, self.loads)) else np.nan

    def slopes(self, path: str, tolerance: float, among: Any = 1.0) -> Iterator[tuple[float | None, np.ndarray]]:
        """Yields ATTEMPTS pairs: a `slope`, and its random direction of 1s and -1s, with 0 outside the mask `among`."""
        for _ in range(ATTEMPTS):
            direction = among * self.rng.choice([-1.0, 1.0], self.trainable[path].shape)
            yield self.slope(path, direction, tolerance), direction

    def slope(self, path: str, direction: np.ndarray, tolerance: float) -> float | None:
        """Estimates the derivative along a direction by central differences; None if no estimate is reliable.

        Halves the step until three successive estimates differ by at most `tolerance`, or a 400th of the slope if that
        is more, and returns the second of them. Gives up at a step so small that the loss's rounding could change the
        slope by more than that.
        """
        rises, slopes, least = [], [], 2 * self.rounding
        first = max(at for at in range(USUAL + 1) if not at or STEPS[at + 3] * tolerance >= least)
        for step in STEPS[first:]:
            up = self.after(path, step * direction)
            rises.append(up if np.isnan(up) else up - self.after(path, -step * direction))
            # Central differences of the fourth order.
            slopes.append((8 * rises[-1] - rises[-2]) / (12 * step) if len(rises) > 1 else np.nan)
            enough = np.fmax(tolerance, np.abs(slopes[-1]) / 400)
            if np.ptp(slopes[-3:]) <= enough:
                return slopes[-2]
            if step * enough < least:
                return None
        return None
