"""verify's checks k, l and m: their references equal other implementations, clean code passes, faults are named."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from src.config import optimizer_keys
from src.config.optimizer_keys import OPTIMIZERS, SCHEDULES, OptimizerType, Schedule
from src.data import eval_batches
from src.data.document_stream import DocumentStream
from src.data.open import train_validation_split
from src.data.types import InputSpec
from src.extras.verify import evaluation, kinds, schedules, updates
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS
from src.extras.verify.subject import LENGTH, Subject
from src.run import evaluator
from src.step import adafactor, matrices, muon, optimizer, train_step
from src.step.loss import next_token_loss
from src.system.errors import Unsupported
from tests import runs
from tests.tiny import assert_close, load
from tests.verify.contexts import context

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "capacity_factor": 1.0}
PEAK = 0.01


def given(seed=0, **keys):
    return context(Subject(load(max_target_length=LENGTH, **keys), seed))


def named(rows):
    return {row.name: row for row in rows}


def assert_clean(rows):
    """No row fails, and each figure is at most a third of its bound."""
    rows = list(rows)
    assert [row for row in rows if row.status == PASS]
    for row in rows:
        assert row.status != FAIL, row
        assert not row.bound or row.figure <= row.bound / 3, row


# ---- k


@pytest.mark.parametrize(
    ("kind", "total", "warmup"), [("cosine", 100, 0.1), ("cosine", 7, 0.0), ("exponential", 50, 0.2)]
)
def test_closed_forms_equal_pytorchs_schedules(kind, total, warmup):
    keys = load(lr_schedule_type=kind, warmup_steps_fraction=warmup, learning_rate=PEAK).step
    final, after = keys.learning_rate_final_fraction, total - round(warmup * total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, after, eta_min=final * PEAK)
        if kind == "cosine"
        else torch.optim.lr_scheduler.ExponentialLR(optimizer, final ** (1 / after))
    )
    rates = []
    for _ in range(after):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    found = schedules.closed_form(keys, total, np.arange(total + 1))
    np.testing.assert_allclose(found[total - after : total], np.array(rates) / PEAK, rtol=1e-9)
    assert found[total] == 0


def test_warm_up_and_wsd_equal_optaxs_schedules():
    keys = load(lr_schedule_type="wsd", wsd_decay_steps_fraction=0.25, warmup_steps_fraction=0.1).step
    parts = [optax.linear_schedule(0, 1, 4), optax.constant_schedule(1), optax.linear_schedule(1, 0.1, 10)]
    schedule = optax.join_schedules(parts, [4, 30])
    # Optax's warm-up begins at 0, the one here at the first step's share of the peak.
    wanted = [schedule(step + (step < 4)) for step in range(40)]
    np.testing.assert_allclose(schedules.closed_form(keys, 40, np.arange(40)), wanted, rtol=1e-6)


SHAPES = [{}, {"lr_schedule_type": "wsd", "steps": 1_000_000, "warmup_steps_fraction": 0.003}]
SHAPES += [{"lr_schedule_type": "exponential", "learning_rate_schedule_steps": 7777, "warmup_steps_fraction": 0}]
SHAPES += [{"steps": 1}, {"steps": -1, "learning_rate_schedule_steps": 3}, {"learning_rate_final_fraction": 0}]


@pytest.mark.parametrize("keys", SHAPES)
def test_clean_schedules_pass(keys):
    assert_clean(itertools.islice(schedules.rows(given(**keys)), 2))


def test_a_run_applies_and_logs_the_schedule(monkeypatch):
    model = given(gradient_accumulation_steps=2, lr_schedule_type="wsd").subject
    with runs.built_once():
        assert_clean([schedules.of_a_run("rates", model)])
        at = optimizer_keys.learning_rate
        monkeypatch.setattr("src.run.recorder.learning_rate", lambda keys, steps, step: at(keys, steps, step + 1))
        row = schedules.of_a_run("rates", model)
    assert row.status == FAIL
    assert "metrics.jsonl" in row.note


@pytest.mark.long
def test_a_run_of_adapters_is_clean():
    with runs.built_once():
        assert_clean([schedules.of_a_run("rates", given(lora_rank=2, load_parameters_path="elsewhere").subject)])


def test_a_refusal_during_a_run_is_a_fault(monkeypatch):
    """Only before it may a mesh refuse the model."""

    def refused(*given, **keys):
        raise Unsupported("an edit's mistake")

    monkeypatch.setattr("src.train.train", refused)
    with pytest.raises(Unsupported, match="an edit's mistake"):
        list(schedules.rows(given()))
    monkeypatch.setattr(Subject, "plan", refused)
    row = schedules.of_a_run("rates", given().subject)
    assert (row.status, row.note) == (NOT_APPLICABLE, "an edit's mistake")


def without_reports(model, batch, plan):
    """A loss as a user may write it: it leaves out the layers' reports, which a dense model need not have."""
    return next_token_loss(model, batch, plan)._replace(router={})


