import re
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from src.config.dataset_spec import eval_specs, train_specs
from src.config.load import load
from src.data.open import open_source
from src.data.packing import empty_batch
from src.data.readers import custom
from src.data.types import InputSpec
from src.data.user_transform import apply_transform
from src.system.errors import TransientError, UserError
from src.system.user_code import load_function
from tests import runs
from tests.data.one_source import open_sources


@pytest.fixture
def my_data(tmp_path, monkeypatch):
    """Writes a user's module my_data, as a function from its source to its file."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        monkeypatch.delitem(sys.modules, "my_data", raising=False)
        file = tmp_path / "my_data.py"
        file.write_text(textwrap.dedent(source))
        return file

    return write


@pytest.fixture
def open_custom(config, monkeypatch):
    """Opens what a function of (config, split) returns."""

    def make(factory, specs=train_specs, **keys):
        monkeypatch.setitem(sys.modules, "of_test", SimpleNamespace(documents=factory))
        settings = config(dataset_type="custom", dataset_factory="of_test:documents", **keys)
        return open_source(*specs(settings.data), InputSpec.of(settings, None))

    return make


class Numbered:
    """As many texts as asked for, none of which is stored."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return f"document {i}"


def items(source):
    return [source[i] for i in range(len(source))]


def test_the_factory_is_called_with_the_config_and_the_split(open_custom):
    calls = []

    def documents(config, split):
        calls.append((config.batch.max_target_length, config["vocab_size"], split))
        with pytest.raises(TypeError, match="item assignment"):
            config["vocab_size"] = 3
        return ["one", "two"]

    assert items(open_custom(documents, train_split="a", eval_split="b", max_target_length=32)) == ["one", "two"]
    open_custom(documents, eval_specs, train_split="a", eval_split="b", max_target_length=32)
    assert calls == [(32, 258, "a"), (32, 258, "b")]


def test_items_are_texts_ids_or_mappings_with_the_column(open_custom):
    documents = ["é", [1, 2], (3,), [], np.array([4, 257], np.uint16), {"text": "in a field", "n": 1}, {"text": [5]}]
    source = open_custom(lambda config, split: documents)
    found = items(source)
    assert [item if isinstance(item, str) else item.tolist() for item in found] == [
        "é", [1, 2], [3], [], [4, 257], "in a field", [5],
    ]  # fmt: skip
    assert {item.dtype for item in found if not isinstance(item, str)} == {np.dtype(np.int32)}
    assert open_custom(lambda config, split: [{"body": "x"}], dataset_column="body")[0] == "x"


def test_a_hundred_million_items_are_not_touched_at_opening(open_custom):
    class Counted(Numbered):
        reads = 0

        def __getitem__(self, i):
            Counted.reads += 1
            return super().__getitem__(i)

    source = open_custom(lambda config, split: Counted(100_000_000))
    assert len(source) == 100_000_000
    assert (source.group_sizes(), source.document_keys(), Counted.reads) == (None, None, 0)
    assert source[99_999_999] == "document 99999999"


def test_an_iterable_is_read_once_at_the_start(open_custom):
    taken = []

    def documents(config, split):
        for item in ("one", [2, 3], {"text": "four"}):
            taken.append(item)
            yield item

    source = open_custom(documents)
    assert len(taken) == 3
    assert source[0] == "one"
    assert source[1].tolist() == [2, 3]
    assert source[2] == source[2] == "four"


@pytest.mark.parametrize(("most", "value"), [("_MAX_DOCUMENTS", 1000), ("_MAX_BYTES", 5000)])
def test_an_iterable_without_an_end_is_an_error(open_custom, monkeypatch, most, value):
    monkeypatch.setattr(custom, most, value)

    def documents(config, split):
        while True:
            yield "again"

    with pytest.raises(UserError, match=r"not ended after 1,001 documents of 5,005 bytes.*__getitem__"):
        open_custom(documents)


def test_fingerprint_is_the_objects_own_or_its_class_and_length(open_custom):
    class Described(Numbered):
        def fingerprint(self):
            return {"version": 3, "name": "x"}

    def found(documents):
        return open_custom(lambda config, split: documents).fingerprint()

    assert found(Described(5)) == {"type": "custom", "documents": 5, "version": 3, "name": "x"}
    assert found(Numbered(5)) == {"type": "custom", "documents": 5, "class": f"{__name__}.Numbered"}
    assert found(iter(["a", "b"])) == found(iter(["a", "b"]))
    assert len({found(iter(texts))["digest"] for texts in (["a", "b"], ["ab"], ["b", "a"], [[97], [98]])}) == 4


