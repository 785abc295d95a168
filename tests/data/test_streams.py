"""Documents that come one after the other: Grain's and Hugging Face's own iterators, exact after a restart."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags

from src.checkpoint.data_position import data_position
from src.config.dataset_spec import train_specs
from src.data import loader
from src.data.batch_schedule import BatchSchedule
from src.data.open import open_source
from src.data.tokenizer import ByteTokenizer
from src.data.types import DataPosition, InputSpec
from src.extras.readers.hf import _check_inside
from src.extras.readers.streams import StreamReader, StreamSource
from src.run.summary import describe_data
from src.system.errors import UserError
from tests import runs
from tests.data.batches import TOKENIZER, B, assert_same, joined, take
from tests.data.one_source import alone, eval_batches, held_out

MODULE = """
import grain

TEXTS = [f"text {n} " + "word " * (n * 7 % 50) for n in range(300)]


def numbered(config, split):
    return grain.MapDataset.source(TEXTS).seed(3).shuffle().map(str.upper)


def some(config, split):
    return numbered(config, split).filter(lambda text: len(text) > 100)


def endless(config, split):
    return numbered(config, split).repeat()


def stream(config, split):
    return some(config, split).to_iter_dataset()


def worker(config, split):
    return stream(config, split).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))


def data_loader(config, split):
    sampler = grain.samplers.IndexSampler(len(TEXTS), shuffle=True, num_epochs=1, seed=0)
    return grain.DataLoader(data_source=TEXTS, sampler=sampler, worker_count=1)


class Cut:
    # A stream that has fewer documents each time.
    counts = [30, 20]

    def __iter__(self):
        return Iterator(self.counts.pop(0) if self.counts else 0)


class Iterator:
    def __init__(self, count):
        self.left = count

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return "a document"

    def get_state(self):
        return {"left": self.left}

    def set_state(self, state):
        self.left = state["left"]


def once(config, split):
    return Iterator(30)


def once_of_grain(config, split):
    return iter(stream(config, split))


def cut(config, split):
    Cut.counts[:] = [1, 30, 30, 20]
    return Cut()


class Stateful:  # as torchdata's StatefulDataLoader: it has a state itself, and no set_epoch
    loaded = next = 0

    def __iter__(self):
        begin, self.loaded = self.loaded, 0
        for number in range(begin, 60):
            self.next = number + 1
            yield f"document {number}"

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.loaded = state["next"]

    def fingerprint(self):
        return {"version": 3}


def stateful(config, split):
    return Stateful()


def none(config, split):
    Cut.counts[:] = []
    return Cut()
