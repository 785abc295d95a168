"""Evaluates a model on held-out data."""

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
    """Evaluates a model on one set by `eval_step`; a rolling one goes on at `position`, None: begins at its start.

    `prepare` makes of this host's rows those that `eval_step` takes.
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
        """Returns the sums of each batch, as `eval_step` computes them: a list for each of the models' weights."""
        batches = map(self._prepare, self.batches)
        arrays = (to_global(batch, self._sharding, self.rows, self._global_batch) for batch in batches)
        of_batches = [[self._eval_step(weights, batch) for weights in models] for batch in arrays]
        return [list(sums) for sums in zip(*jax.device_get(of_batches), strict=True)]

    def run(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics of `means`, under names of this set (`eval_key`).

        With `ema_decay` they have `eval_ema_loss` too: the averaged weights' loss on the same batches.
        """
        if state.ema:
            sums, sums_of_average = self.sums(state.weights, state.averaged())
            metrics = means(sums) | {"eval_ema_loss": mean_loss(sums_of_average)}
        else:
            metrics = means(*self.sums(state.weights))
        return {eval_key(metric, self.name): value for metric, value in metrics.items()}


def means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `eval_loss`, in nats per token, `eval_perplexity`, its exponential, and the metrics of `eval_metrics`.

    Where bytes are counted, of text alone, also `eval_bits_per_byte`: all its nats over all its bytes, in bits.
    Metrics that counted nothing have no value: they are left out, with a line for the user. `sums` are each batch's.
    Raises UserError: no token of the batches counts in the loss.
    """
    loss = mean_loss(sums)
    metrics = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
    of_text = ("text_nats", "text_bytes", "not_text")
    nats, text, other = (sum(float(batch.get(name, 0)) for batch in sums) for name in of_text)
    if other:
        say([f"eval_bits_per_byte is left out: {int(other)} tokens are ids of data that are no text"])
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
    """Returns the loss of these batches, in nats per token; raises UserError if no token counts in it."""
    tokens = sum(float(batch["tokens"]) for batch in sums)  # a batch_transform may weigh them
    if not tokens:
        raise UserError(
            "no token of the evaluation counts in the loss: with use_sft=true its rows hold prompts alone. Raise "
            "eval_steps (-1: all of the data) or max_target_length"
        )
    return sum(float(batch["loss_sum"]) for batch in sums) / tokens