@pytest.mark.parametrize(
    ("facts", "message"), [(["x"], "must return a mapping"), ({"x": [1]}, "strings and whole numbers")]
)
def test_a_fingerprint_of_another_form_is_an_error(open_custom, facts, message):
    class Described(Numbered):
        def fingerprint(self):
            return facts

    with pytest.raises(UserError, match=message):
        open_custom(lambda config, split: Described(5))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned a value of type NoneType: expected documents"),
        (3, "returned a value of type int"),
        ("one long text", "returned a value of type str"),
        ({"text": ["a"]}, "returned a value of type dict"),
        ([], "returned no document"),
        (iter([]), "returned no document"),
    ],
)
def test_a_factory_that_returns_no_documents_is_an_error(open_custom, made, message):
    with pytest.raises(UserError, match=f"^dataset_factory=of_test:documents {message}"):
        open_custom(lambda config, split: made)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([[1, 2], [3, 4]], "it has 2 dims, and one is expected"),
        (np.zeros((2, 3), np.int32), "2 dims"),
        (np.int32(3), "0 dims"),
        ([[1], [2, 3]], "lists in it have different lengths"),
        ([1.0, 2.0], "values of type float64, and whole numbers are expected"),
        ([True, False], "values of type bool"),
        (["a", "b"], "values of type <U1"),
        ([1, None], "values of type object"),
        ([1, 2**70], "values of type object"),
        ([1, -5, 2], "the id -5 is not in the range from 0 to 257"),
        ([1, 258], "the id 258 is not in the range from 0 to 257"),
        (7, "it is of type int: expected a text, or a list of ids"),
        (b"bytes", "it is of type bytes: expected"),
        (None, "it is of type NoneType: expected"),
        ({"body": "x", "id": 1}, "it has no field text. Its fields: body, id"),
    ],
)
def test_an_item_that_is_no_document_is_an_error_that_names_it(open_custom, item, message):
    expected = f"^dataset_factory=of_test:documents: item 2: .*{re.escape(message)}"
    source = open_custom(lambda config, split: ["fine", "fine", item])
    assert source[1] == "fine"
    with pytest.raises(UserError, match=expected):
        source[2]
    with pytest.raises(UserError, match=expected):
        open_custom(lambda config, split: iter(["fine", "fine", item]))


def test_what_users_raise_is_told_with_its_place_and_kept_as_the_cause(my_data, config):
    file = my_data("""
        import json

        class Documents:
            def __len__(self):
                return 3

            def __getitem__(self, i):
                return json.loads("{" if i else '"ok"')

        def documents(config, split):
            if split == "raises":
                return helper({})
            if split == "ends":
                return (1 // n for n in [1, 0])
            return Documents()

        def helper(table):
            return table["absent"]
    """)

    def opened(split):
        settings = config(dataset_type="custom", dataset_factory="my_data:documents", train_split=split)
        return open_source(*train_specs(settings.data), InputSpec.of(settings, None))

    with pytest.raises(UserError) as error:
        opened("raises")
    assert str(error.value) == f"dataset_factory=my_data:documents raised KeyError: 'absent' ({file}, line 19)"
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(UserError, match="item 0: it is of type int"):
        opened("ends")
    source = opened("reads")
    assert source[0] == "ok"
    with pytest.raises(UserError) as error:
        source[1]
    # Not the place in json's own code, which is no user's.
    assert re.fullmatch(
        rf"dataset_factory=my_data:documents: item 1 raised JSONDecodeError: .* \({file}, line 9\)", str(error.value)
    )


@pytest.mark.parametrize(
    ("raised", "kind"),
    [("OSError(5, 'no')", TransientError), ("TimeoutError('no')", TransientError), ("SystemExit(503)", UserError)],
)
def test_what_failed_for_a_time_in_code_of_a_user_is_worth_another_try(my_data, config, raised, kind):
    my_data(f"def documents(config, split): raise {raised}")
    settings = config(dataset_type="custom", dataset_factory="my_data:documents")
    with pytest.raises(kind, match="dataset_factory=my_data:documents raised"):
        open_source(*train_specs(settings.data), InputSpec.of(settings, None))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import numpyy", r"importing my_data raised ModuleNotFoundError: No module named 'numpyy' \(FILE, line 1\)"),
        ("x = 1\n1 / 0", r"importing my_data raised ZeroDivisionError: division by zero \(FILE, line 2\)"),
        ("def documents(:", r"importing my_data raised SyntaxError: .*my_data\.py, line 1"),
        ("from os import nothing", r"importing my_data raised ImportError: .*'nothing'"),
        ("def document(): ...", r"my_data has no function documents\. Did you mean document\?"),
        ("documents = 3", r"my_data has no function documents\."),
    ],
)
def test_a_module_without_the_function_is_an_error(my_data, source, message):
    file = my_data(source)
    with pytest.raises(UserError, match=f"^batch_transform=my_data:documents: {message.replace('FILE', str(file))}"):
        load_function("my_data:documents", "batch_transform")


def test_a_module_that_is_not_there_is_an_error(my_data, tmp_path):
    my_data("")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "loading.py").write_text("")
    for name, message in {
        "my_dat:documents": "module my_dat is neither in the working directory ",
        "my_package.loadin:documents": r"module my_package\.loadin is neither ",
        "my_data.part:documents": r"module my_data\.part is neither ",
        "documents": "expected module:function",
        ":documents": "expected module:function",
    }.items():
        with pytest.raises(UserError, match=f"^dataset_factory={name}: .*{message}"):
            load_function(name, "dataset_factory")


