"""Compiles the evaluation of a batch: sums of losses and of other metrics, to be divided by sums of their counts."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from src.config.schema import BatchKeys, Evaluation
from src.model.execution import check_rows
from src.model.params import Weights
from src.parallel.mesh import global_batch_size
from src.parallel.sequence import from_zigzag
from src.step.loss import batch_cross_entropy, hidden_states, in_zigzag
from src.step.plan import Batch, StepPlan
from src.step.state import batch_sharding

# Compiler options of every step, including evaluation, in addition to `compile_xla_flags`. XLA's own matmul kernels
# (Triton) are tuned by running them on a device: a program compiled without a device would use them untuned. With
# fusions of slices, a matmul whose output is also saved in a loop's array is computed twice (docs/log.md).
ALWAYS: dict[str, dict[str, str]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": "False", "xla_gpu_enable_dynamic_slice_fusion": "False"}
}


def always(platform: str) -> dict[str, str]:
    """Options from `ALWAYS` for a platform, except flags set in XLA_FLAGS, which options would override."""
    typed = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in ALWAYS.get(platform, {}).items() if not re.search(rf"--{name}\b", typed)}


def compile_eval_step(plan: StepPlan, function: Callable[..., dict[str, Any]] | None = None) -> jax.stages.Wrapped:
    """Jits `eval_step(weights, batch)`, or another function of these and the plan."""
    return jax.jit(
        functools.partial(function or eval_step, plan=plan),
        in_shardings=(plan.split(plan.shardings), batch_sharding(plan.layout, plan.fields)),
        out_shardings=plan.layout.sharding(()),
        compiler_options=always(plan.layout.platform),
    )


def eval_step(weights: Weights, batch: Batch, plan: StepPlan) -> dict[str, Any]:
    """Sums over a batch: `loss_sum` in nats, `tokens`, and for each of `user_metrics` a sum and its divisor.

    If the batch has the field `text_bytes`, also the other sums of `text_sums`. Raises UserError if `eval_metrics` does
    not return sums with divisors, and as `call` does if it fails.
    """
    model = plan.decoder(weights)
    inputs = in_zigzag(batch, plan.layout)
    hidden_BTD, context, _ = hidden_states(model, inputs, plan)
    logits_of = functools.partial(model.logits, context=context)
    if "text_bytes" in batch:
        from src.step.token_scores import text_sums

        sums = text_sums(logits_of, hidden_BTD, inputs, plan)
    else:
        sums = {"loss_sum": batch_cross_entropy(model, context, hidden_BTD, inputs, plan)[0]}
    sums["tokens"] = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
    if plan.eval_metrics:
        hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
        hidden_BTD = from_zigzag(hidden_BTD, plan.layout.shards("length"))
        logits_BTV = logits_of(hidden_BTD)[..., : plan.spec.vocab_size]
        from src.system.user_code import call, check_metrics

        metrics = call("eval_metrics", plan.eval_metrics, logits_BTV, batch)
        taken = ("loss", "perplexity", "bits_per_byte", "ema_loss")
        sums["user_metrics"] = check_metrics("eval_metrics", metrics, taken)
    return sums


def eval_batch_size(evaluation: Evaluation, batch: BatchKeys, plan: StepPlan) -> int:
    """Global batch size of evaluation; raises UserError if it is not divisible by batch shards or micro-batches."""
    key = "eval_per_device_batch_size" if evaluation.eval_per_device_batch_size else "per_device_batch_size"
    rows = evaluation.eval_per_device_batch_size or batch.per_device_batch_size
    size = global_batch_size(plan.layout, rows, 1, key)
    check_rows(size, plan.layout, plan.execution, key)
    return size
