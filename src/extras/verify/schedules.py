"""Check k: learning rates of the config's schedule, against closed forms, at its own length and in a short run."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from src.config.schema import Step
from src.extras.verify import short_runs
from src.extras.verify.rows import Row, not_applicable, verdict
from src.extras.verify.subject import PLAIN_DESCENT, Context, Subject, mesh_keys
from src.step.optimizer import hparams_at

# Relative to the peak. A rate is a float32, so rounding gives up to 6e-8. In a schedule of a million steps, a cosine
# that is one step late gives 1.5e-6 and a warm-up 1e-5.
BOUND = 3e-7
# The rate that a run applies is a ratio of two float32 norms: rounding gives up to 3e-7. A schedule that is
# one step late gives 0.05 or more.
RUN_BOUND = 1e-5
# How far the highest rate may be below the peak, relative to it. Schedules such as an inverse square root reach it only
# in the warm-up.
PEAK_BOUND = 0.05
MOST_STEPS = 4096  # the longest schedule of which all steps are compared
RUN = 20  # steps of the schedule in the short run, which makes two more
RUN_RATE = 2.0**-10  # its peak: plain gradient descent is stable with it

Rates = np.ndarray  # learning rates [steps], relative to the peak
Shape = Callable[[Step, int, int, np.ndarray], Rates]  # keys, warm-up steps, steps of the schedule, numbers of steps


def rows(context: Context) -> Iterator[Row]:
    """Compares the schedule's rates with its closed form and with general limits, and checks a short run's rates."""
    keys, steps = context.whole.step, context.whole.run.steps
    total = length(keys, steps)
    numbers = compared_steps(keys, total)
    found = rates_at(keys, steps, numbers)
    yield as_published(keys, total, numbers, found)
    yield within_limits(total, numbers, found)
    yield of_a_run("learning rates that a run applies and logs", context.subject)


# ---- Closed forms, of the steps after the warm-up


def cosine(keys: Step, warmup: int, total: int, steps: np.ndarray) -> Rates:
    """Half a cosine from the peak to the final fraction (Loshchilov and Hutter 2017, section 3, equation 5)."""
    final, share = keys.learning_rate_final_fraction, (steps - warmup) / max(total - warmup, 1)
    return final + (1 - final) * (1 + np.cos(np.pi * share)) / 2


def exponential(keys: Step, warmup: int, total: int, steps: np.ndarray) -> Rates:
    """Decay by the same factor in every step, from the peak to the final fraction at the end."""
    return np.power(keys.learning_rate_final_fraction, (steps - warmup) / max(total - warmup, 1))


def wsd(keys: Step, warmup: int, total: int, steps: np.ndarray) -> Rates:
    """The peak, then linear decay to the final fraction over the last `wsd_decay_steps_fraction` of the steps.

    From Hägele et al. 2024, arXiv 2405.18392.
    """
    final, decay = keys.learning_rate_final_fraction, max(np.rint(keys.wsd_decay_steps_fraction * total), 1)
    since = np.maximum(steps - (total - decay), 0)
    return 1 - (1 - final) * since / decay


SHAPES: Mapping[str, Shape] = {"cosine": cosine, "exponential": exponential, "wsd": wsd}


def closed_form(keys: Step, total: int, steps: np.ndarray) -> Rates:
    """Rates of a schedule of `total` steps: a linear warm-up (Goyal et al. 2017, section 2.2), its shape, then 0.

    The last step of the warm-up and the first one after it have the peak's rate.
    """
    warmup = int(np.rint(keys.warmup_steps_fraction * total))
    after = SHAPES[keys.lr_schedule_type](keys, warmup, total, np.maximum(steps, warmup))
    return np.where(steps < total, np.where(steps < warmup, (steps + 1) / max(warmup, 1), after), 0.0)


def length(keys: Step, steps: int) -> int:
    """Steps of the schedule, in a run of `steps`."""
    return steps if keys.learning_rate_schedule_steps == -1 else keys.learning_rate_schedule_steps


def compared_steps(keys: Step, total: int) -> np.ndarray:
    """Numbers of all steps of a schedule and three after it.

    If it has more than MOST_STEPS, that many evenly spaced ones, and those near the ends of warm-up, plateau and
    schedule.
    """
    if total <= MOST_STEPS:
        return np.arange(total + 3)
    shares = keys.warmup_steps_fraction, 1 - keys.wsd_decay_steps_fraction
    borders = [0, total, *(round(share * total) for share in shares)]
    near = [np.arange(border - 3, border + 4) for border in borders]
    numbers = np.unique(np.concatenate([np.linspace(0, total, MOST_STEPS).astype(int), *near]))
    return numbers[numbers >= 0]


def rates_at(keys: Step, steps: int, numbers: np.ndarray) -> Rates:
    """Rates that a run of `steps` steps uses in the steps `numbers`, relative to the peak."""
    rates = [float(hparams_at(keys, steps, int(number))["learning_rate"]) for number in numbers]
    return np.array(rates) / keys.learning_rate


# ---- Rows


def as_published(keys: Step, total: int, numbers: np.ndarray, found: Rates) -> Row:
    """Compares the rates `found` in the steps `numbers` with the schedule's closed form, if SHAPES has one."""
    name, kind = "learning rates of the schedule", keys.lr_schedule_type
    if kind not in SHAPES:
        shapes = ", ".join(SHAPES)
        return not_applicable(name, f"lr_schedule_type={kind} is not one of {shapes}: only its limits are checked")
    return _compared(name, numbers, found, closed_form(keys, total, numbers), BOUND, f"{kind}, {total} steps")


