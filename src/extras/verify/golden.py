"""Compares the bits of a few training steps with an earlier version of the code's: `golden=FILE`, for refactoring."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from src.config.yaml import dump
from src.extras.verify.subject import FAIL, PASS, Row, Subject
from src.model.params import by_path, dotted
from src.step.optimizer import hparams_at
from src.step.state import abstract_state, batch_sharding, init_state
from src.step.train_step import compile_steps
from src.system.errors import UserError

STEPS, PROJECTIONS = 3, 4
LAST_BITS, ROUNDING = 1e-6, 1e-4  # relative differences up to which these words are used


def rows(subject: Subject, path: Path) -> Iterator[Row]:
    """Writes the file if there is none; otherwise says of losses, gradient norms and weights how far they changed.

    Raises UserError if the file is another config's.
    """
    found = _steps(subject)
    if not path.exists():
        path.write_text(json.dumps(found, indent=1) + "\n")
        yield Row("golden", f"{STEPS} steps", PASS, note=f"written to {path}; run it again after an edit")
        return
    try:
        before = json.loads(path.read_text())
        changed = before["config"] != found["config"] or before["figures"].keys() != found["figures"].keys()
    except (ValueError, KeyError, TypeError):
        raise UserError(f"golden={path} was not written by src.verify") from None
    if changed:
        raise UserError(f"golden={path} is of another config or other weights: give another file")
    for name, (digest, *values) in found["figures"].items():
        old_digest, *old = before["figures"][name]
        figure = float(np.max(np.abs(np.subtract(values, old))) / max(np.max(np.abs(old)), 1e-30))
        if digest == old_digest:
            yield Row("golden", name, PASS, 0.0, 0.0, "same bits")
        elif figure <= ROUNDING:
            what = "last bits" if figure <= LAST_BITS else "rounding"
            yield Row("golden", name, PASS, figure, ROUNDING, f"changed in {what}")
        else:
            yield Row("golden", name, FAIL, figure, ROUNDING, "changed in value")


def _steps(subject: Subject) -> dict[str, Any]:
    """Runs some steps with the config's optimizer; returns of each figure a digest, and numbers that measure changes.

    A weight's numbers are its projections on random directions.
    """
    plan, rng = subject.reference_plan, np.random.default_rng(1)
    abstract = abstract_state(plan)
    train_step, _ = compile_steps(plan, abstract, loss=subject.loss)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    weights = jax.device_put(plan.split(subject.weights), shardings.weights)
    state = jax.device_put(jax.jit(lambda weights: init_state(plan, weights))(weights), shardings)
    batch = jax.device_put(subject.batch, batch_sharding(plan.layout, plan.fields))
    figures = {}
    for step in range(STEPS):
        state, metrics = train_step(state, batch, hparams_at(plan.step, STEPS, step))
        for name in ("loss", "grad_norm"):
            figures[f"{name} of step {step}"] = _figure(np.asarray(metrics[name]), np.ones((1, 1)))
    for path, leaf in by_path(jax.device_get(dataclasses.asdict(state.weights)["trainable"])).items():
        figures[dotted(path)] = _figure(np.asarray(leaf), rng.normal(size=(PROJECTIONS, leaf.size)))
    return {"config": hashlib.sha256(dump(dict(subject.config)).encode()).hexdigest(), "figures": figures}


def _figure(array: np.ndarray, directions: np.ndarray) -> list[Any]:
    return [hashlib.sha256(array.tobytes()).hexdigest(), *(directions @ np.float64(array).ravel()).tolist()]