def test_a_run_of_a_loss_without_layers_reports_is_clean():
    model = given(loss=f"{__name__}:without_reports").subject
    with runs.built_once():
        assert_clean([schedules.of_a_run("rates", model)])


def shape(monkeypatch, share):
    """The rows of a user's schedule."""
    monkeypatch.setitem(SCHEDULES, "mine", Schedule("mine", share, reads=()))
    keys = load().step
    object.__setattr__(keys, "lr_schedule_type", "mine")
    numbers = schedules.compared_steps(keys, 1000)
    found = schedules.rates_at(keys, 1000, numbers)
    return schedules.as_published(keys, 1000, numbers, found), schedules.within_limits(1000, numbers, found)


@pytest.mark.parametrize(
    ("share", "problem"),
    [
        (lambda keys, step, warmup, total: (warmup / step) ** 0.5, ""),
        (lambda keys, step, warmup, total: 0.1 if step > 800 else 1.0, ""),
        (lambda keys, step, warmup, total: 1.0 + step / total, "is above learning_rate"),
        (lambda keys, step, warmup, total: 0.5 - step / total, "is negative"),
        (lambda keys, step, warmup, total: float("nan"), "is not finite"),
    ],
)
def test_of_a_users_schedule_only_the_limits_are_checked(monkeypatch, share, problem):
    published, limits = shape(monkeypatch, share)
    assert (published.status, "lr_schedule_type=mine is not one of" in published.note) == (NOT_APPLICABLE, True)
    assert limits.status == (FAIL if problem else PASS)
    assert problem in limits.note
    if not problem:
        assert "the largest change in a step is" in limits.note


@pytest.mark.parametrize("change", [lambda step: step - 1, lambda step: step + 1, lambda step: 2 * step])
@pytest.mark.parametrize("keys", SHAPES[:2])
def test_a_schedule_of_other_steps_is_found(monkeypatch, change, keys):
    at = optimizer_keys.learning_rate
    monkeypatch.setattr("src.step.optimizer.learning_rate", lambda keys, steps, step: at(keys, steps, change(step)))
    row = next(schedules.rows(given(**{"steps": 1_000_000, **keys})))
    assert row.status == FAIL
    assert row.figure > 3 * row.bound


# ---- l


def two_gradients(shape=(3, 6, 4)):
    rng = np.random.default_rng(0)
    return updates.Past(*(rng.normal(size=shape) for _ in range(3)), is_matrix=True)


def updated(optimizer, past, layer):
    """An optax optimizer's second update of a matrix, as it is subtracted."""
    weight = np.float32(past.weight[layer])
    state = optimizer.init(weight)
    for gradient in (past.first, past.second):
        update, state = optimizer.update(np.float32(gradient[layer]), state, weight)
    return -np.asarray(update)


