"""`golden=FILE`: compares a few training steps with a file that earlier code wrote, bit for bit, for refactoring."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from src.config.keys import frozen
from src.config.schema import KEYS, Config
from src.config.yaml import dump
from src.extras.verify.rows import FAIL, PASS, Row
from src.extras.verify.subject import Context, Subject, flat
from src.system.errors import UserError, first_few

STEPS, PROJECTIONS = 3, 4
# Largest relative differences of losses and gradient norms that a row describes by these words; larger ones fail.
LAST_BITS, ROUNDING = 1e-6, 1e-5
# A weight's movement may differ by this factor more, because optimizers amplify the rounding of small gradients.
MOVED = 100


def check_file(path: Path, config: Config) -> None:
    """Raises UserError if the folder is missing, or the file is not from src.verify or is for another config."""
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"golden={path}: there is no folder {path.parent}")
        return
    try:
        before = json.loads(path.read_text())["config"]
    except (ValueError, KeyError, TypeError, OSError):
        raise UserError(f"golden={path} was not written by src.verify") from None
    if before != _digest(config):
        raise UserError(f"golden={path} was written for another config: give another file")


def rows(context: Context) -> Iterator[Row]:
    """Writes the file if there is none; otherwise compares losses, gradient norms and weights with it.

    Raises UserError like `check_file`, and if the model has other weights.
    """
    subject, path = context.subject, context.golden
    assert path
    check_file(path, subject.config)
    found = _steps(subject)
    if not path.exists():
        path.write_text(json.dumps({"config": _digest(subject.config), "figures": found}, indent=1) + "\n")
        yield Row(f"{STEPS} steps", PASS, note=f"written to {path}; run it again after an edit")
        return
    before = json.loads(path.read_text())["figures"]
    if before.keys() != found.keys():
        raise UserError(f"golden={path} has other weights: {first_few(sorted(before.keys() ^ found.keys()))}")
    moved = flat(subject.weights).keys()
    for name, (digest, *values) in found.items():
        old_digest, *old = before[name]
        figure = float(np.max(np.abs(np.subtract(values, old))) / max(np.max(np.abs(old)), 1e-30))
        scale = MOVED if name in moved else 1
        if digest == old_digest:
            yield Row(name, PASS, 0.0, 0.0, "same bits")
        elif figure <= ROUNDING * scale:
            what = "last bits" if figure <= LAST_BITS * scale else "rounding"
            yield Row(name, PASS, figure, ROUNDING * scale, f"changed in {what}")
        else:
            yield Row(name, FAIL, figure, ROUNDING * scale, "changed in value")


def _steps(subject: Subject) -> dict[str, list[Any]]:
    """Runs STEPS steps with the config's optimizer at the peak learning rate.

    Returns, for each loss, gradient norm and weight, a digest of its bits and numbers by which to measure a change: its
    value, or PROJECTIONS random projections of a weight's movement, which is small compared with the weight.
    """
    plan, rng = subject.reference_plan, np.random.default_rng(1)
    start, state, figures = flat(subject.weights), subject.first_state(plan), {}
    steps = subject.steps(plan, state, [plan.step.learning_rate] * STEPS)
    for step in range(STEPS):
        state, metrics = next(steps)
        for name in ("loss", "grad_norm"):
            figures[f"{name} of step {step}"] = _figure(np.asarray(metrics[name]), np.zeros(()), np.ones((1, 1)))
    weights = jax.device_get(state.weights)
    for path, leaf in (flat(weights.trainable) | flat(weights.stats)).items():  # stats: the biases of routers
        directions = rng.normal(size=(PROJECTIONS, leaf.size))
        figures[path] = _figure(np.asarray(leaf), start[path], directions)
    return figures


def _digest(config: Config) -> str:
    """Digests only the keys that are not at their defaults, because an edit may add a key."""
    keys = {key: value for key, value in config.items() if value != frozen(KEYS[key].default)}
    return hashlib.sha256(dump(keys).encode()).hexdigest()


def _figure(array: np.ndarray, start: np.ndarray, directions: np.ndarray) -> list[Any]:
    moved = directions @ (np.float64(array) - start).ravel()
    return [hashlib.sha256(array.tobytes()).hexdigest(), *moved.tolist()]