"""


@pytest.fixture
def open_data(tmp_path, monkeypatch, config):
    """Opens what a function of the module, or a folder of JSONL by `datasets`, gives."""
    pytest.importorskip("grain", reason="bash setup.sh dev installs it")
    (tmp_path / "my_grain.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_grain", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def opened(name, **keys):
        if name == "hf":
            pytest.importorskip("datasets", reason="bash setup.sh dev installs it")
            folder = tmp_path / "files"
            folder.mkdir(exist_ok=True)
            for n in range(3):
                lines = [json.dumps({"text": f"text {n} {k} " + "word " * (k * 7 % 30)}) for k in range(40)]
                (folder / f"train-{n}.jsonl").write_text("\n".join(lines))
            keys = {"dataset_type": "hf", "dataset_path": str(folder), **keys}
        else:
            keys = {"dataset_type": "custom", "dataset_factory": f"my_grain:{name}", **keys}
        made = config(**{"max_target_length": 64, "data_threads": 3, **keys})
        spec = train_specs(made.data)[0]
        return made, spec, open_source(spec, InputSpec.of(made, TOKENIZER))

    return opened


def batches_of(opened, count, saved=None):
    made, _, source = opened
    inputs = InputSpec.of(made, TOKENIZER)
    return take(loader.train_batches(inputs, alone(source), range(B), B, DataPosition(saved=saved or {})), count)


def targets_of(batches):
    """The ids of the documents of whole batches of one host, each up to where it is cut, as one list."""
    return np.concatenate([batch.arrays["tokens"].reshape(-1) for batch in batches]).tolist()


def test_a_map_dataset_is_a_source_like_any_other(open_data):
    made, _, source = open_data("some")
    on_one = joined(made, source, 1, 8)
    assert_same(on_one, joined(made, source, 4, 8))
    assert_same(on_one[5:], joined(made, source, 2, 3, 5 * B, on_one[4]["data_position"]))
    given = sys.modules["my_grain"].TEXTS
    wanted = {text.upper() for text in given if len(text) > 100}
    assert len(source) == len(given)
    assert {source[i] for i in range(len(source))} == wanted | {""}  # what the filter left out has no text


def test_a_stream_is_read_in_its_own_order_and_over_again(open_data, capsys):
    opened = open_data("stream")
    batches = batches_of(opened, 130)
    texts = list(sys.modules["my_grain"].stream(None, None))
    expected = itertools.cycle(ByteTokenizer().encode(text)[:-1].tolist() for text in texts)
    tokens = targets_of(batches)
    assert batches[-1].saved[""]["epoch"] == 1
    said = (
        f"dataset_factory=my_grain:stream: all {len(texts)} documents of this host's stream were read; it starts again"
    )
    assert set(capsys.readouterr().out.splitlines()) == {said}  # twice, if reading ahead came so far
    assert len(tokens) > sum(map(len, texts))
    assert tokens == list(itertools.islice(itertools.chain.from_iterable(expected), len(tokens)))


@pytest.mark.parametrize("name", ["stream", "hf"])
@pytest.mark.parametrize("keys", [{}, {"packing": False}], ids=["packed", "a document a row"])
def test_a_stream_goes_on_exactly(open_data, name, keys):
    batches = batches_of(open_data(name, **keys), 130)
    assert batches[120].saved[""]["epoch"]
    for step in (0, 7, 20, 120):
        saved = json.loads(json.dumps(batches[step].saved))
        for batch, other in zip(batches[step + 1 :], batches_of(open_data(name, **keys), 4, saved), strict=False):
            assert_same([batch.arrays], [other.arrays])
            assert batch.saved == other.saved or step  # the same document, counted from another window


@pytest.mark.parametrize("name", ["worker", pytest.param("data_loader", marks=pytest.mark.long)])
def test_a_stream_with_worker_processes_goes_on_exactly(open_data, name):
    flags.FLAGS.unparse_flags()  # as in a run, which parses none
    batches = batches_of(open_data(name), 10)
    saved = json.loads(json.dumps(batches[5].saved))
    for batch, other in zip(batches[6:], batches_of(open_data(name), 4, saved), strict=True):
        assert_same([batch.arrays], [other.arrays])


def test_a_ramp_reads_a_stream_in_its_order(open_data):
    made, _, source = open_data("stream")
    schedule = BatchSchedule(B, ((2, 3), (6, 1)), shards=2)  # 12 rows, and then full batches
    streams = schedule.streams()
    place = (InputSpec.of(made, TOKENIZER), alone(source), streams, B)
    batches = take(loader.train_batches(*place, schedule=schedule), 6)
    rows, taken = {}, 0
    for batch in batches:
        numbers, _ = schedule.batch(taken, size := len(batch.rows))
        rows |= dict(zip(numbers.tolist(), batch.arrays["tokens"], strict=True))
        taken += size
    expected = np.concatenate([batch.arrays["tokens"] for batch in batches_of(open_data("stream"), 4)])
    np.testing.assert_array_equal([rows[n] for n in range(28)], expected[:28])
    saved = batches[3].saved
    more = take(loader.train_batches(*place, DataPosition(rows_taken=12, saved=saved), schedule, 4), 2)
    for batch, again in zip(batches[4:], more, strict=True):
        np.testing.assert_array_equal(batch.arrays["tokens"], again.arrays["tokens"])


def test_documents_of_the_hub_s_package_come_once_an_epoch(open_data):
    batches = batches_of(open_data("hf", packing=False, max_target_length=256), 45)
    firsts = [bytes(row[1:13].tolist()).split()[1:3] for batch in batches for row in batch.arrays["tokens"]]
    epochs = [firsts[start : start + 120] for start in (0, 120, 240)]
    assert all(len(set(map(tuple, epoch))) == 120 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])


def test_hosts_have_other_files_of_another_length_in_each_epoch(open_data, monkeypatch, tmp_path):
    folder = tmp_path / "unequal"
    folder.mkdir()
    counts = (20, 15, 30, 9)
    for n, count in enumerate(counts):
        (folder / f"train-{n}.jsonl").write_text("".join(f'{{"text": "{n} {k} word"}}\n' for k in range(count)))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("src.extras.readers.streams.gather_json", lambda value: [value])
    texts, lengths = [[], [], []], set()
    for host in range(2):
        monkeypatch.setattr("jax.process_index", lambda host=host: host)
        source = open_data("hf", dataset_path=str(folder))[2]
        for epoch, seen in enumerate(texts):
            seen += (read := source.items(source.open(epoch, None)[0], 0))
            lengths.add(len(read))
        reader = StreamReader(source, 0, None)
        assert len({reader(number) for number in range(400)}) == sum(counts), "a host comes to the files of the other"
    assert len(lengths) > 2
    assert all(len(set(seen)) == len(seen) == sum(counts) for seen in texts)


def test_a_stream_is_evaluated_by_batches_from_its_start_each_time(open_data):
    made, _, source = open_data("stream")
    sets = eval_batches(made, held_out(source, 3), TOKENIZER, range(B), B)
    assert_same(list(sets), list(sets))
    with pytest.raises(UserError, match="are endless: set eval_steps"):
        eval_batches(made, held_out(source, -1), TOKENIZER, range(B), B)
    made = made.replace(eval_mode="rolling", eval_steps=3)
    with pytest.raises(UserError, match="are a stream, which restarts each time: set eval_mode=reset"):
        eval_batches(made, held_out(source, 3), TOKENIZER, range(B), B)


def test_a_stream_with_a_state_needs_no_epochs_and_may_say_what_it_is(open_data):
    opened = open_data("stateful")
    facts = opened[2].fingerprint()
    assert facts.pop("code my_grain")
    assert facts == {"version": 3, "type": "custom", "column": "text"}
    expected = itertools.cycle(ByteTokenizer().encode(f"document {n}")[:-1].tolist() for n in range(60))
    tokens = targets_of(batches_of(opened, 10))
    assert tokens == list(itertools.islice(itertools.chain.from_iterable(expected), len(tokens)))


@pytest.mark.parametrize(("revision", "asked"), [("", None), ("@v2", "v2")])
def test_a_dataset_of_the_hub_is_read_at_a_commit(open_data, monkeypatch, tmp_path, revision, asked):
    """The hub is not asked: `datasets` gets local files in its place."""
    datasets, hub = (pytest.importorskip(name) for name in ("datasets", "huggingface_hub"))
    requests, make = [], datasets.load_dataset_builder

    def dataset_info(self, name, revision):
        requests.append((name, revision))
        return SimpleNamespace(sha="5ca1ab1e" * 5)

    def load_dataset_builder(path, name, revision):
        requests.append((path, revision))
        builder = make(str(tmp_path / "files"), name)
        files = {"train": [f"hf://datasets/{path}@{revision}/train-0.jsonl"]}
        return SimpleNamespace(
            as_streaming_dataset=builder.as_streaming_dataset, config=SimpleNamespace(data_files=files)
        )

    monkeypatch.setattr(hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    _, _, source = open_data("hf", dataset_path=f"org/texts{revision}")
    assert requests == [("org/texts", asked), ("org/texts", "5ca1ab1e" * 5)]
    assert source.fingerprint()["dataset"] == "org/texts"
    assert source.fingerprint()["commit"] == "5ca1ab1e" * 5


README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {}
---
"""