def test_custom_data_without_a_factory_is_an_error_that_says_what_to_give():
    with pytest.raises(UserError, match="dataset_type=custom needs dataset_factory"):
        load([runs.BASE, "dataset_type=custom"])
    with pytest.raises(UserError, match="dataset_type=custom needs datasets, web: dataset_factory"):
        load([runs.BASE, "datasets=[{name: web, dataset_type: custom}]"])


def test_a_transform_may_change_a_batch(my_data):
    my_data("""
        def shift(batch):
            batch["loss_mask"][:, 0] = 0
            return {**batch, "tokens": batch["tokens"] + 1}
    """)
    batch = empty_batch(2, 4)
    batch["loss_mask"][:] = 1
    changed = apply_transform(load_function("my_data:shift", "batch_transform"), 10, batch)
    assert changed.keys() == empty_batch(2, 4).keys()
    assert (changed["tokens"] == 1).all()
    assert changed["loss_mask"].tolist() == [[0, 1, 1, 1]] * 2
    assert (changed["positions"] == 0).all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda batch: None,
            "returned a value of type NoneType: expected a dict of tokens, targets, segment_ids, positions",
        ),
        (lambda batch: {"tokens": batch["tokens"]}, r"  targets: int32 \[2, 4\] -> none"),
        (lambda batch: {**batch, "weights": batch["loss_mask"]}, r"  weights: none -> float32 \[2, 4\]"),
        (lambda batch: {**batch, "tokens": batch["tokens"][:, 1:]}, r"  tokens: int32 \[2, 4\] -> int32 \[2, 3\]"),
        (lambda batch: {**batch, "tokens": batch["tokens"] + 0.5}, r"  tokens: int32 \[2, 4\] -> float64 \[2, 4\]"),
        (lambda batch: batch["labels"], rf"^batch_transform raised KeyError: 'labels' \({re.escape(__file__)}, line"),
    ],
)
def test_a_transform_that_returns_other_arrays_is_an_error(function, message):
    with pytest.raises(UserError, match=message):
        apply_transform(function, 10, empty_batch(2, 4))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokens", 8, "tokens with the value 8: expected 0 to 7"),
        ("targets", -1, "targets with the value -1: expected 0 to 7"),
        ("segment_ids", -2, "segment_ids with the value -2"),
        ("loss_mask", np.nan, "loss_mask with the value nan: expected -1e\\+30 to 1e\\+30"),
        ("loss_mask", np.inf, "loss_mask with the value inf"),
    ],
)
def test_a_transform_that_returns_values_a_model_cannot_take_is_an_error(name, value, expected):
    def change(batch):
        batch[name][1, 2] = value
        return batch

    with pytest.raises(UserError, match=expected):
        apply_transform(change, 8, empty_batch(2, 4))


@pytest.mark.parametrize(
    "ends", ["sys.exit(3)", "raise GeneratorExit", "class Own(BaseException): pass\n    raise Own"]
)
def test_code_of_a_user_that_ends_the_process_is_an_error_of_its_own(my_data, config, ends):
    my_data(f"import sys\ndef documents(config, split):\n    {ends}\n")
    with pytest.raises(UserError, match=r"^dataset_factory=my_data:documents raised .*my_data\.py, line"):
        open_sources(config(dataset_type="custom", dataset_factory="my_data:documents"), None)


def test_a_run_on_custom_documents_ends_with_one_message(my_data, tmp_path, monkeypatch, capsys):
    my_data("""
        def documents(config, split):
            return ["some text " * 50] * 20 + [[1, 300]]

        def masked(batch):
            return {**batch, "loss_mask": batch["loss_mask"][:1]}
    """)
    keys = {"dataset_type": "custom", "dataset_factory": "my_data:documents", "base_output_directory": tmp_path}
    for further, message in (
        ({"eval_interval": 1}, "dataset_factory=my_data:documents: item 20: the id 300"),
        ({"batch_transform": "my_data:masked"}, "batch_transform returned unexpected arrays"),
    ):
        argv = runs.arguments(**keys, **further, steps=1)
        assert message in runs.refusal(monkeypatch, capsys, argv)


def test_a_run_goes_on_custom_documents_and_transformed_batches(my_data, tmp_path):
    """Files of the same documents give the same losses."""
    corpus = runs.write_corpus(tmp_path / "corpus")
    my_data(f"""
        import pathlib

        def documents(config, split):
            return [file.read_text() for file in sorted(pathlib.Path({str(corpus)!r}).iterdir())]

        def same(batch):
            return batch
    """)
    custom_keys = {"dataset_type": "custom", "dataset_factory": "my_data:documents", "batch_transform": "my_data:same"}
    for name, keys in (("text", {"dataset_path": corpus}), ("custom", custom_keys)):
        runs.run_here(base_output_directory=tmp_path, steps=3, **{"run_name": name, **keys})
    assert runs.losses(tmp_path / "custom") == runs.losses(tmp_path / "text")
