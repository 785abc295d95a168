"""The loss of preference pairs: against torch and transformers' Llama of the same weights, and on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from src.data.packing import empty_batch, fill_row
from src.data.types import Document
from src.extras.preferences.dpo import dpo_loss, measure
from src.extras.preferences.pairs import pair_batch, pair_fields, pair_keys
from src.model.params import Weights
from src.step.eval_step import compile_eval_step
from src.step.optimizer import hparams_at
from src.step.state import abstract_state, batch_sharding
from src.step.train_step import compile_steps
from tests import tiny
from tests.model.families import plan_of, reference, weights_of

LENGTH, BETA, SMOOTHING = 48, 0.3, 0.1
KEYS = {"dpo_beta": BETA, "dpo_label_smoothing": SMOOTHING}


def pairs(count, vocab, seed=0):
    """Of each pair both answers' ids, and how many of the ids are the prompt's; the reference's log-probabilities."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        prompt = rng.integers(0, vocab, rng.integers(2, 9))
        answers = [rng.integers(0, vocab, rng.integers(1, 9)) for _ in range(2)]
        texts.append([(np.concatenate([prompt, answer]).astype(np.int32), len(prompt)) for answer in answers])
    return texts, rng.normal(-20, 5, (count, 2)).astype(np.float32)


