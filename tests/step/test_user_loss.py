"""A loss of the user's: the listing of docs/forking.md against optax, in both commands, and what is refused."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from src.model.params import Weights
from src.step.loss import hidden_states, next_token_loss
from src.step.trace import trace_train_step
from src.step.user_loss import loss_function
from src.system.errors import UserError
from tests import runs, tiny

FORKING = Path(__file__).parents[2] / "docs" / "forking.md"


@pytest.fixture
def my_loss(tmp_path, monkeypatch):
    """The listing as a module that can be imported, here and in processes of their own."""
    listing = re.search(r"```python\n(.*?)```", FORKING.read_text().partition("## A loss of your own")[2], re.DOTALL)[1]
    (tmp_path / "my_loss.py").write_text(listing)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    return "my_loss:smoothed"


def test_label_smoothing_as_documented_is_optaxs(my_loss):
    _, plan = tiny.make()
    weights, batch = tiny.random_weights(plan), tiny.packed_rows(0)
    model = plan.decoder(Weights(weights))
    sums = loss_function(my_loss)(model, batch, plan)
    hidden_BTD, context, _ = hidden_states(model, batch, plan)
    logits_BTV = model.logits(hidden_BTD, context=context)[..., : tiny.VOCAB]
    labels_BTV = optax.smooth_labels(jax.nn.one_hot(batch["targets"], tiny.VOCAB), 0.1)
    nats_BT = optax.softmax_cross_entropy(logits_BTV, labels_BTV)
    np.testing.assert_allclose(sums.loss, np.sum(nats_BT * batch["loss_mask"]), rtol=1e-5)
    others = next_token_loss(model, batch, plan)
    np.testing.assert_allclose(sums.z, others.z, rtol=1e-5)
    assert sums.non_padding == others.non_padding


def test_both_commands_train_on_it(my_loss, tmp_path):
    keys = {"loss": my_loss, "compiled_trainstep_file": tmp_path / "step", "jax_cache_dir": ""}
    keys["remat_policy"] = "minimal"  # has names that Python puts into another order in each process
    keys |= {"dataset_path": runs.write_corpus(tmp_path / "corpus"), "base_num_decoder_layers": 1, "steps": 2}
    keys |= {"base_output_directory": tmp_path, "checkpoint_period": 1, "num_vocab_tiling": 4}
    command = [sys.executable, "-m", "src.train_compile", *runs.arguments(1, compile_topology="cpu-1", **keys)]
    runs.finish(runs.start_command(command, tmp_path / "log"), tmp_path / "log")
    output = runs.finish(runs.start(tmp_path / "log", **keys), tmp_path / "log")
    assert f"loaded from {tmp_path / 'step'}" in output
    assert re.search(r"\nloss +my_loss:smoothed, next_token_loss in evaluations, in 4 tiles", output)
    with pytest.raises(UserError, match=r"loss: 'my_loss:smoothed' -> \"\"\n.*accept_changes=\[loss\]"):
        runs.run_here(**{**keys, "loss": "", "compiled_trainstep_file": "", "per_device_batch_size": 1})


def test_what_is_no_sum_is_refused(monkeypatch):
    def returning(**changed):
        def loss(model, batch, plan):
            return next_token_loss(model, batch, plan)._replace(**changed)

        return loss

    def raising(model, batch, plan):
        raise KeyError("labels")

    for function, message in (
        (
            returning(loss=jnp.zeros(3)),
            r"loss of float32\[3\]: expected floating\[\], a sum over the tokens of loss_mask",
        ),
        (returning(loss=1.0), r"loss of float: expected floating\[\]"),
        (returning(mtp=jnp.zeros(2)), r"mtp of float32\[2\]: expected floating\[0\]"),
        (returning(non_padding=jnp.zeros(())), r"non_padding of float32\[\]: expected integer\[\]"),
        (returning(metrics={1: (loss := jnp.zeros(()), loss)}), "must name its metrics with strings, not 1"),
        (returning(router=None), "router=None: expected the layers' reports"),
        (lambda model, batch, plan: 1.0, "a value of type float: expected a LossSums"),
        (lambda model, batch, plan: jnp.mean(model.embedding[...]), "returned an array: expected a LossSums"),
        (raising, r"loss raised KeyError: 'labels' \(.*test_user_loss.py, line"),
    ):
        monkeypatch.setattr(sys.modules[__name__], "refused", function, raising=False)
        with pytest.raises(UserError, match=message):
            trace_train_step(tiny.load(loss=f"{__name__}:refused", base_num_decoder_layers=1), jax.devices())
    monkeypatch.setattr(sys.modules[__name__], "refused", returning(router={}))
    for keys in ({"log_internals": 1}, {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 64}):
        with pytest.raises(
            UserError, match=r"router=\{\}: expected the layers' reports, the third result of hidden_states"
        ):
            trace_train_step(tiny.load(loss=f"{__name__}:refused", base_num_decoder_layers=1, **keys), jax.devices())
    trace_train_step(
        tiny.load(loss=f"{__name__}:refused", base_num_decoder_layers=1), jax.devices()
    )  # where nothing reads them
    experts = {"num_experts": 4, "base_moe_mlp_dim": 64, "routed_bias": "true", "mtp_num_layers": 1}
    of_layers = returning(router={"segments": {}}, mtp=jnp.zeros(1))
    monkeypatch.setattr(sys.modules[__name__], "refused", of_layers)
    with pytest.raises(UserError, match="without the prediction layers' reports, by which routed_bias moves"):
        trace_train_step(tiny.load(loss=f"{__name__}:refused", **experts), jax.devices())
    with pytest.raises(UserError, match="loss=my_loss: expected module:function"):
        trace_train_step(tiny.load(loss="my_loss"), jax.devices())
