"""Check d: logits depend only on a token's document up to the token, and the loss is a mean over unmasked targets."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np

from src.config.dataset_spec import train_specs, train_weights
from src.config.schema import Config
from src.data.loader import train_batches
from src.data.packing import empty_batch, fill_row
from src.data.tokenizer import make_tokenizer
from src.data.types import Conversation, Document, InputSpec, TrainData
from src.extras.verify.evaluation import Texts
from src.extras.verify.locate import LAYER, UNROLLED, forward_values, parting
from src.extras.verify.logits import Arrays, evaluated, log_softmax, of_ids, single_layers, unlimited
from src.extras.verify.rows import FAIL, PASS, Row, attempted, none_of, not_applicable, unless_refused, verdict
from src.extras.verify.subject import PLAIN_DESCENT, ROWS, Context, Subject, mesh_keys, of_pairs
from src.model.params import by_path, nested
from src.model.parts import mixer
from src.system.errors import Unsupported, UserError
from src.system.imports import optional

# Relative. Sums in another order give 6e-8 to 1.3e-6 over three seeds of six kinds of models, 7.5e-6 for Qwen3-Next,
# and at most 2e-7 for the loss. Positions that do not restart give 0.9, a loss with the padded vocabulary 0.03, and
# targets in another document 0.003.
BOUND = 5e-5
MIXED = 12  # batches of a mixture of datasets, after each of which shares are counted
APART, LARGER = "layers are quantized by themselves", 1e4
ITEMS = 3  # documents that are read from each packing stream
OFTEN = 4  # with this many pairs of tokens at a distance, at least one score is large enough to change a logit


def rows(context: Context) -> Iterator[Row]:
    """Changes one token at a time and compares logits exactly; compares packed rows and the loss within BOUND.

    Also checks how the config's data become rows: packing, shares of datasets, and the words of conversations that
    count in the loss.
    """
    if of_pairs(context.subject.config):  # a pair's loss depends on two documents
        plain = dataclasses.replace(context.subject, config=context.subject.config.replace(loss=""))
        yield _of_pairs(context.subject, plain)
        context = dataclasses.replace(context, subject=plain)
    subject, limited = unlimited(context.subject)
    yield from limited
    yield _of_packer(subject)
    yield of_epochs(subject.config)
    if len(context.whole.data.datasets) > 1:
        yield _of_mixture(context)
    if context.whole.data.use_sft:
        yield _of_conversation(context.whole)
    logits = yield from _of_model(subject, 1, {}, "")
    yield from (_of_layer(alone, number) for number, alone in single_layers(subject))
    yield _of_dropout(subject)
    yield from _of_steps(subject, logits)
    # Scales of fp8 are for all tokens, so each token has an effect on all others.
    if context.whole.step.quantization == "int8":
        rows_of_int8 = _of_model(subject, 1, {"quantization": "int8"}, ", quantization=int8")
        yield from itertools.islice(rows_of_int8, 3)  # not the row on packing, which may change int8's rounding
    if kind := context.whole.step.quantization:
        yield unless_refused(APART, functools.partial(of_quantized, subject, kind))
    try:
        yield from _of_model(subject, 2, mesh_keys({"context": 2}), ", context 2")
    except Unsupported as error:
        yield not_applicable("documents, context 2", error)


def _of_packer(subject: Subject) -> Row:
    """Packs the documents of the batch again with the packer of training, which must give the same arrays."""
    name, batch = "training's packer makes the same rows", subject.batch
    if not subject.config.batch.packing:
        return not_applicable(name, "packing=false: a row has one document")
    found = empty_batch(len(batch["tokens"]), len(batch["tokens"][0]))
    for row, segments in enumerate(batch["segment_ids"]):
        places = [np.flatnonzero(segments == number) for number in range(1, segments.max() + 1)]
        ids = [np.append(batch["tokens"][row, at], batch["targets"][row, at[-1]]) for at in places]
        masks = [np.append(True, batch["loss_mask"][row, at] > 0) for at in places]  # the first id is not a target
        documents = map(Document, ids, masks)
        fill_row(found, row, [(each, 0, len(each.ids) - 1) for each in documents])
    real = batch["segment_ids"] > 0
    batch = batch | {"loss_mask": batch["loss_mask"] > 0}  # a packer gives no weights but 0 and 1
    wrong = [name for name in batch if np.any((found[name] != batch[name]) & real) or np.any(found["loss_mask"] > real)]
    return verdict(name, len(wrong), 0, failure=f"{', '.join(wrong)} are not those of the documents")


def of_epochs(config: Config) -> Row:
    """Reads rows of training from a few long documents, then from more short ones: ITEMS documents of each stream.

    All documents have the same number of targets, `size`, so each next `size` targets of a packing stream must be those
    of one document, each once. Each epoch must have every document once. No id occurs twice.
    """
    name, batch, wrong = "an epoch of training has each target once", config.batch, list[str]()
    if not batch.packing and batch.long_documents == "truncate":
        return not_applicable(name, "long_documents=truncate leaves targets out")
    length, inputs = batch.max_target_length, InputSpec.of(config.replace(batch_transform=""), None)
    for count, size in ((ROWS // 2 - 1, 2 * length + 5), (ROWS + 3, length // 2 - 1)):
        ids = np.arange(count * (size + 1), dtype=np.int32).reshape(count, size + 1)
        data = TrainData(("",), (Texts([*ids]),), (1.0,))
        with contextlib.closing(train_batches(inputs._replace(vocab_size=ids.size), data, range(ROWS), ROWS)) as read:
            batches = [each.arrays for each in itertools.islice(read, ITEMS * -(-size // length))]
        tokens, targets, real = (
            np.stack([each[it] for each in batches], 1) for it in ("tokens", "targets", "segment_ids")
        )
        order = dict[int, int]()
        for stream, number in itertools.product(range(ROWS), range(ITEMS)):
            at = np.flatnonzero(real[stream])[number * size :][:size]
            inputs_, outputs = tokens[stream].flat[at], targets[stream].flat[at]
            document = order[number * ROWS + stream] = int(inputs_[0]) // (size + 1)
            if not np.array_equal(np.sort(inputs_), ids[document, :-1]) or np.any(outputs != inputs_ + 1):
                wrong.append(f"targets {number * size} to {(number + 1) * size} of row {stream} are not one document's")
        for epoch in range(len(order) // count):
            if len({order[at] for at in range(epoch * count, (epoch + 1) * count)}) < count:
                wrong.append(f"epoch {epoch} of {count} documents has one of them twice")
    return none_of(name, wrong, f"{ITEMS} documents in each of {ROWS} rows, long and short ones")


def _of_mixture(context: Context) -> Row:
    """Counts batches after which a dataset of the mixture is more than one row from its share of all rows so far."""
    name, whole, config = "datasets have their shares of rows", context.whole.data, context.subject.config
    weights = train_weights(whole)
    ids = [np.full(2 * config.batch.max_target_length, number, np.int32) for number in range(len(weights))]
    sources = tuple(Texts([each] * ROWS) for each in ids)
    data = TrainData(tuple(spec.name for spec in train_specs(whole)), sources, weights)
    inputs, seen, wrong = InputSpec.of(config.replace(batch_transform=""), None), list[int](), list[str]()
    with contextlib.closing(train_batches(inputs, data, range(ROWS), ROWS)) as batches:
        for number, batch in enumerate(itertools.islice(batches, MIXED), start=1):
            seen += batch.arrays["tokens"][:, 0].tolist()
            counts = np.bincount(seen, minlength=len(ids))
            if np.any(np.abs(counts - len(seen) * np.divide(weights, sum(weights))) > 1):
                wrong.append(f"after {number} batches of {ROWS} rows, the datasets have {counts.tolist()}")
    return none_of(name, wrong, f"{MIXED} batches")


def _of_conversation(whole: Config) -> Row:
    """Encodes a conversation with the config's tokenizer: each answer and its end must count in the loss.

    No question may count, but words that a chat template writes before an answer may. The row is not applicable if the
    tokenizer refuses the conversation.
    """
    name, said = "only the assistant's words count", ("Why so?", "Because of it.", "What else?", "Nothing more.")
    if not whole.data.sft_train_on_completion_only:
        return not_applicable(name, "sft_train_on_completion_only=false: all words count")
    if (conversations := optional("conversations")) is None:
        return not_applicable(name, "src/extras/conversations.py was deleted")
    try:
        tokenizer = make_tokenizer(whole.data, whole.model.vocab_size, "use_sft")
        assert tokenizer
        is_pair = tokenizer.chat_template is None
        said = said[: 2 if is_pair else 4]
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        documents = conversations.encode_conversation(
            tokenizer, Conversation(tuple(messages), is_pair), completion_only=True
        )
    except UserError as error:
        return not_applicable(name, error)
    counted = []
    for ids, mask, _ in documents:
        assert mask is not None
        borders = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        counted += [ids[start:end] for start, end in borders]
    texts = [tokenizer.decode(ids) for ids in counted]
    wrong = [f"{len(texts)} parts count, of {len(said) // 2} answers"] * (len(texts) != len(said) // 2)
    for text, ids, answer in zip(texts, counted, said[1::2], strict=False):
        if not text.strip().endswith(answer) or any(question in text for question in said[::2]):
            wrong.append(f"{text!r} counts, for the answer {answer!r}")
        elif int(ids[-1]) not in tokenizer.stop_ids:
            wrong.append(f"the end of {answer!r} does not count")
    return none_of(name, wrong, " | ".join(texts))


def _of_model(subject: Subject, devices: int, keys: Mapping[str, Any], where: str) -> Generator[Row, None, np.ndarray]:
    """Yields rows about what each token's logits depend on, for a plan with `keys` on this number of devices.

    `where` is added to the rows' names.

    Returns the batch's logits [1 + P, B, T, V]: the model's, then its P multi-token prediction layers'.
    """
    plan, unrolled = subject.plan(devices, **keys), subject.plan(devices, **keys, **UNROLLED)
    base, segments = subject.batch, subject.batch["segment_ids"]
    odd, T = np.arange(subject.rows)[:, None] % 2 == 1, np.arange(subject.length)
    alone, columns = zip(*(_first(base, segment) for segment in range(1, segments.max() + 1)), strict=True)
    changes = [_changed(base, at) for at in (*(at == T for at in T), segments == 0, ~odd)]
    logits, sums = evaluated(subject, plan, [base, *changes, *alone])
    effects = np.any(logits[1 : len(changes) + 1, 0] != logits[0, 0], axis=-1) & (segments > 0)  # [changes, B, T]
    effects[-1] &= odd
    # `key` [changes, B, 1]: the changed token's document in each row, 0 if padding is changed, -1 if other rows are.
    # `ahead`: how far each token is after the changed one.
    key = np.concatenate([segments.T, [[0] * subject.rows, [-1] * subject.rows]])[..., None]
    ahead = T - np.append(T, [0, 0])[:, None, None]

    def through(change: int, at: np.ndarray) -> str:
        """Names the first array that differs after a change, at the tokens of the mask `at` [B, T]."""
        found, expected = (forward_values(subject, unrolled, batch) for batch in (changes[change], base))
        return parting(found, expected, at, 0.0)

    yield _exact(f"no document or row sees another{where}", effects & (key != segments) & (key != 0), through)
    blind = ~effects & (segments > 0) & (ahead == 0)
    yield _exact(f"no token sees a later one{where}", (effects & (ahead < 0) | blind) & (key == segments), through)
    yield _exact(f"padding has no effect{where}", effects & (key == 0), through)
    packed = np.stack([np.take_along_axis(logits[0], at[None, ..., None], axis=2) for at in columns])
    apart, real = logits[len(changes) + 1 :], np.stack([batch["segment_ids"] for batch in alone])[:, None]
    sizes = real * np.max(np.abs(packed - apart), axis=-1) / np.max(np.abs(packed))
    total = np.max(np.abs(np.sum(sums[len(changes) + 1 :], axis=0) - sums[0]) / np.maximum(np.abs(sums[0]), 1))
    note = "" if total <= BOUND else "the sums of the loss or of the routers differ: padding may count"
    for document, further, row, token in np.argwhere(~(sizes <= BOUND))[:1]:
        of = f" of the token {further + 1} ahead" if further else ""
        note = f"document {document + 1} of row {row}: logits{of} differ from its token {token} on"
        mixed, single = (forward_values(subject, unrolled, batch) for batch in (base, alone[document]))
        moved = [
            (name, array[np.arange(subject.rows)[:, None], columns[document]])
            for name, array in mixed
            if array.shape[:2] == segments.shape
        ]
        note += _since(functools.partial(parting, moved, single, real[document, 0], BOUND))
    yield verdict(f"packing changes no logits{where}", np.max([np.max(sizes), total]), BOUND, note)
    return logits[0]


def _of_layer(subject: Subject, number: int) -> Row:
    """Checks which tokens a one-layer model's logits depend on, against its window, its chunk and the documents."""
    layer, base = subject.reference_plan.spec.layers[0], {name: array.copy() for name, array in subject.batch.items()}
    # A row with a document that is longer than any window, and one whose last document begins near the end.
    T, last = np.arange(subject.length), subject.length - 10
    base["segment_ids"][-2:], base["positions"][-2:] = 1, T
    base["segment_ids"][-2, last:], base["positions"][-2, last:] = 2, T[:10]
    logits, _ = evaluated(subject, subject.reference_plan, [base, *(_changed(base, at == T) for at in T)])
    effects, ahead = np.any(logits[1:, 0] != logits[0, 0], axis=-1), T - T[:, None, None]
    segments, window, chunk = base["segment_ids"], layer.sliding_window_size, layer.chunk_attn_window_size
    blocks = segments * len(T) + (base["positions"] // chunk if chunk else 0)
    visible = (segments > 0) & (blocks.T[..., None] == blocks) & (ahead >= 0) & (ahead < (window or len(T)))
    within = f", window {window}" * (window > 0) + f", chunk {chunk}" * (chunk > 0)
    row = _exact(f"layer {number}'s reach: {layer.attention_type}{within}", effects & (segments > 0) & ~visible)
    if row.status == PASS and mixer(layer).costs(layer).scores:  # softmax gives all visible keys a weight
        far = [at for at in T if np.sum(visible & (ahead == at)) >= OFTEN and not np.any(effects & (ahead == at))]
        if far:
            return row._replace(status=FAIL, figure=float(len(far)), note=f"no token sees the one {far[0]} before it")
    return row


def _of_dropout(subject: Subject) -> Row:
    """Evaluates copies of one row with the dropout of two steps: all logits must differ, because all masks do."""
    name, plan = "each row has its own dropout", subject.plan(**UNROLLED)
    if not any(layer.dropout_rate for layer in plan.spec.layers):
        return not_applicable(name, "dropout_rate is 0")
    copies = {name: np.repeat(array[:1], subject.rows, axis=0) for name, array in subject.batch.items()}
    logits = [row for step in (0, 1) for row in dict(forward_values(subject, plan, copies, step))["logits"]]
    same = len(logits) - len({row.tobytes() for row in logits})
    return verdict(name, same, 0, failure=f"{same} of {len(logits)} rows, half in a second step, have another's mask")


def of_quantized(subject: Subject, kind: str) -> Row:
    """Multiplies weights of the last of several layers by LARGER, which must not change the layers before it.

    These layers are the repeats of the group with the most layers. Their weights are stacked in arrays, from which a
    scale could be taken for all of them.
    """
    plan, weights = subject.plan(quantization=kind, **UNROLLED), by_path(subject.weights)
    index = plan.spec.largest_group
    group, before = plan.spec.layer_groups[index], plan.spec.layer_groups[:index]
    if group.repeats == 1 or group.shared:
        return not_applicable(APART, "no weights of several layers are in one array")
    for path in [path for path in weights if path[:2] == ("segments", index)]:
        weights[path] = np.concatenate([weights[path][:-1], weights[path][-1:] * np.float32(LARGER)])
    last = sum(len(each.pattern) * each.repeats for each in before) + len(group.pattern) * (group.repeats - 1)
    expected, found = (
        forward_values(each, plan, subject.batch) for each in (subject, subject.with_weights(nested(weights)))
    )
    end = [label for label, _ in expected].index(f"layer {last}'s {LAYER}") + 1
    wrong = parting(found[:end], expected[:end], subject.batch["segment_ids"] > 0, 0.0)
    return none_of(APART, [f"{wrong} changes with the weights of layer {last}"] * bool(wrong), f"quantization={kind}")


def _of_steps(subject: Subject, logits: np.ndarray) -> Iterator[Row]:
    """Compares a step's losses with means over `logits`, also if one of two devices has only padding."""
    title, batch = "the step's loss is its tokens' mean", subject.batch
    if subject.config.step.loss or subject.config.model.dropout_rate:
        yield not_applicable(title, "loss= is another objective, or dropout is random")
        return
    yield _of_loss(title, batch, logits, subject.reference.metrics)
    first = np.arange(subject.rows)[:, None] < subject.rows // 2
    half = batch | {name: batch[name] * first for name in ("segment_ids", "loss_mask")}
    title = f"{title}, fsdp 2"

    def on_two_devices() -> Row:
        plan = subject.plan(2, **PLAIN_DESCENT, **mesh_keys({"fsdp": 2}))
        row = _of_loss(title, half, logits, subject.result(plan, half).metrics)
        return row._replace(note="; ".join(filter(None, [row.note, "one of the devices has only padding"])))

    yield unless_refused(title, on_two_devices)


def _of_pairs(subject: Subject, plain: Subject) -> Row:
    """Compares a step's loss with the mean over pairs of DPO's loss (Rafailov et al. 2023, equation 7).

    The mean is computed in float64 from logits of `plain`, the same model with the next-token loss. With
    `dpo_label_smoothing`, it is the mean of the loss of Mitchell 2023 (conservative DPO).
    """
    batch, step = subject.batch, subject.config.step
    logits, _ = evaluated(plain, plain.reference_plan, [plain.batch])
    nats = of_ids(log_softmax(logits[0, 0]), batch["targets"]) * batch["answer_mask"]
    sums = [np.sum(nats * (batch["segment_ids"] == number), axis=1) for number in (1, 2)]
    margin = step.dpo_beta * np.subtract(*(each - of for each, of in zip(sums, batch["reference"].T, strict=True)))
    falls, rises = np.logaddexp(0, -margin), np.logaddexp(0, margin)
    expected = np.mean((1 - step.dpo_label_smoothing) * falls + step.dpo_label_smoothing * rises)
    found = subject.reference.metrics["loss"]
    failure = f"loss is {found:.7f}, not {expected:.7f}"
    return verdict("DPO's loss is its pairs' mean", abs(found / expected - 1), BOUND, f"{len(margin)} pairs", failure)


def _of_loss(name: str, batch: Arrays, logits: np.ndarray, metrics: Mapping[str, float]) -> Row:
    """Compares a step's losses with means of the cross-entropy of `logits` [1 + P, B, T, V], in float64.

    The logits are those without the vocabulary's padding.
    """
    means = []
    for ahead, logits_BTV in enumerate(logits):
        targets, mask, segments = (np.roll(batch[it], -ahead, axis=1) for it in ("targets", "loss_mask", "segment_ids"))
        mask = mask * (segments == batch["segment_ids"])
        mask[:, mask.shape[1] - ahead :] = 0
        means.append(-np.sum(of_ids(log_softmax(logits_BTV), targets) * mask) / np.sum(mask))
    expected = {"loss": means[0]} | ({"mtp_loss": np.mean(means[1:])} if means[1:] else {})
    sizes = {metric: abs(metrics[metric] / value - 1) for metric, value in expected.items()}
    wrong = [f"{it} is {metrics[it]:.7f}, not {expected[it]:.7f}" for it in sizes if not sizes[it] <= BOUND]
    return verdict(name, np.max([*sizes.values()]), BOUND, "; ".join(wrong))


def _exact(name: str, wrong: np.ndarray, through: Callable[[int, np.ndarray], str] | None = None) -> Row:
    """A row that fails if `wrong` [changes, B, T] is true anywhere; it names the first such place.

    The changes are of the token at each position, then, if there are more, of all padding and of all other rows.
    `through(change, at)` names the first array that differs after a change, at the tokens of the mask `at` [B, T].
    """
    note = ""
    for change, row, token in np.argwhere(wrong)[:1]:
        what = [f"the token at {change}", "all padding", "all other rows"][max(change - wrong.shape[-1] + 1, 0)]
        note = f"row {row}: changing {what} {'does not change' if change == token else 'changes'} the logits at {token}"
        at = np.zeros(wrong.shape[1:], bool)
        at[row, token] = True
        note += _since(functools.partial(through, change, at)) if through else ""
    return verdict(name, float(np.sum(wrong)), 0, note)


def _since(find: Callable[[], str]) -> str:
    label = attempted(find)
    return f", from {label} on" * bool(label)


def _changed(batch: Arrays, where: np.ndarray) -> Arrays:
    """The batch with other tokens where the mask `where` is true."""
    return {**batch, "tokens": np.where(where, np.abs(batch["tokens"] - 1), batch["tokens"])}


def _first(batch: Arrays, segment: int) -> tuple[Arrays, np.ndarray]:
    """Moves document `segment` of each row to the row's start, and turns the rest into padding.

    Also returns the column [B, T] in `batch` that each token comes from.
    """
    T = np.arange(batch["tokens"].shape[1])
    at = (np.argmax(batch["segment_ids"] == segment, axis=1)[:, None] + T) % len(T)
    moved = {name: np.take_along_axis(array, at, axis=1) for name, array in batch.items()}
    own = np.int32(moved["segment_ids"] == segment)
    return moved | {"segment_ids": own, "positions": np.int32(T * own), "loss_mask": moved["loss_mask"] * own}, at