def batch_of(texts, log_probs, rows):
    """A batch of the pairs, the rest of its rows padding."""
    batch = empty_batch(rows, LENGTH)
    for row, answers in enumerate(texts):
        documents = [Document(ids, np.arange(len(ids)) >= prompt) for ids, prompt in answers]
        fill_row(batch, row, ((document, 0, len(document.ids) - 1) for document in documents))
    return pair_batch(batch, dict(zip(pair_keys(batch), log_probs.tolist(), strict=False)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = reference("llama2")
    model.save_pretrained(folder)
    return model, folder


def in_torch(model, texts, log_probs):
    """The mean loss as equation 7 and conservative DPO write it, and each answer's log-probability and reward."""
    losses, answers = [], []
    for (chosen, rejected), references in zip(texts, torch.tensor(log_probs), strict=True):
        of_answer = []
        for ids, prompt in (chosen, rejected):
            ids = torch.tensor(ids, dtype=torch.long)
            log_softmax = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
            of_answer.append(sum(log_softmax[at - 1, ids[at]] for at in range(prompt, len(ids))))
        ratio_chosen, ratio_rejected = of_answer[0] - references[0], of_answer[1] - references[1]
        margin = BETA * ratio_chosen - BETA * ratio_rejected
        wrong = torch.log(torch.sigmoid(-margin))
        losses.append(-(1 - SMOOTHING) * torch.log(torch.sigmoid(margin)) - SMOOTHING * wrong)
        answers.append([*(each.item() for each in of_answer), BETA * ratio_chosen.item(), BETA * ratio_rejected.item()])
    return torch.stack(losses).mean(), np.array(answers)


@pytest.mark.parametrize("tiles", [1, pytest.param(4, marks=pytest.mark.long)])
def test_loss_gradients_and_metrics_are_torchs(llama, tmp_path, tiles):
    model, folder = llama
    plan = plan_of(folder, max_target_length=LENGTH, num_vocab_tiling=tiles, **KEYS)
    texts, log_probs = pairs(5, plan.spec.vocab_size)
    model.double().zero_grad()
    expected, answers = in_torch(model, texts, log_probs)
    expected.backward()
    gradients = reference("llama2")
    with torch.no_grad():
        for theirs, weight in zip(gradients.parameters(), model.parameters(), strict=True):
            theirs.copy_(weight.grad)
    gradients.save_pretrained(tmp_path)

    def mean_loss(weights):
        sums = dpo_loss(plan.decoder(Weights(weights)), batch_of(texts, log_probs, rows=6), plan)
        return sums.loss / len(texts), sums.metrics

    of_weights = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    (loss, metrics), ours = of_weights(weights_of(folder, plan))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    tiny.assert_close(ours, weights_of(tmp_path, plan), 1e-5)
    means = {name: float(total) / float(count) for name, (total, count) in metrics.items()}
    columns = ("log_prob_chosen", "log_prob_rejected", "reward_chosen", "reward_rejected")
    np.testing.assert_allclose([means[name] for name in columns], answers.mean(axis=0), rtol=1e-5)
    margins = answers[:, 2] - answers[:, 3]
    np.testing.assert_allclose(means["margin"], margins.mean(), rtol=1e-5)
    assert 0 < means["accuracy"] == np.mean(margins > 0) < 1


def test_a_mesh_measures_what_torch_does(llama):
    """Rows, the sequence and the weights shared out; held-out pairs beside a row of padding."""
    model, folder = llama
    mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_context_parallelism": 2}
    plan = plan_of(folder, 8, max_target_length=LENGTH, ici_tensor_parallelism=2, **mesh, **KEYS)
    plan = dataclasses.replace(plan, fields=pair_fields(LENGTH))
    texts, log_probs = pairs(3, plan.spec.vocab_size)
    with torch.no_grad():
        loss, answers = in_torch(model.double(), texts, log_probs)
    batch = jax.device_put(batch_of(texts, log_probs, rows=4), batch_sharding(plan.layout, plan.fields))
    measured = compile_eval_step(plan, measure)(plan.split(weights_of(folder, plan)), batch)
    np.testing.assert_allclose(measured["log_probs"][:3], answers[:, :2], rtol=1e-5)
    np.testing.assert_allclose(measured["loss_sum"] / measured["tokens"], loss, rtol=1e-5)


def beginning(devices, **keys):
    """A plan of pairs on the first devices, a state with random weights, and the compiled step."""
    _, plan = tiny.make(devices, max_target_length=LENGTH, **KEYS, **keys)
    plan = dataclasses.replace(plan, fields=pair_fields(LENGTH))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract := abstract_state(plan))
    state = dataclasses.replace(state, weights=plan.split(tiny.random_weights(plan)))
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    return plan, state, compile_steps(plan, abstract, loss=dpo_loss)[0]


def test_a_batch_without_pairs_changes_nothing_and_has_no_figures():
    plan, state, train = beginning(1, adam_weight_decay=0.5)
    place = batch_sharding(plan.layout, plan.fields)
    bits = []
    # The averages of the first step would move the weights in the second.
    for step, batch in enumerate((batch_of(*pairs(8, tiny.VOCAB), rows=8), batch_of([], np.zeros((0, 2)), rows=8))):
        state, metrics = train(state, jax.device_put(batch, place), hparams_at(plan.step, 20, step))
        bits.append([tiny.tree_bits(state.weights), tiny.tree_bits(state.opt)])
        assert np.isfinite(metrics["loss"]) == (step == 0)
    assert bits[0] == bits[1]
    assert metrics["tokens"] == 0
    assert np.isnan([metrics["loss"], metrics["grad_norm"], *jax.tree.leaves(metrics["user_metrics"])]).all()


def two_steps(devices, **keys):
    """Metrics of two updates on a mesh, and then what a measure of other pairs gives."""
    plan, state, train = beginning(devices, **keys)
    found, place = [], batch_sharding(plan.layout, plan.fields)
    for step in range(2):
        batch = batch_of(*pairs(8, tiny.VOCAB, seed=step), rows=8)
        state, metrics = train(state, jax.device_put(batch, place), hparams_at(plan.step, 20, step))
        assert metrics["tokens"] == 8
        found.append([metrics["loss"], metrics["grad_norm"], *metrics["user_metrics"].values()])
    held_out = batch_of(*pairs(7, tiny.VOCAB, seed=2), rows=8)
    measured = compile_eval_step(plan, measure)(state.weights, jax.device_put(held_out, place))
    assert measured["tokens"] == 7
    return jax.tree.map(np.asarray, [found, measured["loss_sum"], measured["log_probs"][:7]])


@pytest.fixture(scope="module")
def one_device():
    return two_steps(1)


# Copies of the weights, in micro-batches and tiles; a row shared out; stages of a pipeline, experts.
MESHES = {
    "data, context, tensor": {
        **{"ici_data_parallelism": 2, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
        **{"ici_fsdp_parallelism": 1, "gradient_accumulation_steps": 2, "num_vocab_tiling": 2},
        "per_device_batch_size": 0.5,
    },
    "fsdp": {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1},
    "stage, fsdp": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 4, "per_device_batch_size": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_and_micro_batches_give_what_one_device_does(one_device, name):
    for ours, expected in zip(jax.tree.leaves(two_steps(8, **MESHES[name])), jax.tree.leaves(one_device), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)