@pytest.mark.parametrize("named", ["../secret.jsonl", "{parent}/secret.jsonl", "../*.jsonl", "linked.jsonl"])
def test_a_folders_readme_names_no_file_outside_of_it(open_data, tmp_path, named):
    """It may come from anybody, and what it names would be trained on, and said by the model."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (folder / "linked.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "README.md").write_text(README.format(named.format(parent=tmp_path)))
    with pytest.raises(UserError, match=r"dataset_path=.*its files must be within it, but these are not: .*jsonl"):
        open_data("hf", dataset_path=str(folder))


def test_files_that_are_links_within_the_hubs_cache_are_of_the_dataset(open_data, tmp_path):
    folder = tmp_path / "datasets--org--texts" / "snapshots" / "5ca1ab1e"
    folder.mkdir(parents=True)
    (tmp_path / "datasets--org--texts" / "blobs").mkdir()
    (tmp_path / "datasets--org--texts" / "blobs" / "1").write_text('{"text": "a"}\n')
    (folder / "train.jsonl").symlink_to("../../blobs/1")
    source = open_data("hf", dataset_path=str(folder))[2]
    assert source.items(source.open(0, None)[0], 0) == ["a"]


@pytest.mark.parametrize("file", ["/etc/hostname", "https://elsewhere.org/a.jsonl", "zip://a.jsonl::/tmp/a.zip"])
def test_a_dataset_of_the_hub_names_no_file_of_this_machine(file):
    with pytest.raises(UserError, match="its files must be within it"):
        _check_inside("dataset_path=org/texts", "org/texts", {"train": ["hf://datasets/org/texts@1/a.jsonl", file]})


def test_the_header_says_that_host_counts_are_fixed(open_data):
    for name, order in (("stream", "in its own order"), ("hf", "shuffled in windows")):
        _, spec, source = open_data(name)
        (line,) = describe_data([spec], alone(source))
        assert line.endswith(f"a stream for each host, {order}: a run can only resume with 1 host")


def test_another_number_of_hosts_is_refused(open_data):
    made, _, _ = open_data("stream")
    facts = {"global batch": B, "max_target_length": 64, "packing": True, "data rules": 2}
    meta = {"data": facts, "streams": [{"": {"first": 0}}] * 2}
    with pytest.raises(UserError, match=r"one per process: the checkpoint is of 2 processes, and this job has 1"):
        data_position(1, np.zeros((B, 1, 2), np.int32), meta, made.data, (), facts)


def test_a_state_keeps_the_numbers_of_numpy():
    source = StreamSource("mine", [], lambda number, item: item, {})
    state = {"share": np.float32(0.75), "next": np.int64(2**40), "order": np.arange(3), "ended": np.bool_(True)}
    assert source.state(lambda: state) == {"share": 0.75, "next": 2**40, "order": [0, 1, 2], "ended": True}
    with pytest.raises(UserError, match="mine: its state raised AttributeError"):
        source.state(lambda: {"seen": {1, 2}})


def test_two_hosts_that_read_the_same_are_refused(open_data, monkeypatch):
    monkeypatch.setattr("src.extras.readers.streams.gather_json", lambda value: [value, value])
    with pytest.raises(UserError, match="streams of two processes begin with the same documents"):
        open_data("stream")


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("endless", {}, r"dataset_factory=my_grain:endless returned an endless dataset: leave repeat\(\) out"),
        ("hf", {"dataset_path": "/not/there"}, "dataset_path=/not/there raised FileNotFoundError"),
        ("hf", {"train_split": "test"}, "raised ValueError: Bad split: test"),
        ("hf", {"dataset_column": "body"}, "item 0: it has no field body. Its fields: text"),
    ],
)
def test_what_cannot_be_read_is_refused(open_data, name, keys, message):
    with pytest.raises(UserError, match=message):
        open_data(name, **keys)


def test_a_stream_that_ends_early_is_an_error(open_data):
    with pytest.raises(UserError, match="ended after 20 documents of an epoch, and the epoch before had 30"):
        batches_of(open_data("cut"), 20)
    with pytest.raises(UserError, match="ended after 0 documents of an epoch"):
        batches_of(open_data("none"), 1)


def test_a_file_that_ends_early_is_an_error(open_data, tmp_path):
    opened = open_data("hf")
    file = tmp_path / "files" / "train-2.jsonl"
    file.write_text(file.read_text()[:-200] + '{"text": "cut')
    with pytest.raises(UserError, match=r"dataset_path=.*, after 0 documents of an epoch raised .*"):
        batches_of(opened, 60)


def test_nothing_is_held_out_of_a_stream(open_data):
    _, _, source = open_data("stream")
    with pytest.raises(UserError, match=r"is a stream, read in sequence: .* the first decode_num_prompts=N"):
        len(source)


def test_a_run_goes_on_with_the_state_of_its_stream(open_data, tmp_path, capsys):
    open_data("stream")
    keys = {"dataset_type": "custom", "dataset_factory": "my_grain:stream", "base_num_decoder_layers": 1, "steps": 6}
    keys |= {"base_output_directory": tmp_path, "checkpoint_period": 3}
    runs.run_here(**keys)
    assert re.search("^order +the stream's order, packed$", capsys.readouterr().out, re.MULTILINE)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "6")  # as if it had been killed
    runs.run_here(**keys)
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in again] == [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("name", ["once", "once_of_grain"])
def test_an_iterator_in_place_of_its_dataset_is_refused(open_data, name):
    """Comparing the hosts' first documents would take them from the run."""
    with pytest.raises(UserError, match=r"returned an iterator, .*: return the dataset whose iterator it is"):
        open_data(name)
