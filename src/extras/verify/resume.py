"""Check f: a run that is killed and resumed makes the same steps, bit for bit, as one that was not."""

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from src.checkpoint.initial_weights import initial_weights
from src.checkpoint.load_weights import load_weights
from src.checkpoint.resume import all_weights
from src.config.schema import Config
from src.data.types import InputSpec
from src.extras.verify import short_runs
from src.extras.verify.logits import NO_PATTERNS, of_adapters
from src.extras.verify.rows import FAIL, PASS, Row, largest, none_of, not_applicable, verdict, worst
from src.extras.verify.subject import Context, Subject, flat, mesh_keys, of_pairs
from src.model.params import ROLES
from src.step.state import abstract_state
from src.system.imports import optional

STEPS, SAVED = 6, 3  # steps of a run, and the step of its first checkpoint
# Relative, for losses on another mesh: sums in another order give at most 1e-7 over three seeds of five kinds of
# models, a lost optimizer state 5e-4.
BOUND = 5e-6


# If the config has a ramp, so do the runs: the first steps have half of the rows. The ramp ends before step SAVED, so
# a resumed run has only full batches, and must find its place in the data after the smaller ones.
RAMP: dict[str, Any] = {"enable_rampup_batch_size": True, "per_device_batch_size": 2.0}
RAMP |= {"per_device_batch_size_start": 1.0, "per_device_batch_size_increment": 1.0}


class End(NamedTuple):
    """Every array of a run's last state by its path, and the losses in its metrics.jsonl by step."""

    arrays: dict[str, np.ndarray]
    losses: dict[int, float]


