"""The step that a configuration means on given devices: the same one for training and for compiling ahead of time."""

import dataclasses
import hashlib
import math
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from src.config.schema import Config
from src.errors import UserError
from src.model.spec import model_spec
from src.parallel.mesh import Layout, global_batch_size, make_layout
from src.step.optimizer import HParams, hparams_at
from src.step.plan import Batch, StepPlan, make_plan
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.train_step import compile_steps
from src.step.user_loss import loss_function

MAX_LOGITS = 8 * 2**30  # bytes on a device


class TracedStep(NamedTuple):
    """A step that is traced but not compiled, and what it is called with: `jax.ShapeDtypeStruct`s with shardings."""

    plan: StepPlan
    compiler_options: Mapping[str, str]  # XLA's, of `train`
    state: TrainState
    batch: Batch
    hparams: HParams
    train: jax.stages.Wrapped
    eval: jax.stages.Wrapped
    traced: jax.stages.Traced

    @property
    def rows(self) -> int:
        """Counts the rows of the global batch."""
        return self.batch["tokens"].shape[0]

    @property
    def tokens(self) -> int:
        """Counts the tokens of the global batch, padding included."""
        return self.batch["tokens"].size


def build(
    config: Config,
    devices: Sequence[jax.Device],
    compiler_options: Mapping[str, str] = {},
    fields: Mapping[str, jax.ShapeDtypeStruct] = {},
) -> TracedStep:
    """Traces a checked config's step; raises UserError if it does not fit devices or mesh, or a loss of one's own.

    Batches have `fields` too, beside those that the config gives them.
    """
    plan = plan_step(config, make_layout(config.mesh, devices))
    plan = dataclasses.replace(plan, fields={**plan.fields, **fields})
    rows, micro_batches = config.per_device_batch_size, config.gradient_accumulation_steps
    rows = global_batch_size(plan.layout, rows, micro_batches, "per_device_batch_size")
    state, batch = abstract_state(plan), abstract_batch(plan, rows, config.max_target_length)
    hparams = hparams_at(config.step, config.steps, 0)
    train, evaluate = compile_steps(plan, state, compiler_options, loss_function(config.step.loss))
    traced = train.trace(state, batch, hparams)
    return TracedStep(plan, compiler_options, state, batch, hparams, train, evaluate, traced)


def plan_step(config: Config, layout: Layout) -> StepPlan:
    """Returns the plan of a checked config's step; raises what `make_plan` raises."""
    step = dataclasses.replace(config.step, num_vocab_tiling=vocab_tiles(config, layout))
    spec = model_spec(config.model, step, config.max_target_length)
    return make_plan(spec, layout, step, config.mesh, config.batch, config.eval_metrics)


def vocab_tiles(config: Config, layout: Layout) -> int:
    """Returns `num_vocab_tiling`, or for 0 the fewest tiles (a power of 2) whose logits and gradient fit MAX_LOGITS.

    No more than rows divide into. With tiles logits are computed twice, and their weights gathered for each.
    """
    length, tiles = config.max_target_length, config.num_vocab_tiling
    if tiles:
        return tiles
    shards = math.prod(layout.shards(axis) for axis in ("batch", "length", "vocab"))
    logits = config.per_device_batch_size * layout.mesh.size * length * config.vocab_size / shards
    bytes_, most = 2 * logits * jnp.dtype(config.dtype).itemsize, length // layout.shards("norm_length")
    tiles = 1
    while bytes_ / tiles > MAX_LOGITS and most % (2 * tiles) == 0:
        tiles *= 2
    return tiles


def check_same_program(built: TracedStep, steps: int) -> None:
    """Raises UserError on every process where one would run another training step, of `steps`, than process 0."""
    if jax.process_count() == 1:
        return
    # Nor may what enters a step at run time differ: the hyper-parameters are compared at the ends and in the middle.
    hparams = [hparams_at(built.plan.step, steps, step) for step in (0, 1, steps // 2, steps - 1)]
    texts = {"the traced step": program_text(built.traced), "its hyper-parameters": str(hparams)}
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts.values()]
    mine = np.frombuffer(b"".join(digests), np.uint32).reshape(len(texts), 2)
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    differ = (everyones != everyones[0]).any(axis=2)
    if differ.any():
        others = ", ".join(map(str, np.flatnonzero(differ.any(axis=1))))
        what = " and ".join(text for text, differs in zip(texts, differ.any(axis=0), strict=True) if differs)
        raise UserError(
            f"process {others} would train otherwise than process 0: {what} differ. Keys, code and packages are the "
            "same, so look at the environment of the processes (XLA_FLAGS, JAX_*), at other packages, and at functions "
            "of your own"
        )


def program_text(traced: jax.stages.Traced, kernel_text: Callable[[bytes], str] = lambda bytecode: "") -> str:
    """Returns the traced step in words that are the same in every process, and on devices that are not here.

    Neither text has everything. StableHLO has shardings, donation and constants, but of kernels that XLA asks Python
    to partition (cuDNN's attention) only a Python object's address: what they were told, such as the scale, stands in
    the jaxpr. `kernel_text` writes a Pallas kernel, whose serialised form names the source files it is from.
    """
    lowered = traced.lower().as_text()
    lowered = re.sub(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d+"', r"\1", lowered)
    lowered = re.sub(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+", lambda body: kernel_text(b64decode(body[0])), lowered)
    lowered = re.sub(r'(?<=, ir = ")ML(?:[^"\\]|\\.)*', lambda body: kernel_text(_unescaped(body[0])), lowered)
    # Python prints the names that a remat policy saves in another order at each start.
    jaxpr = re.sub(r"frozenset\(\{(.*?)\}\)", lambda found: ", ".join(sorted(found[1].split(", "))), str(traced.jaxpr))
    return re.sub(r" at 0x[0-9a-f]+", "", jaxpr) + lowered


def _unescaped(text: str) -> bytes:
    """Returns the bytes of a string that MLIR printed."""
    whole = re.sub(r"\\(\\|[0-9A-F]{2})", lambda found: "\\" if found[1] == "\\" else chr(int(found[1], 16)), text)
    return whole.encode("latin1")
