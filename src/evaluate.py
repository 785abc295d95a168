"""The loss on held-out data."""

from typing import Any

import jax
from ml_collections import FrozenConfigDict

from src.data.loader import EvalBatches, host_rows, to_global
from src.data.sources import Source, SyntheticSource
from src.data.tokenizer import Tokenizer
from src.mesh import global_batch_size
from src.metrics import perplexity
from src.train_step import StepPlan, batch_sharding


class Evaluation:
    """One evaluation set, whose batches are the same each time `run` goes through them."""

    def __init__(
        self,
        config: FrozenConfigDict,
        plan: StepPlan,
        eval_step: jax.stages.Wrapped,
        source: Source | SyntheticSource,
        tokenizer: Tokenizer | None,
    ) -> None:
        key = "eval_per_device_batch_size" if config.eval_per_device_batch_size else "per_device_batch_size"
        self._eval_step = eval_step
        self._global_batch = global_batch_size(plan.layout, config[key], 1, key)
        self._place = batch_sharding(plan.layout)
        self._rows = host_rows(self._place["tokens"], (self._global_batch, config.max_target_length))
        self._batches = EvalBatches(config, source, tokenizer, self._rows, self._global_batch)

    def run(self, parts: tuple[Any, ...]) -> dict[str, float]:
        """`eval_loss`, a mean over the set's tokens in nats, and `eval_perplexity`, its exponential.

        `parts` is the model, as `state_weights` gives it.
        """
        sums = [
            self._eval_step(parts, to_global(batch, self._place, self._rows, self._global_batch))
            for batch in self._batches
        ]
        sums = jax.device_get(sums)
        tokens = sum(float(batch["tokens"]) for batch in sums)
        loss = sum(float(batch["loss_sum"]) for batch in sums) / tokens
        return {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
