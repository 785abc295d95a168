"""A batch of which no token counts in the loss: it updates nothing and has no figures, in steps, runs, evaluations."""

import json
import math

import jax
import numpy as np
import pytest

from src.run.evaluator import mean_loss
from tests import runs
from tests.tiny import Trainer, packed_rows, tree_bits

OPTIONS = {
    "plain": {"adam_weight_decay": 0.5, "log_internals": 1},
    "micro-batches": {
        "gradient_accumulation_steps": 2,
        "z_loss_multiplier": 0.1,
        "num_experts": 4,
        "scan_layers": "false",
    },
    "averages": {"ema_decay": 0.5, "skip_step_on_spikes": "true", "skip_step_interval": 4, "mtp_num_layers": 1},
}
OPTIONS["micro-batches"] |= {"num_experts_per_tok": 2, "load_balance_loss_weight": 0.1}


@pytest.mark.parametrize("options", OPTIONS)
def test_it_changes_nothing_and_has_no_figures(options):
    trainer = Trainer(initial=False, **OPTIONS[options])
    batch = packed_rows(0)
    metrics = trainer.step(batch, 0)  # so that Adam's averages are not zero: from them alone it would move the weights
    assert math.isfinite(metrics["loss"])
    before = trainer.state
    names = ("weights", "opt", "ema")
    bits = {name: tree_bits(getattr(before, name)) for name in names}
    window = {name: np.asarray(before.spikes[name]).tolist() for name in before.spikes}
    metrics = trainer.step({**batch, "loss_mask": np.zeros_like(batch["loss_mask"])}, 1)
    assert {name: tree_bits(getattr(trainer.state, name)) for name in names} == bits
    assert int(trainer.state.step) == 2
    assert metrics["finite"]
    assert [metrics["tokens"], math.isnan(metrics["loss"]), math.isnan(metrics["grad_norm"])] == [0, True, True]
    if trainer.plan.spec.mtp_num_layers:
        assert math.isnan(metrics["mtp_loss"])
    if window:  # of spikes: neither its loss nor its gradient's norm enters it
        after = {name: np.asarray(x).tolist() for name, x in trainer.state.spikes.items()}
        assert after == {**window, "skipped": window["skipped"] + 1}
    assert trainer.step(batch, 2)["loss"] != metrics["loss"]
    assert tree_bits(trainer.state.weights) != bits["weights"]


def test_tokens_of_which_none_is_predicted_further_ahead_have_no_mtp_loss():
    """Each second token is another segment's: there is a next token, and none after it."""
    trainer = Trainer(initial=False, mtp_num_layers=1)
    batch = packed_rows(0)
    segments = np.broadcast_to(np.arange(1, batch["tokens"].shape[1] + 1, dtype=np.int32), batch["tokens"].shape)
    batch |= {"segment_ids": segments, "positions": np.zeros_like(segments)}
    metrics = trainer.step({**batch, "loss_mask": np.ones_like(batch["loss_mask"])}, 0)
    assert math.isfinite(metrics["loss"])
    assert math.isnan(metrics["mtp_loss"])


def test_weights_of_tokens_that_cancel_out_are_tokens_all_the_same():
    trainer = Trainer(initial=False)
    batch = packed_rows(0)
    signs = np.where(np.arange(batch["tokens"].shape[1]) % 2, 1, -1).astype(np.float32)
    before = tree_bits(trainer.state.weights)
    metrics = trainer.step({**batch, "loss_mask": np.broadcast_to(signs, batch["tokens"].shape)}, 0)
    assert metrics["tokens"] == 0
    assert math.isfinite(metrics["loss"])
    assert tree_bits(trainer.state.weights) != before


@pytest.mark.parametrize("weights", [[0.25, 0.0, 1e-3], [2.0, 1.0, 0.5]])
def test_an_evaluation_divides_by_the_weights_of_its_tokens(weights):
    """Also where they are less than one: the mean does not depend on their unit."""
    sums = [{"loss_sum": 3.0 * weight, "tokens": weight} for weight in weights]
    assert mean_loss(sums) == pytest.approx(3.0)


# ---- Runs


LONG = [{"prompt": "word " * 40 + str(n), "completion": "answer"} for n in range(40)]


def test_prompts_longer_than_a_row_end_a_run_that_can_learn_nothing(tmp_path, monkeypatch, capsys):
    """As an answer is cut off with its prompt, no row of the first ten batches has one."""
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, LONG)))
    keys = {"use_sft": True, "packing": False, "long_documents": "truncate", "steps": 40, "checkpoint_period": 4}
    keys |= {"dataset_path": tmp_path / "chats.jsonl", "base_output_directory": tmp_path}
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert "no token of the first 10 steps counts in the loss" in said
    assert "raise max_target_length" in said
    written = runs.lines(tmp_path / "run")
    assert [(line["loss"], line["perplexity"], line["grad_norm"]) for line in written] == [(None, None, None)] * 9
    assert len(written) == 9
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**{**keys, "steps": 3, "run_name": "short"}))
    assert "no token of the first 3 steps counts in the loss" in said


def no_targets_in_odd_batches(rows, calls=[]):  # noqa: B006
    calls.append(1)
    rows["loss_mask"] = rows["loss_mask"] * (len(calls) % 2)
    return rows


def test_batches_without_targets_between_others_have_no_figures(tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 6, "checkpoint_period": 3}
    keys |= {"data_threads": 1, "batch_transform": f"{__name__}:no_targets_in_odd_batches"}
    runs.run_here(**keys)
    losses = [loss for _, loss in runs.losses(tmp_path / "run")]
    empty = [step for step, loss in enumerate(losses, 1) if loss is None]
    assert len(empty) == 3
    assert {step % 2 for step in empty} == {empty[0] % 2}
    printed = capsys.readouterr().out
    for step in empty:
        assert f"step {step}/6  loss    null  grad    null" in printed
        assert f"step {step}: no update is made because no token of the batch counts in the loss" in printed
    assert printed.count("null") == 2 * len(empty)
    assert jax.process_count() == 1
    assert (tmp_path / "run" / "report.html").exists()
