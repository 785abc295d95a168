"""Runs the evaluations of an evaluation set, and computes their metrics from the sums of its batches."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from src.config.schema import Evaluation
from src.data.eval_batches import EvalBatches
from src.data.host_arrays import host_rows, to_global
from src.data.types import EvalSet, InputSpec, RowArrays
from src.model.params import Weights
from src.run.metrics import eval_key, perplexity
from src.step.eval_step import eval_batch_size
from src.step.plan import StepPlan
from src.step.state import TrainState, batch_sharding
from src.system.errors import UserError, say


class Evaluator:
    """Evaluates a model on one set, `data`, with `eval_step`.

    Rolling evaluation starts at `position`, from `EvalBatches.position`; None: with the first batch. `prepare` converts
    this host's rows to the ones that `eval_step` takes. Raises as `eval_batch_size` and `EvalBatches` do.
    """

    def __init__(
        self,
        section: Evaluation,
        inputs: InputSpec,
        plan: StepPlan,
        eval_step: jax.stages.Wrapped,
        data: EvalSet,
        position: Mapping[str, Any] | None = None,
        prepare: Callable[[RowArrays], RowArrays] = lambda rows: rows,
    ) -> None:
        self.name, self.source, self._eval_step, self._prepare = data.name, data.source, eval_step, prepare
        self._global_batch = eval_batch_size(section, inputs.batch, plan)
        self._sharding = batch_sharding(plan.layout, plan.fields)
        self.rows = host_rows(self._sharding["tokens"], (self._global_batch, inputs.batch.max_target_length))
        rolls = section.eval_mode == "rolling"
        self.batches = EvalBatches(inputs, data, self.rows, self._global_batch, rolls, position)

    def sums(self, *models: Weights) -> list[list[dict[str, Any]]]:
        """Runs `eval_step` on each batch with each model's weights; returns for each model its sums, one per batch."""
        batches = map(self._prepare, self.batches)
        arrays = (to_global(batch, self._sharding, self.rows, self._global_batch) for batch in batches)
        of_batches = [[self._eval_step(weights, batch) for weights in models] for batch in arrays]
        return [list(sums) for sums in zip(*jax.device_get(of_batches), strict=True)]

    def run(self, state: TrainState) -> dict[str, float]:
        """Computes the metrics of `means`, named for this set by `eval_key`.

        With `ema_decay`, also `eval_ema_loss`: the loss of the EMA of the weights on the same batches. Raises UserError
        as `means` does, and as reading and tokenizing documents do.
        """
        if state.ema:
            sums, sums_of_average = self.sums(state.weights, _averaged(state))
            metrics = means(sums) | {"eval_ema_loss": mean_loss(sums_of_average)}
        else:
            metrics = means(*self.sums(state.weights))
        return {eval_key(metric, self.name): value for metric, value in metrics.items()}


def _averaged(state: TrainState) -> Weights:
    """Replaces the trained weights by their EMA, in the weights' dtypes."""
    average = jax.tree.map(lambda mean, w: mean.astype(w.dtype), state.ema, state.weights.trainable)
    return dataclasses.replace(state.weights, trainable=average)


def means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Computes `eval_loss` (nats per token), `eval_perplexity` (its exponential) and the metrics of `eval_metrics`.

    If bytes are counted and all tokens are text, also `eval_bits_per_byte`: the loss of tokens of text, without ends of
    documents, in bits per byte of UTF-8. A metric with a count of 0 is left out, with a line for the user. `sums` has
    one entry per batch. Raises UserError if no token of the batches counts in the loss.
    """
    loss = mean_loss(sums)
    metrics = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
    of_text = ("text_nats", "text_bytes", "not_text")
    nats, text, other = (sum(float(batch.get(name, 0)) for batch in sums) for name in of_text)
    if other:
        say([f"eval_bits_per_byte is left out: {int(other)} tokens come from data that is not text"])
    elif text:
        metrics["eval_bits_per_byte"] = nats / math.log(2) / text
    user_metrics = [batch["user_metrics"] for batch in sums if "user_metrics" in batch]
    for name in user_metrics[0] if user_metrics else ():
        total, count = (sum(float(batch[name][index]) for batch in user_metrics) for index in (0, 1))
        if count:
            metrics[f"eval_{name}"] = total / count
        else:
            say([f"eval_{name} is left out: its count is 0 over the whole evaluation"])
    return metrics


def mean_loss(sums: Sequence[Mapping[str, Any]]) -> float:
    """Averages the loss over the batches of `sums`, in nats per token; raises UserError if no token counts in it."""
    tokens = sum(float(batch["tokens"]) for batch in sums)  # weighted, if a batch_transform gives weights
    if not tokens:
        raise UserError(
            "no token of the evaluation counts in the loss: with use_sft=true its rows hold only prompts. Raise "
            "eval_steps (-1: all of the data) or max_target_length"
        )
    return sum(float(batch["loss_sum"]) for batch in sums) / tokens