KEYS = load(opt_type="muon", muon_beta=0.9, adam_b1=0.8, adam_b2=0.99).step
OTHERS = {
    "adamw": lambda: optax.adam(1.0, 0.8, 0.99, 1e-8),
    "adafactor": lambda: optax.adafactor(1.0, min_dim_size_to_factor=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_references_equal_optaxs_optimizers(name):
    past = two_gradients()
    found = updates.UPDATES[name](KEYS, past)
    for layer, update in enumerate(found):
        assert_close(update, updated(OTHERS[name](), past, layer), 2e-4)


def test_adafactors_reference_of_vectors_equals_optaxs():
    past = two_gradients((2, 1, 5))._replace(is_matrix=False)
    vectors = past._replace(first=past.first[:, 0], second=past.second[:, 0], weight=past.weight[:, 0])
    for layer, update in enumerate(updates.adafactor(KEYS, past)):
        assert_close(update[0], updated(OTHERS["adafactor"](), vectors, layer), 1e-5)


def test_muons_iteration_and_size_equal_optaxs():
    """Without momentum, to which optax applies Adam's corrections of the bias."""
    past = two_gradients()
    past = past._replace(first=0 * past.first)
    optimizer = optax.contrib.muon(1.0, beta=0.0, nesterov=False, consistent_rms=updates.MUON_RMS, eps=1e-7)
    for layer, update in enumerate(updates.muon(KEYS, past)):
        assert_close(update, updated(optimizer, past, layer), 1e-4)


def test_muons_reference_equals_pytorchs():
    """As closely as bfloat16 allows, in which PyTorch's iterates: without Nesterov's momentum they differ by 0.5."""
    past = two_gradients((1, 8, 5))
    weight = torch.nn.Parameter(torch.tensor(past.weight[0]))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for gradient in (past.first, past.second):
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient[0])
        optimizer.step()
    assert_close((before - weight.detach()).numpy(), updates.muon(KEYS, past)[0], 0.05)


def test_a_weight_in_matrices_has_no_padding():
    kind = kinds.Kind((0, 2), (1,), (3,), vocab=(3, 4))
    found = kind.matrices(np.arange(2 * 3 * 2 * 5).reshape(2, 3, 2, 5))
    assert found.shape == (4, 3, 4)
    assert found[1].tolist() == [[5, 6, 7, 8], [15, 16, 17, 18], [25, 26, 27, 28]]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "keys",
    [
        {"opt_type": "muon", "optimizer_rules": '[{match: "*wi", opt_type: adafactor, learning_rate_scale: 0.3}]'},
        pytest.param({"opt_type": "muon", **EXPERTS}, marks=pytest.mark.long),
        pytest.param({"opt_type": "adafactor", **EXPERTS}, marks=pytest.mark.long),
        pytest.param({"mup_base_emb_dim": 16, "adam_clip_threshold": 0.5}, marks=pytest.mark.long),
    ],
)
def test_clean_updates_pass(keys, seed):
    assert_clean(updates.rows(given(seed, **keys)))


@pytest.mark.parametrize(
    ("module", "name", "value", "keys"),
    [
        (adafactor, "CLIP", 2.0, {"opt_type": "adafactor"}),
        pytest.param(muon, "ROUNDS", 6, {"opt_type": "muon"}, marks=pytest.mark.long),
    ],
)
def test_another_constant_of_an_optimizer_is_found(monkeypatch, module, name, value, keys):
    monkeypatch.setattr(module, name, value)
    row = named(updates.rows(given(**keys)))[f"{keys['opt_type']}'s second update"]
    assert row.status == FAIL
    assert row.figure > 3 * row.bound


def test_a_weight_that_muon_leaves_to_adamw_is_named(monkeypatch):
    matrix = matrices._matrix

    def misjudged(axes, fan_in, vocab_size):
        found = matrix(axes, fan_in, vocab_size)
        return dataclasses.replace(found, hidden=found.hidden or axes == ("embed", "vocab"))

    monkeypatch.setattr(matrices, "_matrix", misjudged)
    row = named(updates.rows(given(opt_type="muon")))["adamw's second update"]
    assert row.status == FAIL
    assert row.note.startswith("output; 1 of 5")


def test_a_learning_rate_scaled_twice_is_named(monkeypatch):
    scaled = optimizer.scaled
    monkeypatch.setattr(optimizer, "scaled", lambda *args: 2 * scaled(*args))
    (row,) = updates.rows(given(optimizer_rules="[{match: attention.query, learning_rate_scale: 0.5}]"))
    assert row.status == FAIL
    assert "attention.query; 1 of" in row.note


def test_gradients_that_adamw_gets_unclipped_are_found(monkeypatch):
    """Which plain gradient descent, with which check e looks at the clipping itself, does not tell."""
    monkeypatch.setattr(train_step, "clip", lambda gradients, norm, threshold: gradients)
    (row,) = updates.rows(given())
    assert row.status == FAIL
    assert row.figure > 3 * row.bound


def test_a_mesh_on_which_adafactors_updates_differ_is_found_beside_muon(monkeypatch):
    scaling = adafactor.adafactor

    def doubled_on_a_mesh(chosen, inputs):
        factor = 2.0 if jax.tree.leaves(inputs.shardings)[0].mesh.size > 1 else 1.0
        return [*scaling(chosen, inputs), optax.masked(optax.scale(factor), chosen)]

    monkeypatch.setattr(adafactor, "adafactor", doubled_on_a_mesh)
    rules = '[{match: "*wi", opt_type: adafactor}]'
    found = named(updates.rows(given(opt_type="muon", optimizer_rules=rules)))
    assert [name for name, row in found.items() if row.status == FAIL] == [
        "adafactor's second update, mesh fsdp 2 x tensor 2"
    ]


def test_a_users_optimizer_is_not_compared(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "mine", OptimizerType("mine", "src.step.adafactor:adafactor"))
    model = given()
    object.__setattr__(model.subject.config.step, "opt_type", "mine")
    (row,) = updates.rows(model)
    assert (row.status, row.note) == (NOT_APPLICABLE, "opt_type=mine is not one of adamw, adafactor, muon")