def within_limits(total: int, numbers: np.ndarray, found: Rates) -> Row:
    """Checks what holds for every schedule: finite, from 0 to the peak, which it nearly reaches, and 0 after its end.

    A schedule may jump, as DeepSeek's does, so the largest change between two steps is only noted.
    """
    name, during = "the schedule reaches its peak and its end", numbers < total
    problems = {
        "is not finite": ~np.isfinite(found),
        "is negative": found < 0,
        "is above learning_rate": found > 1 + BOUND,
        "is not 0 after the schedule": (found != 0) & ~during,
    }
    for problem, where in problems.items():
        for at in np.flatnonzero(where)[:1]:
            excess = float(np.max(np.abs(found[where] - np.clip(found[where], 0, during[where]))))
            return verdict(name, excess, BOUND, f"step {numbers[at]}: {found[at]:.6g} times learning_rate {problem}")
    changes, note = np.abs(np.diff(found[during])) / np.diff(numbers[during]), ""
    if len(changes):
        at = int(np.argmax(changes > np.max(changes) - BOUND))  # many steps may change it equally, up to rounding
        note = f"the largest change in a step is {changes[at]:.2%} of the peak, first after step {numbers[at]}"
    failure = f"its highest rate is {np.max(found):.3f} of learning_rate"
    return verdict(name, max(0.0, float(1 - np.max(found))), PEAK_BOUND, note, failure)


def of_a_run(name: str, subject: Subject) -> Row:
    """Checks the rates that a run of plain gradient descent applies and logs, in a short schedule and two steps more.

    The applied rate is the norm of the update divided by the norm of the gradient. The reference is the closed form, or
    `rates_at` for a schedule without one. The run has the config's fractions of warm-up and decay, and its number of
    micro-batches, which must not count as steps of the schedule.
    """
    config, devices = subject.config, len(jax.devices())
    keys = short_runs.KEYS | PLAIN_DESCENT | {"learning_rate": RUN_RATE, "learning_rate_schedule_steps": RUN}
    keys |= {"steps": RUN + 2, "log_internals": 1, "enable_checkpointing": False}
    keys |= {"loss": ""}  # a user's loss may lack what is logged of layers, and rates do not depend on it
    keys |= {"per_device_batch_size": float(config.step.gradient_accumulation_steps), **mesh_keys({"data": devices})}
    if why := short_runs.obstacle(subject, keys):
        return not_applicable(name, why)
    with tempfile.TemporaryDirectory() as folder:
        config = short_runs.with_base(config.replace(**keys, base_output_directory=folder, run_name="rates"))
        entries = short_runs.train(config).metrics
    logged = np.array([entry["learning_rate"] for entry in entries if "learning_rate" in entry]) / RUN_RATE
    norms = [entry for entry in entries if any(name.startswith("update_norm/") for name in entry)]
    applied = np.array([_norm(each, "update_norm/") / _norm(each, "gradient_norm/") for each in norms]) / RUN_RATE
    numbers = np.arange(RUN + 2)
    if config.step.lr_schedule_type in SHAPES:
        expected = closed_form(config.step, RUN, numbers)
    else:
        expected = rates_at(config.step, config.run.steps, numbers)
    rows = [
        _compared(name, numbers, rates, expected, RUN_BOUND, f"{where} of a run of {RUN + 2} steps")
        for rates, where in ((applied, "updates"), (logged, "metrics.jsonl"))
    ]
    return max(rows, key=lambda row: row.figure or 0.0)


def _norm(entry: Mapping[str, Any], prefix: str) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for name, x in entry.items() if name.startswith(prefix))))


def _compared(name: str, numbers: np.ndarray, found: Rates, expected: Rates, bound: float, note: str) -> Row:
    errors = np.nan_to_num(np.abs(found - expected), nan=np.inf)
    at, wrong = int(np.argmax(errors)), np.flatnonzero(errors > bound)
    failure = f"step {numbers[at]}: {found[at]:.6g} times learning_rate, not {expected[at]:.6g}"
    if len(wrong):
        failure += f"; {len(wrong)} of {len(numbers)} steps are wrong, from {numbers[wrong[0]]} to {numbers[wrong[-1]]}"
    return verdict(name, float(errors[at]), bound, note, f"{failure}; {note}")
