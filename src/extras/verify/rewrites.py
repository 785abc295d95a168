"""Check c: other ways to compute the same step give the same step."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp

from src.config.step_keys import REMAT_POLICIES
from src.extras.verify.locate import parting_of
from src.extras.verify.meshes import obstacle
from src.extras.verify.subject import NOT_APPLICABLE, PLAIN_DESCENT, Result, Row, Subject, compared, mesh_keys
from src.model.attention_kernels import blocked
from src.step.plan import Batch

# The same sums in another order: clean figures are at most 1.6e-6 for the quickstart, over three seeds, and with one
# seed 8e-6 for Mixtral 8x7B and 5e-5 for Qwen3-Next. A tile's gradient times 1.1 gives 0.1, a dropped sequence or
# micro-batch 0.7 to 2.
BOUND = 3e-4  # as of meshes
TILE = 16  # tokens in a tile of blocked attention, so that a sequence has several
KERNELS = ("dot_product", "blocked")
BY_DESIGN = "; without the load-balance loss, which is a mean over micro-batches"


class Rewrite(NamedTuple):
    """Another way to compute the step."""

    name: str
    keys: Mapping[str, Any]
    devices: int = 1
    splits: bool = False  # into other micro-batches than the reference


def rows(subject: Subject) -> Iterator[Row]:
    """Compares each rewrite with the reference, on the same batch."""

    @functools.cache
    def expected(splits: bool, masked: bool) -> Result:
        if not splits and not masked:
            return subject.reference
        plan = subject.plan(**PLAIN_DESCENT, **one_batch())
        result = subject.result(plan, masked_batch(subject) if masked else subject.batch)
        # It is reported as a mean over micro-batches too.
        return result._replace(metrics={key: x for key, x in result.metrics.items() if key != "load_balance_loss"})

    def row(rewrite: Rewrite, masked: bool = False) -> Row:
        keys = {**PLAIN_DESCENT, **(one_batch() if rewrite.splits or masked else {}), **rewrite.keys}
        place = rewrite.devices, keys, masked_batch(subject) if masked else None
        with mock.patch.dict(blocked.TILE, cpu=TILE):
            found = subject.attempt(*place)
            if isinstance(found, str):
                return Row("c", rewrite.name, NOT_APPLICABLE, note=found)
            parts = functools.partial(parting_of, subject, *place, BOUND)
            found = compared("c", rewrite.name, found, expected(rewrite.splits, masked), BOUND, parts)
        by_design = BY_DESIGN * bool(rewrite.splits and subject.config.step.load_balance_loss_weight)
        return found._replace(note=(found.note + by_design).removeprefix("; "))

    for rewrite in rewrites(subject):
        yield row(rewrite)
    stage = Rewrite("2 pipeline stages", mesh_keys({"stage": 2}), 2)
    if why := obstacle(subject.config, {"stage": 2}):
        yield Row("c", stage.name, NOT_APPLICABLE, note=why)
    else:
        for micro_batches in (2, 4):
            keys = {**stage.keys, "num_pipeline_microbatches": micro_batches}
            yield row(stage._replace(name=f"{stage.name}, {micro_batches} micro-batches", keys=keys))
    yield repeated_stages(subject)
    micro_batch = Rewrite("no token of one micro-batch counts", {"gradient_accumulation_steps": 2}, splits=True)
    yield row(micro_batch, masked=True)
    yield row(Rewrite("no token of one shard counts", mesh_keys({"data": 2}), 2, splits=True), masked=True)


def repeated_stages(subject: Subject) -> Row:
    """Compares two pipeline stages of two parts each with one device, for twice as many layers."""
    name, config = "2 pipeline stages, num_pipeline_repeats=2", subject.config
    if config.model.decoder_segments:
        return Row("c", name, NOT_APPLICABLE, note="the model has several kinds of layers")
    deep = Subject(config.replace(base_num_decoder_layers=2 * config.model.base_num_decoder_layers), subject.seed)
    found = deep.attempt(2, {**PLAIN_DESCENT, **mesh_keys({"stage": 2}), "num_pipeline_repeats": 2})
    if isinstance(found, str):
        return Row("c", name, NOT_APPLICABLE, note=found)
    return compared("c", name, found, deep.reference, BOUND)


def rewrites(subject: Subject) -> Iterator[Rewrite]:
    """The rewrites that any model has, but those that the config has already."""
    step, kernel = subject.config.step, subject.reference_plan.kernel
    for count in (1, 2, 4):
        if count != step.gradient_accumulation_steps:
            yield Rewrite(f"gradient_accumulation_steps={count}", {"gradient_accumulation_steps": count}, splits=True)
    yield Rewrite("num_vocab_tiling=2", {"num_vocab_tiling": 2})  # of the vocabulary; if it is sharded, of sequences
    yield Rewrite("num_vocab_tiling=2 on mesh tensor 2", {**mesh_keys({"tensor": 2}), "num_vocab_tiling": 2}, 2)
    policies = [policy for policy in ("none", *REMAT_POLICIES) if policy != step.remat_policy]
    yield from (Rewrite(f"remat_policy={policy}", {"remat_policy": policy}) for policy in policies)
    scans = str(not subject.reference_plan.execution.scan_layers).lower()
    yield Rewrite(f"scan_layers={scans}", {"scan_layers": scans})
    yield from (Rewrite(f"attention={name}", {"attention": name}) for name in KERNELS if name != kernel)
    keys = {**mesh_keys({"data": 2}), "shard_optimizer_over_data": True}
    yield Rewrite("shard_optimizer_over_data on mesh data 2", keys, 2)


def one_batch() -> dict[str, Any]:
    """Keys without micro-batches, and without the loss that depends on them."""
    return {"gradient_accumulation_steps": 1, "load_balance_loss_weight": 0.0}


def masked_batch(subject: Subject) -> Batch:
    """The batch with no token that counts in the first of two micro-batches, and none on the first of two shards."""
    mask = jnp.asarray(subject.batch["loss_mask"])
    return {**subject.batch, "loss_mask": mask.at[::2].set(0).at[: len(mask) // 2].set(0)}
