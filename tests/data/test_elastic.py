"""Of every source, and of mixtures of them: any number of hosts makes the same rows, and each document comes once."""

import itertools
import math
from collections import Counter
from types import MappingProxyType

import numpy as np
import pytest

pytest.importorskip("array_record", reason="bash setup.sh data installs it")
pytest.importorskip("pyarrow", reason="bash setup.sh data installs it")
pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")

import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from src.data.mixture import Mixture
from src.data.tokenizer import make_tokenizer
from src.extras.datasets.train_tokenizer import train
from tests.data import every_source
from tests.data.batches import B, assert_same, joined
from tests.data.every_source import DOCUMENTS, KINDS, texts
from tests.data.one_source import open_sources

TOKENIZERS = ("byte", "sentencepiece")
LAYOUTS = {
    "packed": {"packing": True},
    "split": {"packing": False, "long_documents": "split"},
    "truncated": {"packing": False, "long_documents": "truncate"},
}
THREE = [("jsonl", "parquet", "tokens"), ("tfds", "text", "iterable"), ("custom", "array_record", "synthetic")]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The settings of each source by tokenizer and kind, and those of the tokenizers: all data are written once."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "model").write_bytes(train([text for kind in KINDS for text in texts(kind)], 400))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "model"))
    special = (processor.bos_id(), processor.eos_id())
    encode = {
        "byte": lambda text: [256, *text.encode(), 257],
        "sentencepiece": lambda text: [special[0], *processor.encode(text), special[1]],
    }
    keys = {"byte": {}, "sentencepiece": {"tokenizer_type": "sentencepiece", "tokenizer_path": str(folder / "model")}}
    written = {kind: every_source.write(folder / kind, kind, encode["byte"]) for kind in KINDS}
    tokens = every_source.write(folder / "tokens of pieces", "tokens", encode["sentencepiece"])
    entries = {"byte": written, "sentencepiece": {**written, "tokens": tokens}}
    return entries, keys, encode


@pytest.fixture(scope="module")
def run_of(config, on_disk):
    """The config of a run on some kinds of sources, and what makes batches of it: see `joined`."""
    entries, tokenizer_keys, _ = on_disk

    def make(kinds, tokenizer="byte", weights=None, **keys):
        if len(kinds) == 1:
            keys |= entries[tokenizer][kinds[0]]
        else:
            keys["datasets"] = [
                MappingProxyType({"name": kind, "weight": weight, **entries[tokenizer][kind]})
                for kind, weight in zip(kinds, weights or [1] * len(kinds), strict=True)
            ]
        settings = config(**{"eval_interval": -1, "vocab_size": 400, **tokenizer_keys[tokenizer], **keys})
        encoder = make_tokenizer(settings.data, settings.model.vocab_size)

        def batches(hosts, steps, rows_taken=0, position=None):
            return joined(
                settings, lambda: open_sources(settings, encoder)[0], hosts, steps, rows_taken, position, encoder
            )

        return settings, batches

    return make


def stopped_and_resumed(batches, parts):
    """Batches of a run of several parts, each so many steps on so many hosts, that hand a position on as train.py does.

    parts: of (hosts, steps).
    """
    made, position = [], None
    for hosts, steps in parts:
        made += batches(hosts, steps, len(made) * B, position)
        position = made[-1]["data_position"]
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), *THREE], ids="+".join)
def test_any_number_of_hosts_makes_the_same_batches(run_of, kinds, layout):
    _, batches = run_of(kinds, **LAYOUTS[layout])
    whole = batches(1, 5)
    for hosts in (2, 4, 8):
        assert_same(batches(hosts, 5), whole)


PARTS = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 9)), min_size=2, max_size=3)
KEYS = st.fixed_dictionaries(
    {
        "max_target_length": st.sampled_from([7, 64, 500]),
        "data_threads": st.sampled_from([1, 3]),
        "data_shuffle_seed": st.integers(0, 2**31 - 1),
    }
)
EVAL_INTERVAL = st.sampled_from([-1, 10])  # whether a part of the data is left to evaluate on


@settings(max_examples=7)
@given(
    parts=PARTS,
    keys=KEYS,
    layout=st.sampled_from(list(LAYOUTS)),
    tokenizer=st.sampled_from(TOKENIZERS),
    interval=EVAL_INTERVAL,
)
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_anywhere_and_resumed_on_other_hosts_a_run_goes_on(
    run_of, kind, parts, keys, layout, tokenizer, interval
):
    _, batches = run_of([kind], tokenizer, eval_interval=interval, **keys, **LAYOUTS[layout])
    assert_same(stopped_and_resumed(batches, parts), batches(1, sum(steps for _, steps in parts)))


