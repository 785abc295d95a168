"""The loss on held-out data, in a run or by itself: `python -m src.evaluate CONFIG.yml load_parameters_path=PATH`.

With texts_path it scores given texts, with tokens_path it computes logits, and then nothing else.
"""

from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import FrozenConfigDict

from src.data.loader import EvalBatches, host_rows, to_global
from src.data.sources import Source, SyntheticSource, open_eval_source
from src.data.tokenizer import Tokenizer
from src.errors import UserError, run_command
from src.inference import open_model
from src.mesh import global_batch_size
from src.metrics import perplexity
from src.scoring import score_texts, write_logits
from src.startup import configured, say
from src.train_step import StepPlan, batch_sharding, compile_eval_step

USAGE = """Measures the loss of a model, scores texts, computes logits.

python -m src.evaluate CONFIG.yml load_parameters_path=PATH eval_dataset_path=TEXTS [key=value ...]
python -m src.evaluate CONFIG.yml load_parameters_path=PATH texts_path=IN.txt scores_path=OUT.jsonl
python -m src.evaluate CONFIG.yml load_parameters_path=PATH tokens_path=IN.npy logits_path=OUT.npy
python -m src.evaluate --help KEY    what a key does; the group Evaluation has those of this command"""


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
        """`eval_loss`, a mean over the set's tokens in nats, `eval_perplexity`, its exponential, and `eval_metrics`'s.

        `parts` is the model, as `state_weights` gives it.

        Raises:
            UserError: none of the batches has a token that counts.
        """
        sums = [
            self._eval_step(parts, to_global(batch, self._place, self._rows, self._global_batch))
            for batch in self._batches
        ]
        sums = jax.device_get(sums)
        tokens = sum(float(batch["tokens"]) for batch in sums)
        if not tokens:
            raise UserError(
                "no token of the evaluation counts in the loss: with use_sft=true its rows hold prompts alone. Raise "
                "eval_steps (-1: all of the data) or max_target_length"
            )
        loss = sum(float(batch["loss_sum"]) for batch in sums) / tokens
        further = [batch["further"] for batch in sums if "further" in batch]
        return {
            "eval_loss": loss,
            "eval_perplexity": perplexity(loss),
            **{
                f"eval_{name}": float(
                    sum(batch[name][0] for batch in further) / sum(batch[name][1] for batch in further)
                )
                for name in (further[0] if further else ())
            },
        }


def main(argv: Sequence[str]) -> dict[str, float] | None:
    """Runs the command line `argv`; returns the evaluation's metrics, None where it asked for something else.

    Raises:
        UserError: a mistake in the command, its data or its weights.
    """
    config = configured(argv, USAGE)
    if config is None:
        return None
    opened = open_model(config)
    say(opened.messages)
    if config.texts_path or config.tokens_path:
        if config.texts_path:
            say([f"{score_texts(config, opened)} texts scored: {config.scores_path}"])
        if config.tokens_path:
            say([f"logits of shape {list(write_logits(config, opened))}: {config.logits_path}"])
        return None
    plan = opened.plan
    step = compile_eval_step(plan, tuple(plan.by_part(plan.shardings).values()))
    metrics = Evaluation(config, plan, step, open_eval_source(config), opened.tokenizer).run(opened.parts)
    say(f"{name} {value:.5f}" for name, value in metrics.items())
    return metrics


if __name__ == "__main__":
    run_command(main)