# ---- m


PACKINGS = [{}, {"packing": "false"}, {"packing": "false", "long_documents": "truncate"}]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "keys", [{"ema_decay": 0.9}, *(pytest.param(keys, marks=pytest.mark.long) for keys in (*PACKINGS[1:], EXPERTS))]
)
def test_clean_evaluations_pass(keys, seed):
    assert_clean(evaluation.rows(given(seed, **keys)))


def read(keys):
    """The rows about documents, which need no model."""
    return named(itertools.islice(evaluation.rows(given(**keys)), 3))


@pytest.mark.parametrize("keys", PACKINGS)
def test_what_evaluations_read_is_checked(keys):
    assert_clean(read(keys).values())


def test_documents_that_an_epoch_lacks_are_counted(monkeypatch):
    rows_needed = eval_batches.rows_needed
    monkeypatch.setattr(eval_batches, "rows_needed", lambda *given: rows_needed(*given) - 1)
    row = read({})["an epoch has each document once"]
    assert row.status == FAIL
    assert "of the epoch are missing" in row.note


def test_a_document_that_is_read_in_place_of_another_is_found(monkeypatch):
    documents = DocumentStream.documents
    monkeypatch.setattr(DocumentStream, "documents", lambda self, ordinal: documents(self, ordinal or 1))
    row = read({})["an epoch has each document once"]
    assert row.status == FAIL
    assert "are missing" in row.note
    assert "too often" in row.note


def test_a_split_within_a_document_is_found(monkeypatch):
    monkeypatch.setattr(
        evaluation,
        "train_validation_split",
        lambda source, fraction: train_validation_split(evaluation.Texts(source.documents, as_text=True), fraction),
    )
    row = read({})["no held-out document is trained on"]
    assert row.status == FAIL
    assert "pieces of document" in row.note


@pytest.mark.parametrize(
    "split",
    [
        lambda source, share: train_validation_split(source, share)[::-1],
        lambda source, share: train_validation_split(source, 1 - share),
        lambda source, share: (source, evaluation.Texts([])),
    ],
)
def test_another_share_of_held_out_documents_is_found(monkeypatch, split):
    monkeypatch.setattr(evaluation, "train_validation_split", split)
    row = read({})["no held-out document is trained on"]
    assert row.status == FAIL
    assert "are held out for a share of 0.1" in row.note


def test_an_evaluator_that_forgets_its_mode_is_found(monkeypatch):
    batches = evaluator.EvalBatches
    monkeypatch.setattr(evaluator, "EvalBatches", lambda *given: batches(*given[:4], False, given[5]))
    row = read({})["evaluations begin where eval_mode says"]
    assert row.status == FAIL
    assert "rolling evaluation 2" in row.note


def twice(batch):
    """Adds a field."""
    return {**batch, "twice": 2 * batch["tokens"]}


def of_twice(model, batch, plan):
    """A loss that reads the field."""
    sums = next_token_loss(model, batch, plan)
    return sums._replace(loss=sums.loss + 0 * jnp.sum(batch["twice"]))


def test_evaluations_need_no_field_that_a_users_loss_reads():
    rows = list(evaluation.rows(given(loss=f"{__name__}:of_twice", batch_transform=f"{__name__}:twice")))
    assert_clean(rows)
    assert rows[0].status == NOT_APPLICABLE


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"loss_sum": 1.001}, "eval_loss"),
        ({"tokens": 1.001}, "the number of tokens"),
        ({"text_nats": 1.001}, "eval_bits_per_byte"),
    ],
)
@pytest.mark.long
def test_a_wrong_sum_is_named(monkeypatch, wrong, where):
    sums = evaluation.Evaluator.sums

    def changed(self, *models):
        of_models = sums(self, *models)
        return [[{name: x * wrong.get(name, 1) for name, x in each.items()} for each in of] for of in of_models]

    monkeypatch.setattr(evaluation.Evaluator, "sums", changed)
    rows = evaluation.rows(given())
    assert where in " ".join(row.note for row in rows if row.status == FAIL)


def test_inputs_of_an_evaluation_are_the_documents():
    """The reference's own counts, on documents small enough to count by hand."""
    documents = [np.array(ids, np.int32) for ids in ([5, 6, 7], [8], [], [6, 7])]
    inputs = InputSpec.of(load(max_target_length=LENGTH), None)
    batches = list(evaluation._batches(inputs, documents, -1))
    assert evaluation._counted(batches) == evaluation._pairs(documents) == {(5, 6): 1, (6, 7): 2}
    assert jax.tree.leaves(batches)
