"""Trains a model on preference pairs: `python -m src.train_dpo CONFIG load_parameters_path=MODEL key=value`.

A separate training script with the structure of `src/train.py`, without the parts that DPO does not need. The loss is
in `src/extras/preferences/dpo.py`; `src/extras/preferences/pairs.py` builds the rows of a batch.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from src.checkpoint.run_rules import run_rules
from src.config.schema import KEYS, Config
from src.config.usage import Usage
from src.config.yaml import dump
from src.data.open import train_validation_split
from src.data.processes import gather_json
from src.data.tokenizer import make_tokenizer
from src.data.types import EvalSet, InputSpec, TrainData
from src.extras.generation.loaded_model import model_fingerprint
from src.extras.preferences.dpo import LOSS, measure
from src.extras.preferences.pairs import PairRows, PairSource, pair_batch, pair_fields, pair_keys
from src.extras.preferences.reference import saved_reference
from src.model.params import Weights
from src.run.diagnostics import advice_on_memory, stack_traces
from src.run.evaluator import Evaluator
from src.run.recorder import Result
from src.run.run import Run
from src.run.run_setup import configured
from src.step.eval_step import compile_eval_step
from src.step.optimizer import hparams_at
from src.system.errors import UserError, say

USAGE = Usage(
    """Trains a model on preference pairs (DPO).

python -m src.train_dpo CONFIG load_parameters_path=MODEL dataset_path=PAIRS.jsonl [key=value ...]
python -m src.train_dpo RUN                       resumes a run""",
    ("Finetuning: preferences",),
)
# Keys that change a src.train run and have no meaning here: ignoring them silently would be wrong.
_NOT_HERE = (
    *("dataset_type", "datasets", "eval_datasets", "eval_mode", "eval_metrics", "batch_transform"),
    *("load_full_state_path", "load_weights_rules", "z_loss_multiplier", "mtp_num_layers", "quantization"),
    "enable_rampup_batch_size",
)


def main(argv: Sequence[str] | ConfigDict) -> Result | None:
    """Runs the command line `argv`, and returns the run's result; None if it only asked for help.

    Raises UserError for a mistake, data or weights that do not fit, or a non-finite loss; TransientError if a disk, a
    store or another process fails.
    """
    config = configured(argv, USAGE)
    if config is None:
        return None
    unused = [f"{key}={dump(config[key])}" for key in _NOT_HERE if config[key] != KEYS[key].default]
    if unused := [*unused, *[f"loss={config.step.loss}"] * (config.step.loss not in ("", LOSS))]:
        raise UserError(
            f"src.train_dpo does not support {', '.join(unused)} (docs/dpo.md): leave out, or use the default"
        )
    for key, what in (("dataset_path", "a .jsonl file of pairs"), ("load_parameters_path", "which is the reference")):
        if not config[key]:
            raise UserError(f"src.train_dpo needs {key}, {what}: the model is compared with a trained one")
    advice = advice_on_memory(config.batch.per_device_batch_size, config.step.remat_policy)
    with stack_traces(config.diagnostics), advice, contextlib.ExitStack() as exits:
        # packing: kernels must separate the pair's answers, which are two segments of a row.
        return train(config.replace(loss=LOSS, use_sft=False, packing=True), exits)


def train(config: Config, exits: contextlib.ExitStack) -> Result:
    """Trains with a checked config; `exits` closes whatever the run opens. Raises as `main` does."""
    # ---- Devices, model and step
    run = Run(config, exits, pair_fields(config.batch.max_target_length))
    plan, traced = run.plan, run.traced
    spec = plan.spec
    if spec.embedding_dropout or spec.has_capacity or any(layer.dropout_rate for layer in spec.layers):
        raise UserError(
            "dropout_rate and capacity_factor would make a reward random, or dependent on the pair's other answer: set "
            "dropout_rate=0 and capacity_factor=-1"
        )

    # ---- Data
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    assert tokenizer
    # The settings for reading: conversations, one pair per row.
    of_chats = config.replace(use_sft=True, packing=False, loss="")
    inputs = InputSpec.of(of_chats, tokenizer, run_rules(config.run, config.checkpoint))
    files = {key: PairSource(config[key], key, inputs) for key in ("dataset_path", "eval_dataset_path") if config[key]}
    pairs, held_out = files["dataset_path"], files.get("eval_dataset_path")
    if config.evaluation.eval_interval > 0 and held_out is None:
        pairs, held_out = train_validation_split(pairs, config.data.eval_fraction)
    data = TrainData(("",), (PairRows(inputs, pairs),), (1.0,))
    eval_sets = []
    if config.evaluation.eval_interval > 0:
        eval_sets = [EvalSet("", PairRows(inputs, held_out), config.evaluation.eval_steps)]
    model = model_fingerprint(config)

    # ---- Start or resume
    run.open(inputs, data, eval_sets, reference=model["weights"])
    # With these keys, `conclude` generates no sample, and suggests a chat but no src.evaluate.
    as_chats = config.replace(use_sft=True, eval_interval=-1, sample_length=0)
    if run.is_over():
        return run.conclude(as_chats)
    order = f"by seed {config.data.data_shuffle_seed}, one pair per row"
    run.announce(loss=f"DPO, dpo_beta {config.step.dpo_beta:g}", order=order)

    # ---- The reference, computed once and saved in the folder
    eval_step = compile_eval_step(plan, measure)
    evaluator = functools.partial(Evaluator, config.evaluation, inputs, plan, eval_step)
    sources = [EvalSet(key, PairRows(inputs, file), -1) for key, file in files.items()]
    inputs_of_reference = [
        model,
        tokenizer.fingerprint(),
        tokenizer.chat_template,
        [file.fingerprint() for file in files.values()],
    ]
    compute = functools.partial(log_probs, evaluator, sources, None if run.start.resumed else run.state.weights)
    run.prepare = functools.partial(pair_batch, reference=saved_reference(run.folder, inputs_of_reference, compute))
    run.evaluate_by(eval_step)

    # ---- Steps
    with run:
        for step in run.steps():
            batch = run.next_batch()
            hparams = hparams_at(config.step, config.run.steps, step)
            state, metrics = traced.train(run.state, run.to_devices(batch), hparams)
            run.record(state, metrics, batch)
            if run.saves():
                run.save()
            if run.evaluates():
                run.evaluate()
    return run.conclude(as_chats)


def log_probs(
    evaluator: Callable[..., Evaluator], sources: Sequence[EvalSet], weights: Weights | None
) -> dict[str, list[float]]:
    """Computes the log-probabilities of both answers of each pair, in nats, by `pair_keys`.

    `weights` are the reference's. Raises UserError if they are None, as in a resumed run, which no longer has them.
    """
    if weights is None:
        raise UserError(
            "the reference's log-probabilities are not in the run's folder (reference-*.json) for these pairs, model "
            "and precision: give the original ones (accept_changes does not help), or use another run_name"
        )
    log_probs: dict[str, list[float]] = {}
    for source in sources:
        assert isinstance(source.source, PairRows)
        say([f"reference: computing log-probabilities of {source.source.row_count:,} pairs in {source.name}"])
        keys: list[list[str]] = []
        each = evaluator(source, prepare=lambda rows, keys=keys: keys.append(pair_keys(rows)) or pair_batch(rows, None))
        for of_batch, sums in zip(keys, *each.sums(weights), strict=True):
            log_probs |= zip(of_batch, sums["log_probs"][each.rows].tolist(), strict=True)
    return {key: pair for of_process in gather_json(log_probs) for key, pair in of_process.items() if key}
