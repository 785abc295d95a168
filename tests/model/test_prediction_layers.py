"""The extra prediction layers' loss, computed again in numpy document by document."""

import jax
import numpy as np
import pytest

from src.model.params import Weights
from src.step.loss import hidden_states, next_token_loss
from tests.tiny import Trainer, make, packed_rows, random_weights

SETTINGS = {"mtp_num_layers": 2, "position_type": "none", "base_num_kv_heads": 4}
EPSILON = 1e-5


def norm(x, weights):
    return weights["scale"] * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)


def block(x_TD, weights):
    """A layer without positions."""
    y, attention = norm(x_TD, weights["attention_norm"]), weights["attention"]
    q, k, v = (np.einsum("td,dnh->nth", y, attention[name]) for name in ("query", "key", "value"))
    scores = np.einsum("nth,nsh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(x_TD), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    x_TD = x_TD + np.einsum("nts,nsh,nhd->td", shares, v, attention["out"])
    y, wi = norm(x_TD, weights["feed_forward_norm"]), weights["feed_forward"]["wi"]
    gate, up = np.einsum("td,daf->atf", y, wi)
    return x_TD + (gate / (1 + np.exp(-gate)) * up) @ weights["feed_forward"]["wo"]


def further_loss(weights, hidden_TD, tokens_T, targets_T, vocab):
    """The summed loss of each extra layer on one document, and how many tokens it predicts.

    The first joins hidden states after the final norm with the embeddings of the next tokens; each further one what the
    last gave with the embeddings of the tokens one on. No layer sees, or predicts, past the document's end.
    """
    losses = []
    for distance, layer in enumerate(weights["mtp"].values(), start=1):
        length = len(tokens_T) - distance
        if length < 1:
            losses.append((0.0, 0))
            continue
        embedded = norm(weights["embedding"][tokens_T[distance:]], layer["embedding_norm"])
        hidden_TD = np.concatenate([embedded, norm(hidden_TD[:length], layer["hidden_norm"])], axis=-1)
        hidden_TD = block(hidden_TD @ layer["projection"], layer["block"])
        logits_TV = norm(hidden_TD, layer["final_norm"]) @ weights["output"][:, :vocab]
        log_normaliser_T = np.log(np.exp(logits_TV).sum(axis=-1))
        losses.append((np.sum(log_normaliser_T - logits_TV[np.arange(length), targets_T[distance:]]), length))
    return losses


@pytest.mark.parametrize("num_vocab_tiling", [1, 4])
def test_the_loss_is_that_of_each_document_by_itself(num_vocab_tiling):
    _, plan = make(**SETTINGS, num_vocab_tiling=num_vocab_tiling)
    weights, batch = random_weights(plan), packed_rows(0, rows=4)

    @jax.jit
    def compute(weights):
        decoder = plan.decoder(Weights(weights))
        return hidden_states(decoder, batch, plan)[0], next_token_loss(decoder, batch, plan).mtp

    hidden_BTD, further = jax.device_get(compute(weights))
    np.testing.assert_allclose(further, by_document(plan, weights, batch, hidden_BTD)[:, 0], rtol=1e-5)


def by_document(plan, weights, batch, hidden_BTD):
    """[layers, 2]: each extra layer's summed loss over the batch's documents, and the tokens that it predicts."""
    total = 0
    for row in range(len(hidden_BTD)):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            place = batch["segment_ids"][row] == segment
            document = [array[row, place] for array in (hidden_BTD, batch["tokens"], batch["targets"])]
            total += np.array(further_loss(jax.tree.map(np.float64, weights), *document, plan.spec.vocab_size))
    return total


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_metric_is_nats_per_token_that_an_extra_layer_predicts(micro_batches):
    trainer = Trainer(initial=False, **SETTINGS, mtp_loss_scaling_factor=0.0, gradient_accumulation_steps=micro_batches)
    batch, weights = packed_rows(0), jax.device_get(trainer.state.weights.trainable)
    hidden_of = jax.jit(lambda weights: hidden_states(trainer.plan.decoder(Weights(weights)), batch, trainer.plan)[0])
    hidden_BTD = hidden_of(weights)
    sums, counts = by_document(trainer.plan, weights, batch, np.asarray(hidden_BTD)).T
    assert counts[1] < counts[0] < batch["loss_mask"].sum()
    np.testing.assert_allclose(trainer.step(batch, 0)["mtp_loss"], np.mean(sums / counts), rtol=1e-5)


def test_masked_targets_count_for_nothing():
    """The loss of one target is that of all targets, less that of all others."""
    _, plan = make(**SETTINGS)
    weights, batch = random_weights(plan), packed_rows(0, rows=2)

    @jax.jit
    def further(mask):
        return next_token_loss(plan.decoder(Weights(weights)), {**batch, "loss_mask": mask}, plan).mtp

    one, first = np.zeros_like(batch["loss_mask"]), np.zeros_like(batch["loss_mask"])
    one[0, np.argmax(batch["positions"][0] == 2)] = 1.0
    whole, without, alone = further(batch["loss_mask"]), further(batch["loss_mask"] - one), further(one)
    np.testing.assert_allclose(whole - without, alone, rtol=1e-4)
    assert alone.sum() > 1.0
    first[0, 0] = 1.0  # the target of a document's first token, which the decoder alone predicts
    assert not further(first).any()


def test_training_steps_descend_it():
    trainer, batch = Trainer(initial=False, **SETTINGS, mtp_loss_scaling_factor=10.0), packed_rows(0)
    losses = [trainer.step(batch, number)["mtp_loss"] for number in range(15)]
    assert losses[-1] < 0.9 * losses[0]
