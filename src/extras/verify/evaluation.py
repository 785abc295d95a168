"""Check m: evaluations begin at the document that eval_mode asks for, read each one once, and average over tokens."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from src.data.eval_batches import EvalBatches
from src.data.open import train_validation_split
from src.data.types import END, Document, EvalSet, InputSpec, RowArrays, Source
from src.extras.verify import scores
from src.extras.verify.logits import evaluated, log_softmax, of_ids, unlimited
from src.extras.verify.rows import Row, largest, none_of, not_applicable, unless_refused, verdict
from src.extras.verify.subject import Context, Subject, mesh_keys
from src.model.params import by_path, nested
from src.run.evaluator import Evaluator, means
from src.step.eval_step import compile_eval_step
from src.step.plan import StepPlan

# Largest relative error of an evaluation's metrics. Rounding of float32 sums of a few hundred tokens gives at most 4e-7
# over three seeds of five kinds of models. A mean of batches' means gives 2e-3 or more, padding that counts 0.1.
BOUND = 1e-5
BATCH, DOCUMENTS = 4, 13  # rows of a batch; number of documents, chosen so that the last batch has padding
HELD_OUT, MANY = 0.1, 2000  # fraction to hold out; number of documents with which a split by hashes comes near it
LN_2 = float(np.log(2))

Pairs = Counter[tuple[int, int]]  # how often each pair of an input id and its target occurs


class Texts(Source):
    """A source of documents with given ids; with `as_text`, each document is a string of its index instead.

    `keys` are the hashes that `document_keys` returns.
    """

    def __init__(self, documents: Sequence[np.ndarray], as_text: bool = False, keys: Any = None) -> None:
        self.documents, self._as_text, self._keys = documents, as_text, keys

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Any:
        return str(i) if self._as_text else self.documents[i]

    def document_keys(self) -> Any:
        """Returns the given keys, uint64 [documents], equal for pieces of one text; None if there are none."""
        return self._keys

    def fingerprint(self) -> dict[str, str | int]:
        """Identifies the documents only by their number: no check compares fingerprints."""
        return {"documents": len(self.documents)}


def rows(context: Context) -> Iterator[Row]:
    """Checks which documents evaluations read and which are held out, and metrics against float64 sums over logits."""
    subject = context.subject
    if subject.config.batch.batch_transform:
        yield not_applicable("batch_transform", "it may change which tokens count: evaluations are checked without it")
    # Evaluations do not call a user's loss, which may read what batch_transform adds.
    config = subject.config.replace(batch_transform="", loss="")
    subject = dataclasses.replace(subject, config=config)
    subject, limited = unlimited(subject)
    yield from limited
    config = subject.config.replace(eval_per_device_batch_size=float(BATCH))
    subject, inputs = dataclasses.replace(subject, config=config), InputSpec.of(config, None)
    rng, most = np.random.default_rng(subject.seed), subject.length + subject.length // 2
    sizes = [*rng.integers(2, most, DOCUMENTS - 2), 0, 1]  # the last two have no target
    documents = [rng.integers(0, config.model.vocab_size, size, dtype=np.int32) for size in sizes]
    batches = list(_batches(inputs, documents, -1))
    yield _documents("an epoch has each document once", inputs, documents, batches)
    yield _positions("evaluations begin where eval_mode says", subject, inputs, documents)
    yield _held_out("no held-out document is trained on")
    yield from _means(subject, inputs, documents, batches)


def _batches(inputs: InputSpec, documents: Sequence[np.ndarray], steps: int) -> EvalBatches:
    return EvalBatches(inputs, EvalSet("", Texts(documents), steps), range(BATCH), BATCH)


# ---- Which documents an evaluation reads


def _pairs(documents: Sequence[np.ndarray]) -> Pairs:
    return Counter((int(x), int(y)) for ids in documents for x, y in itertools.pairwise(ids))


def _counted(batches: Sequence[RowArrays]) -> Pairs:
    """Counts the pairs of input and target whose `loss_mask` is above 0, which should be all except padding."""
    found: Pairs = Counter()
    for batch in batches:
        at = batch["loss_mask"] > 0
        found.update(zip(batch["tokens"][at].tolist(), batch["targets"][at].tolist(), strict=True))
    return found


def _documents(name: str, inputs: InputSpec, documents: Sequence[np.ndarray], batches: Sequence[RowArrays]) -> Row:
    """Counts tokens that an epoch lacks or repeats, or that the same number of batches of an endless stream lacks."""
    found, longest = _counted(batches), None
    if not inputs.batch.packing and inputs.batch.long_documents == "truncate":
        longest = inputs.batch.max_target_length + 1
    expected = _pairs([ids[:longest] for ids in documents])
    # The same number of batches of an endless stream has all of the first epoch, and in some rows the next one.
    again = _counted(list(_batches(inputs, documents, len(batches))))
    counts = {
        "of the epoch are missing": (expected - found).total(),
        "of the epoch are there too often": (found - expected).total(),
        f"are missing from {len(batches)} batches": (expected - again).total(),
    }
    wrong = [f"{count} of {expected.total()} tokens {what}" for what, count in counts.items() if count]
    note = f"{len(documents)} documents, {expected.total()} tokens in {len(batches)} batches of {BATCH} rows"
    return verdict(name, sum(counts.values()), 0, note, "; ".join(wrong))


def _positions(name: str, subject: Subject, inputs: InputSpec, documents: Sequence[np.ndarray]) -> Row:
    """Counts evaluations that read other batches than `eval_mode` and `eval_steps` ask for.

    With reset, each reads the first `eval_steps` batches of an endless stream, or one epoch if that is -1. With
    rolling, each reads the batches that follow the previous evaluation's, also in a resumed run.
    """
    whole, epoch = list(_batches(inputs, documents, 3)), list(_batches(inputs, documents, -1))
    weights, plan, step = subject.placed(subject.reference_plan), subject.reference_plan, cast(Any, _as_read)

    def evaluator(mode: str, steps: int, position: Any = None) -> Evaluator:
        section, data = subject.config.replace(eval_mode=mode).evaluation, EvalSet("", Texts(documents), steps)
        return Evaluator(section, inputs, plan, step, data, position)

    reset, again, rolling = evaluator("reset", 1), evaluator("reset", -1), evaluator("rolling", 1)
    wanted = [("the first evaluation", reset, whole[:1]), ("the second, with reset,", reset, whole[:1])]
    wanted += [(f"epoch {number}", again, epoch) for number in (1, 2)]
    wanted += [(f"rolling evaluation {number + 1}", rolling, whole[number : number + 1]) for number in range(2)]
    found = {which: (each.sums(weights)[0], batches) for which, each, batches in wanted}
    resumed = evaluator("rolling", 1, rolling.batches.position())
    found["rolling evaluation 3, resumed,"] = resumed.sums(weights)[0], whole[2:]
    wrong = [f"{which} has other documents" for which, pair in found.items() if not _same(*pair)]
    return none_of(name, wrong, f"{len(found)} evaluations")


def _as_read(_: Any, batch: RowArrays) -> RowArrays:
    """Returns the batch: used as `eval_step`, it makes `Evaluator.sums` return the batches themselves."""
    return batch


def _same(some: Sequence[RowArrays], others: Sequence[RowArrays]) -> bool:
    if len(some) != len(others):
        return False
    pairs = [(one[name], other[name]) for one, other in zip(some, others, strict=True) for name in other]
    return all(np.array_equal(one, other) for one, other in pairs)


def _held_out(name: str) -> Row:
    """Counts documents that `train_validation_split` puts in both parts or in neither, and texts that it divides.

    Of DOCUMENTS documents, each part must get at least one; of MANY, the held-out part must get half to twice HELD_OUT.
    """
    wrong: list[str] = []
    for count, has_pieces in itertools.product((DOCUMENTS, MANY), (False, True)):
        keys = (np.arange(count, dtype=np.uint64) + np.uint64(1)) // np.uint64(2) if has_pieces else None
        texts = Texts([np.zeros(0, np.int32)] * count, as_text=True, keys=keys)
        sides: Any = train_validation_split(texts, HELD_OUT)
        training, held_out = ([int(side[i]) for i in range(len(side))] for side in sides)
        expected = range(1, count) if count < MANY else range(round(count * HELD_OUT / 2), round(count * HELD_OUT * 2))
        if len(held_out) not in expected:
            wrong.append(f"{len(held_out)} of {count} documents are held out for a share of {HELD_OUT}")
        both = {*training} & {*held_out}
        wrong += [f"document {at} is in both parts" for at in both]
        wrong += [f"document {at} is in neither part" for at in {*range(count)} - {*training, *held_out}]
        if keys is not None:
            shared = {int(keys[at]) for at in training} & {int(keys[at]) for at in held_out}
            wrong += [f"pieces of document {key} are in both parts" for key in shared]
    return none_of(name, wrong)


# ---- The metrics of an evaluation


def _means(
    subject: Subject, inputs: InputSpec, documents: Sequence[np.ndarray], batches: Sequence[RowArrays]
) -> Iterator[Row]:
    plan, config = subject.reference_plan, subject.config
    sequences = [ids[: subject.length + 1] for ids in documents if len(ids) > 1][: BATCH + 2]
    long_text = np.concatenate(documents)[: subject.length * 3 // 2]  # scored in the two windows that follow
    sequences += [np.append(scores.Letters.bos, long_text)[: subject.length + 1], long_text[-subject.length - 1 :]]
    texts = [_one_per_row(sequences[first : first + BATCH], subject.length) for first in (0, BATCH)]
    of_all = _log_probs(subject, [*batches, *texts])
    of_batches, of_texts = of_all[: len(batches)], of_all[len(batches) :]
    expected = _mean(of_batches, batches)

    data, weights = EvalSet("", Texts(documents), -1), subject.placed(plan)
    evaluator = Evaluator(config.evaluation, inputs, plan, compile_eval_step(plan), data)
    (sums,) = evaluator.sums(weights)
    found = means(sums)
    tokens = sum(float(batch["tokens"]) for batch in sums), sum(float(batch["loss_mask"].sum()) for batch in batches)
    values = {
        "eval_loss": (found["eval_loss"], expected),
        "eval_perplexity": (found["eval_perplexity"], float(np.exp(expected))),
        "the number of tokens": tokens,
    }
    yield _close("an epoch's loss is its tokens' mean", values)
    yield _of_average(subject, evaluator, batches)
    of_bytes = functools.partial(_of_bytes, subject, inputs, documents, batches, of_batches)
    yield of_bytes("bits per byte of texts")
    name, keys = "bits per byte of texts, context 2, in tiles", mesh_keys({"context": 2}) | {"num_vocab_tiling": 2}
    yield unless_refused(name, functools.partial(of_bytes, name, 2, keys))
    of_sequences = [each[: len(ids) - 1] for ids, each in zip(sequences, np.concatenate(of_texts), strict=False)]
    yield scores.of_texts(subject, sequences, of_sequences)
    yield scores.of_answers(subject, sequences, of_sequences, long_text)


def _log_probs(subject: Subject, batches: Sequence[RowArrays]) -> np.ndarray:
    """Log-probabilities [n, B, T, V] of all tokens of the vocabulary, in float64."""
    logits, _ = evaluated(subject, subject.reference_plan, batches)
    return log_softmax(logits[:, 0])


def _mean(log_probs: np.ndarray, batches: Sequence[RowArrays]) -> float:
    """Mean cross-entropy of the targets that are not padding, in nats."""
    pairs = list(zip(log_probs, batches, strict=True))
    nats = sum(-np.sum(of_ids(each, batch["targets"])[batch["segment_ids"] > 0]) for each, batch in pairs)
    return float(nats / sum(np.sum(batch["segment_ids"] > 0) for batch in batches))


def _of_average(subject: Subject, evaluator: Evaluator, batches: Sequence[RowArrays]) -> Row:
    """Evaluates a state whose EMA differs from its weights.

    eval_loss must be the loss of the weights, and eval_ema_loss the loss of their EMA.
    """
    name, plan = "the loss of the averaged weights", subject.reference_plan
    if not subject.config.step.ema_decay:
        return not_applicable(name, "ema_decay is 0")
    weights, trained = by_path(subject.weights), by_path(plan.split(subject.weights).trainable)
    others = by_path(Subject(subject.config, subject.seed + 1).weights)
    average = subject.with_weights(nested(weights | {path: others[path] for path in trained}))
    state = subject.first_state(plan)
    state = dataclasses.replace(state, ema=jax.tree.map(jnp.asarray, plan.split(average.weights).trainable))
    found = evaluator.run(state)
    values = {
        "eval_loss": (found["eval_loss"], _mean(_log_probs(subject, batches), batches)),
        "eval_ema_loss": (found["eval_ema_loss"], _mean(_log_probs(average, batches), batches)),
    }
    return _close(name, values)


def _of_bytes(
    subject: Subject,
    inputs: InputSpec,
    documents: Sequence[np.ndarray],
    batches: Sequence[RowArrays],
    log_probs: np.ndarray,
    name: str,
    devices: int = 1,
    keys: Mapping[str, int] = {},
) -> Row:
    """Compares eval_bits_per_byte and eval_loss of documents that come from text, on the mesh of `keys`.

    The reference is `log_probs` [n, B, T, V] of `batches`. The `text_bytes` of a document's first and last id are END,
    so that neither their nats nor bytes count; the other ids have 0 to 4 bytes.
    """
    rng = np.random.default_rng(subject.seed)
    lengths = [rng.integers(0, 5, len(ids), dtype=np.int32) for ids in documents]
    for each in lengths:
        each[:1] = each[-1:] = END
    counted = inputs._replace(count_bytes=lambda text: Document(documents[int(text)], text_bytes=lengths[int(text)]))
    row = jax.ShapeDtypeStruct((subject.length,), np.int32)
    plan: StepPlan = dataclasses.replace(subject.plan(devices, **keys), fields={"text_bytes": row})
    data, section = EvalSet("", Texts(documents, as_text=True), -1), subject.config.evaluation
    section = dataclasses.replace(section, eval_per_device_batch_size=BATCH / devices)
    evaluator = Evaluator(section, counted, plan, compile_eval_step(plan), data)
    (sums,) = evaluator.sums(subject.placed(plan))
    found, of_text = means(sums), list(evaluator.batches)
    nats, total = 0.0, 0
    for each, batch, text in zip(log_probs, batches, of_text, strict=True):
        is_text = (text["text_bytes"] >= 0) & (batch["segment_ids"] > 0)
        nats -= float(np.sum(of_ids(each, batch["targets"])[is_text]))
        total += int(np.sum(text["text_bytes"][is_text]))
    if inputs.batch.packing or inputs.batch.long_documents == "split":
        total = sum(int(np.sum(each[each >= 0])) for each in lengths)  # from the documents, so that lost bytes show
    values = {
        "eval_bits_per_byte": (found.get("eval_bits_per_byte", np.nan), nats / LN_2 / total),
        "eval_loss": (found["eval_loss"], _mean(log_probs, batches)),
    }
    return _close(name, values)


def _one_per_row(sequences: Sequence[np.ndarray], length: int) -> RowArrays:
    """Makes a batch [BATCH, length] of one sequence per row; padding is in the same segment and unmasked."""
    batch = {name: np.zeros((BATCH, length), np.int32) for name in ("tokens", "targets")}
    for row, ids in enumerate(sequences):
        batch["tokens"][row, : len(ids) - 1], batch["targets"][row, : len(ids) - 1] = ids[:-1], ids[1:]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (BATCH, length))
    ones = np.ones((BATCH, length))
    return {**batch, "segment_ids": ones.astype(np.int32), "positions": positions, "loss_mask": ones.astype(np.float32)}


def _close(name: str, values: Mapping[str, tuple[float, float]]) -> Row:
    """Compares pairs of a found and an expected value; the error is relative to the latter, or absolute if it is 0."""
    errors = {what: abs(found - wanted) / (abs(wanted) or 1.0) for what, (found, wanted) in values.items()}
    wrong = [what for what in errors if not errors[what] <= BOUND]
    failure = "; ".join(f"{what} is {values[what][0]:.7g}, not {values[what][1]:.7g}" for what in wrong)
    return verdict(name, errors[largest(errors)], BOUND, failure=failure)
