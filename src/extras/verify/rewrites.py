"""Check c: other ways to compute the same step give the same step."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp

from src.config.step_keys import REMAT_POLICIES
from src.extras.verify.comparison import compared
from src.extras.verify.locate import parting_of
from src.extras.verify.rows import Row, not_applicable, unless_refused
from src.extras.verify.subject import PLAIN_DESCENT, Context, Result, Subject, mesh_keys
from src.model.attention_kernels import blocked
from src.step.plan import Batch

# Relative. Sums in another order give at most 1.6e-6 over three seeds of the quickstart, and with one seed 8e-6 for
# Mixtral 8x7B, 5e-5 for Qwen3-Next and 7e-5 for GPT-3 125M. A tile's gradient times 1.1 gives 0.1, leaving out a
# sequence or micro-batch 0.7 to 2.
BOUND = 3e-4  # as in meshes.py
TILE = 16  # tokens in a tile of blocked attention, so that a sequence has several
KERNELS = ("dot_product", "blocked")
BY_DESIGN = "; without the load-balance loss, which is a mean over micro-batches"


class Rewrite(NamedTuple):
    """Another way to compute the step."""

    name: str
    keys: Mapping[str, Any]
    devices: int = 1
    splits: bool = False  # it splits the batch into other micro-batches than the reference
    masked: bool = False  # it runs on `masked_batch`


def rows(context: Context) -> Iterator[Row]:
    """Compares each rewrite with a step of the config on one device, on the same batch.

    Rewrites that split the batch are compared with one micro-batch, without the load-balance loss.
    """
    subject = context.subject

    @functools.cache
    def expected(splits: bool, masked: bool) -> Result:
        if not splits:
            return subject.reference
        plan = subject.plan(**PLAIN_DESCENT, **one_batch())
        result = subject.result(plan, masked_batch(subject) if masked else subject.batch)
        # The metric load_balance_loss is a mean over micro-batches too.
        return result._replace(metrics={key: x for key, x in result.metrics.items() if key != "load_balance_loss"})

    def row(rewrite: Rewrite, wanted: Result) -> Row:
        keys = {**PLAIN_DESCENT, **(one_batch() if rewrite.splits else {}), **rewrite.keys}
        batch = masked_batch(subject) if rewrite.masked else subject.batch
        found = subject.result(subject.plan(rewrite.devices, **keys), batch)
        parts = functools.partial(parting_of, subject, rewrite.devices, keys, batch, BOUND)
        made = compared(rewrite.name, found, wanted, BOUND, parts)
        by_design = BY_DESIGN * bool(rewrite.splits and subject.config.step.load_balance_loss_weight)
        return made._replace(note=(made.note + by_design).removeprefix("; "))

    for rewrite in rewrites(subject):
        with mock.patch.dict(blocked.TILE, cpu=TILE):
            wanted = expected(rewrite.splits, rewrite.masked)  # what one device refuses is an error
            is_same_model = rewrite.devices == 1 and "attention" not in rewrite.keys
            yield unless_refused(rewrite.name, functools.partial(row, rewrite, wanted), required=is_same_model)
    yield repeated_stages(subject)


def repeated_stages(subject: Subject) -> Row:
    """Compares two pipeline stages that take two turns each with one device, in a model of twice the layers."""
    name, config = "2 pipeline stages, num_pipeline_repeats=2", subject.config
    if config.model.decoder_segments:
        return not_applicable(name, "the model has several kinds of layers")
    deep = Subject(config.replace(base_num_decoder_layers=2 * config.model.base_num_decoder_layers), subject.seed)
    wanted = deep.reference

    def row() -> Row:
        plan = deep.plan(2, **PLAIN_DESCENT, **mesh_keys({"stage": 2}), num_pipeline_repeats=2)
        return compared(name, deep.result(plan), wanted, BOUND)

    return unless_refused(name, row)


def rewrites(subject: Subject) -> Iterator[Rewrite]:
    """Yields rewrites by keys that should not change a step's results, except ones with the config's own values."""
    step, kernel = subject.config.step, subject.reference_plan.kernel
    for count in (1, 2, 4):
        if count != step.gradient_accumulation_steps:
            yield Rewrite(f"gradient_accumulation_steps={count}", {"gradient_accumulation_steps": count}, splits=True)
    yield Rewrite("num_vocab_tiling=2", {"num_vocab_tiling": 2})  # tiles of the vocabulary, or of T if it is sharded
    yield Rewrite("num_vocab_tiling=2 on mesh tensor 2", {**mesh_keys({"tensor": 2}), "num_vocab_tiling": 2}, 2)
    policies = [policy for policy in ("none", *REMAT_POLICIES) if policy != step.remat_policy]
    yield from (Rewrite(f"remat_policy={policy}", {"remat_policy": policy}) for policy in policies)
    scans = str(not subject.reference_plan.execution.scan_layers).lower()
    yield Rewrite(f"scan_layers={scans}", {"scan_layers": scans})
    yield from (Rewrite(f"attention={name}", {"attention": name}) for name in KERNELS if name != kernel)
    keys = {**mesh_keys({"data": 2}), "shard_optimizer_over_data": True}
    yield Rewrite("shard_optimizer_over_data on mesh data 2", keys, 2)
    for count in (2, 4):
        keys = {**mesh_keys({"stage": 2}), "num_pipeline_microbatches": count}
        yield Rewrite(f"2 pipeline stages, {count} micro-batches", keys, 2)
    keys = {"gradient_accumulation_steps": 2}
    yield Rewrite("no token of one micro-batch counts", keys, splits=True, masked=True)
    yield Rewrite("no token of one shard counts", mesh_keys({"data": 2}), 2, splits=True, masked=True)


def one_batch() -> dict[str, Any]:
    """Keys for a single micro-batch, without the load-balance loss, which depends on micro-batches."""
    return {"gradient_accumulation_steps": 1, "load_balance_loss_weight": 0.0}


def masked_batch(subject: Subject) -> Batch:
    """The batch with every target masked in the first of two micro-batches, and on the first of two devices."""
    mask = jnp.asarray(subject.batch["loss_mask"])
    return {**subject.batch, "loss_mask": mask.at[::2].set(0).at[: len(mask) // 2].set(0)}