def rows(context: Context) -> Iterator[Row]:
    """Compares a run with runs that resume from its checkpoint of step SAVED, on the same mesh and on another.

    A run that begins with only the checkpoint's weights must differ, or else the comparison could not fail. Also
    compares the run's weights as other commands load them. Raises UserError if a run or its checkpoint is refused.
    """
    subject, devices = context.subject, len(jax.devices())
    if of_pairs(subject.config):
        yield not_applicable("resume", "src.train_dpo has its own data: runs of src.train are checked")
        return
    mesh, other_mesh = mesh_keys({"data": devices}), mesh_keys({"data": devices // 2, "fsdp": 2})
    if why := short_runs.obstacle(subject, mesh, other_mesh):
        yield not_applicable("resume", why)
        return
    keys = short_runs.KEYS | {"steps": STEPS, "checkpoint_period": SAVED, "max_num_checkpoints_to_keep": -1}
    keys |= {"enable_checkpointing": True, "per_device_batch_size": 1.0}
    if context.whole.batch.enable_rampup_batch_size:
        keys |= RAMP | {"global_rampup_samples": 2 * devices}
    if subject.config.step.learning_rate_schedule_steps == -1:
        keys["learning_rate_schedule_steps"] = STEPS  # also for the runs that end earlier
    with tempfile.TemporaryDirectory() as folder:
        config = short_runs.with_base(subject.config.replace(**keys, base_output_directory=folder, **mesh))
        whole, other, half = _run(config, "whole"), config.replace(**other_mesh), {"steps": SAVED}
        saved = _run(config.replace(**half), "saved")
        yield _same("restored state", _resumed(config.replace(**half), "restored"), saved)
        yield _same("restored state on another mesh", _resumed(other.replace(**half), "restored elsewhere"), saved)
        yield _same("resumed run", _resumed(config, "resumed"), whole)
        yield _loaded("weights as other commands load them", config, whole)
        yield _by_rules("weights that load_weights_rules replaces", config, saved, whole)
        weights = config.replace(load_parameters_path=f"{folder}/whole/checkpoints/{SAVED}")
        differ = _same("", _run(weights, "weights"), whole).figure
        note = f"{differ:.0f} losses and arrays differ" if differ else "the same as with all of the state"
        yield Row("weights alone make another run", PASS if differ else FAIL, note=note)
        found = _resumed(other, "other").losses
    ratios = {step: abs(found[step] / loss - 1) for step, loss in whole.losses.items() if step > SAVED}
    yield verdict("resumed run on another mesh", ratios[largest(ratios)], BOUND, f"the loss of step {largest(ratios)}")


def _loaded(name: str, config: Config, whole: End) -> Row:
    """Compares the weights that src.decode loads from a run's folder with the run's last weights in `whole`.

    With `ema_decay`, also the EMA of the weights. Adapters are merged into the weights that they adapt.
    """
    config = config.replace(**mesh_keys({}))
    plan, errors = Subject(config.replace(**NO_PATTERNS)).reference_plan, dict[str, float]()
    for role in ("trainable", *["ema"] * bool(config.step.ema_decay)):
        of_run = _of_entries(whole.arrays, (role, "frozen", "stats"))
        expected = of_run | {path: of_run[path] + x for path, x in of_adapters(Subject(config), of_run).items()}
        path = f"{config.run.base_output_directory}/whole"
        loaded = load_weights(path, all_weights(abstract_state(plan)), ema=role == "ema")
        for weight, x in flat(jax.device_get(loaded.state)).items():
            wanted = expected[weight]
            errors[f"{role} {weight}"] = float(np.max(np.abs(x - wanted)) / (np.max(np.abs(wanted)) or 1.0))
    return worst(name, errors, BOUND)


def _by_rules(name: str, config: Config, first: End, last: End) -> Row:
    """Loads a run's weights of step SAVED, but by a rule the embedding of its last step, as a new run begins with."""
    if config.step.lora_rank or not optional("weights_by_rules"):
        return not_applicable(name, "lora_rank is set, or src/extras/weights_by_rules.py was deleted")
    config = config.replace(**mesh_keys({}))
    folder, plan = f"{config.run.base_output_directory}/whole/checkpoints", Subject(config).plan()
    rule = {"match": "embedding", "path": f"{folder}/{STEPS}"}
    keys = {"load_parameters_path": f"{folder}/{SAVED}", "load_weights_rules": (rule,)}
    inputs = InputSpec.of(config.replace(**keys), None)
    loaded, _ = initial_weights(inputs, (), all_weights(abstract_state(plan)), plan.axes)
    replaced, others = (_of_entries(end.arrays, ROLES) for end in (last, first))
    wrong = [
        path
        for path, x in flat(jax.device_get(loaded)).items()
        if x.tobytes() != (replaced if path == "embedding" else others)[path].tobytes()
    ]
    return none_of(name, wrong)


def _of_entries(arrays: Mapping[str, np.ndarray], entries: Collection[str]) -> dict[str, np.ndarray]:
    """Finds the arrays of some entries of a state, such as `trainable`, by their paths within these."""
    parts = ((path.partition("."), x) for path, x in arrays.items())
    return {name: x for (entry, _, name), x in parts if entry in entries}


def _run(config: Config, name: str) -> End:
    state, metrics = short_runs.train(config.replace(run_name=name))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state.by_name()))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return End(arrays, {line["step"]: line["loss"] for line in metrics})


def _resumed(config: Config, name: str) -> End:
    """Resumes in a copy of the whole run's folder, as a kill after its first checkpoint would leave it."""
    folder = Path(config.run.base_output_directory)
    shutil.copytree(folder / "whole", folder / name, ignore=shutil.ignore_patterns(str(STEPS)))
    log = folder / name / "metrics.jsonl"
    log.write_text("".join(line for line in log.open() if json.loads(line)["step"] <= SAVED))
    return _run(config, name)


def _same(name: str, found: End, expected: End) -> Row:
    """Compares all losses exactly, and all arrays bit for bit."""
    steps = [step for step in expected.losses if found.losses.get(step) != expected.losses[step]]
    paths = [path for path, array in expected.arrays.items() if found.arrays[path].tobytes() != array.tobytes()]
    wrong = [*(f"the loss of step {step}" for step in steps), *paths]
    return none_of(name, wrong, f"{len(expected.losses)} losses and {len(expected.arrays)} arrays")