@settings(max_examples=3)
@given(
    parts=PARTS,
    keys=KEYS,
    layout=st.sampled_from(list(LAYOUTS)),
    tokenizer=st.sampled_from(TOKENIZERS),
    kinds=st.permutations(KINDS).map(lambda kinds: kinds[:3]),
    weights=st.tuples(st.integers(1, 9), st.sampled_from([0, 0.5, 3]), st.sampled_from([0.1, 7])),
)
def test_so_does_a_mixture(run_of, parts, keys, layout, tokenizer, kinds, weights):
    _, batches = run_of(kinds, tokenizer, weights, **keys, **LAYOUTS[layout])
    assert_same(stopped_and_resumed(batches, parts), batches(1, sum(steps for _, steps in parts)))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS if kind != "synthetic"), *THREE], ids="+".join)
def test_each_document_comes_once_an_epoch_by_its_streams_ordinals(
    run_of, on_disk, stream_documents, kinds, layout, tokenizer
):
    length, epochs = 50, 3
    settings, batches = run_of(kinds, tokenizer, max_target_length=length, **LAYOUTS[layout])
    documents = {kind: [on_disk[2][tokenizer](text) for text in texts(kind)] for kind in kinds}
    rows = max(rows_of_epoch(documents[kind], layout, length) for kind in kinds) * len(kinds)
    # Some streams have more text than others, and come to the end of an epoch later: two thirds more are enough.
    steps = math.ceil(5 * rows / B) + 5 * len(kinds)
    made = stopped_and_resumed(batches, [(1, steps // 3), (4, steps // 3), (2, steps - 2 * (steps // 3))])
    for kind, mine in by_source(settings, kinds, made).items():
        if kind == "synthetic":
            contents = [row["tokens"].tobytes() for _, _, row in mine]
            assert len(set(contents)) == len(contents) > 100
            continue
        if kind == "tokens" and layout == "packed":
            expected = cut(documents[kind], length)
            found = {ordinal: pairs_of(row) for ordinal, _, row in mine}
        elif layout == "truncated":
            expected = [cut([document], length)[0] for document in documents[kind]]
            found = {ordinal: pairs_of(row) for ordinal, _, row in mine}
        else:
            expected = [tuple(document) for document in documents[kind]]
            found = {}
            for stream in range(B):
                rows = [row for _, number, row in mine if number == stream]
                stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
                for k, ids in enumerate(
                    stream_documents(stacked, make_tokenizer(settings.data, settings.model.vocab_size))
                ):
                    found[stream + k * B] = tuple(ids)
        orders = [[found[epoch * len(expected) + n] for n in range(len(expected))] for epoch in range(epochs)]
        for order in orders:
            assert Counter(order) == Counter(expected)
        assert orders[0] != orders[1] != orders[2]


def rows_of_epoch(documents, layout, length):
    """How many rows an epoch has, to within one a stream."""
    pairs = [len(document) - 1 for document in documents]
    return {
        "packed": math.ceil(sum(pairs) / length),
        "split": sum(math.ceil(count / length) for count in pairs),
        "truncated": DOCUMENTS,
    }[layout]


def by_source(settings, kinds, batches):
    """The rows of each source: of (which of the source's rows it is, stream, arrays [T])."""
    mixture = Mixture([1] * len(kinds))
    found = {kind: [] for kind in kinds}
    for k, batch in enumerate(batches):
        for stream in range(B):
            source, ordinal = mixture.assign(k * B + stream, B, settings.data.data_shuffle_seed)
            found[kinds[source]].append((ordinal, stream, {name: array[stream] for name, array in batch.items()}))
    return found


def pairs_of(row):
    """What counts in a row: (token, target, segment) each."""
    real = row["loss_mask"] == 1
    return tuple(zip(*(row[name][real].tolist() for name in ("tokens", "targets", "segment_ids")), strict=True))


def cut(documents, length):
    """The pairs of documents end to end, cut into rows, as `pairs_of` gives them."""
    pairs = [(*pair, d) for d, ids in enumerate(documents) for pair in itertools.pairwise(ids)]
    rows = [pairs[start : start + length] for start in range(0, len(pairs), length)]
    return [tuple((token, target, d - row[0][2] + 1) for token, target, d in row) for row in rows]
