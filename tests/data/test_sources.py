import errno
import functools
import gzip
import hashlib
import json
import os
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.config.dataset_spec import train_specs
from src.data.open import train_validation_split
from src.data.readers import fields, files, find_files, text, text_check
from src.data.readers.synthetic import SyntheticSource
from src.run.summary import amount, describe_data
from src.system.errors import UserError
from tests.data.one_source import open_sources

KIB = 1024
TextSource = functools.partial(text.TextSource, max_document_bytes=64 * KIB)


def texts(source):
    return [source[i] for i in range(len(source))]


def write_files(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def test_a_file_is_a_document(tmp_path):
    path = write_files(tmp_path, {"a.txt": "one\r\ntwo é\n"}) + "/a.txt"
    assert texts(TextSource(path)) == ["one\r\ntwo é\n"]


def test_a_folder_is_read_to_the_bottom_in_order_of_names_but_for_hidden_and_empty_files(tmp_path):
    files = {"b.txt": "B", "a/z.md": "Z", "a/y/x": "X", ".hidden": "no", ".git/config": "no", "empty": "", "c.py": "C"}
    assert texts(TextSource(write_files(tmp_path, files))) == ["X", "Z", "B", "C"]


def test_a_glob_takes_what_matches(tmp_path):
    write_files(tmp_path, {"a.txt": "A", "b.bin": b"\0", "d/c.txt": "C", "d/e/f.txt": "F"})
    assert texts(TextSource(f"{tmp_path}/*.txt")) == ["A"]
    assert texts(TextSource(f"{tmp_path}/**/*.txt")) == ["A", "C", "F"]
    assert texts(TextSource(f"{tmp_path}/d/?.txt")) == ["C"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    write_files(tmp_path, {"a[1].txt": "bracket", "a1.txt": "other"})
    assert texts(TextSource(f"{tmp_path}/a[1].txt")) == ["bracket"]


def test_each_line_of_jsonl_is_a_document(tmp_path):
    lines = [json.dumps({"text": text, "id": n}) for n, text in enumerate(["one\ntwo", "é", "", "😀"])]
    content = "\n".join([lines[0], "", lines[1], json.dumps({"text": "raw é"}, ensure_ascii=False), *lines[2:]])
    assert texts(TextSource(write_files(tmp_path, {"d.jsonl": content}))) == ["one\ntwo", "é", "raw é", "", "😀"]


def test_a_field_of_jsonl_may_have_another_name_and_ids(tmp_path):
    lines = [json.dumps({"ids": ids, "text": "no"}) for ids in ([3, 1, 2], [], list(range(20_000)))]
    source = TextSource(write_files(tmp_path, {"d.jsonl": "\n".join(lines)}), column="ids")
    assert [source[i].tolist() for i in range(2)] == [[3, 1, 2], []]
    pieces = [source[i] for i in range(2, len(source))]
    assert len(pieces) == 3  # 118,890 bytes of at most 57,344
    assert np.concatenate(pieces).tolist() == list(range(20_000))
    assert {piece.dtype for piece in pieces} == {np.dtype(np.int32)}


def test_a_surrogate_without_its_pair_is_replaced(tmp_path):
    assert texts(TextSource(write_files(tmp_path, {"d.jsonl": r'{"text": "a\ud800b"}'}))) == ["a?b"]


@pytest.mark.parametrize("line", ["short lines of text, é\n", "x" * 70_000, "é漢😀" * 9_000, "漢" * 5_000 + "\n"])
@pytest.mark.parametrize("name", ["d.txt", "d.jsonl"])
def test_a_long_document_is_cut_into_pieces_that_join_to_it(tmp_path, line, name):
    long = line * (400 * KIB // len(line.encode()))
    source = TextSource(write_files(tmp_path, {name: json.dumps({"text": long}) if name == "d.jsonl" else long}))
    pieces = texts(source)
    assert "".join(pieces) == long
    assert 6 <= len([piece for piece in pieces if piece]) <= 10
    assert max(len(piece.encode()) for piece in pieces) <= 64 * KIB
    assert len(set(source.document_keys().tolist())) == 1
    if len(line.encode()) < 4 * KIB and line.endswith("\n"):
        assert all(piece.endswith("\n") for piece in pieces if piece)


@given(st.integers(1, 100 * KIB), st.sampled_from([64, 1000, 64 * KIB]))
def test_pieces_of_any_size_of_document_join_to_it(tmp_path_factory, size, max_bytes):
    path = tmp_path_factory.mktemp("sizes") / "d.txt"
    content = "".join(f"line {n}\n" for n in range(size // 7))[:size] or "x"
    path.write_text(content)
    pieces = texts(TextSource(str(path), max_document_bytes=max_bytes))
    assert "".join(pieces) == content
    assert max(len(piece) for piece in pieces) <= max_bytes


def test_no_path_is_the_standard_library():
    source = TextSource("")
    root = Path(sysconfig.get_path("stdlib"))
    assert len(source) > 500
    assert (root / "this.py").read_text() in texts(source)
    assert not [name for name in text.standard_library().sizes if "site-packages" in name]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nowhere", "no such file or folder"),
        ({}, "*.txt", "no file that matches"),
        ({}, "", "no document"),
        ({"a.txt": ""}, "", "no document"),
        ({"a.txt": "ok", "b.txt": b"x\0y"}, "", r"b\.txt is not a text file.*NUL"),
        ({"a.txt": "ok", "b.txt": b"caf\xe9 au lait"}, "", r"b\.txt is not a text file.*not UTF-8"),
        (
            {"a.jsonl": '{"text": "ok"}', "b.jsonl": "plain\ntext"},
            "",
            r"b\.jsonl, line 1: not JSON \([^()]* \(char 0\)\)$",
        ),
        (
            {"b.jsonl": '{"content": "x"}'},
            "",
            r"b\.jsonl, line 1: it has no field text\. Its fields: content \(dataset_column=text",
        ),
        ({"b.jsonl": '{"text": 3}'}, "", "its field text: it is of type int: expected a text, or a list of ids"),
        ({"b.jsonl": '["text"]'}, "", r"b\.jsonl is a JSON array"),
        ({"b.jsonl": '{"text": "ok"}\n["text"]'}, "", r"line 2: expected a JSON object, found b'\[\"text"),
        ({"b.jsonl": '{"text": "one"}\n'.encode("utf-16")}, "", r"b\.jsonl is UTF-16: convert it by iconv"),
        ({"b.jsonl": gzip.compress(b'{"text": "one"}', mtime=0)}, "", r"b\.jsonl is compressed"),
        ({"b.jsonl": "id,text\n1,one\n2,two\n"}, "", r"b\.jsonl is a table"),
        ({"b.jsonl": '{"text": [1, 2.5]}'}, "", r"b\.jsonl, line 1: its field text: it has values of type float64"),
        ({"b.jsonl": '{"text": [1, -2]}'}, "", "the id -2 is not in the range"),
        ({"b.jsonl": '{"text": [[1], [2]]}'}, "", "2 dims"),
        ({"b.jsonl": '{"text": [[1], [2, 3]]}'}, "", "different lengths"),
        ({"1.0/dataset_info.json": "{}", "1.0/features.json": "{}", "1.0/x-train.array_record-0": b"\0"}, "", "tfds"),
        ({"x.array_record-00000-of-00001": b"\0"}, "", "type array_record"),
        ({"x.parquet": b"PAR1"}, "x.parquet", "type parquet"),
        ({"x-train.tfrecord-00000-of-00001": b"\0"}, "", "type tfrecord"),
    ],
)
def test_what_is_no_text_is_an_error_that_names_it(tmp_path, files, path, message):
    write_files(tmp_path, files)
    place = f"{tmp_path}/{path}".rstrip("/")
    with pytest.raises(UserError, match=message) as error:
        TextSource(place, key="eval_dataset_path")
    assert str(tmp_path) in str(error.value)


LINES = [json.dumps({"text": f"line {n}"}) for n in range(1, 101)]


@pytest.mark.parametrize("line", [1, 57, 100])
def test_a_line_that_is_not_json_is_an_error_at_the_start(tmp_path, line):
    lines = [*LINES[: line - 1], '{"text": ', *LINES[line:]]
    path = write_files(tmp_path, {"a.jsonl": "\n".join(LINES), "b.jsonl": "\n".join(lines), "c.jsonl": LINES[0]})
    with pytest.raises(UserError, match=rf"b\.jsonl, line {line}: not JSON"):
        TextSource(path)


def test_a_byte_that_is_not_text_is_an_error_at_the_start(tmp_path):
    path = write_files(tmp_path, {"a.txt": b"x" * (200 * KIB) + b"caf\xe9 au lait" + b"y" * (200 * KIB), "b.txt": "b"})
    with pytest.raises(UserError, match=r"a\.txt is not a text file: it is not UTF-8 \(.*b'\\xe9 a"):
        TextSource(path)


def test_without_time_the_ends_of_files_are_checked_and_the_rest_when_it_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_check, "_CHECKED_SECONDS", 0.0)
    cut = "\n".join(LINES)[:-3]
    with pytest.raises(UserError, match=r"a\.jsonl, line 100: not JSON"):
        TextSource(write_files(tmp_path / "cut", {"a.jsonl": cut, "b.jsonl": LINES[0]}))
    bad = [*LINES[:56], '{"text": ', *LINES[57:]]
    source = TextSource(path := write_files(tmp_path / "bad", {"a.jsonl": "\n".join(bad)}))
    assert f"dataset_path={path}: 0% is checked at the start, the rest when it is read" in capsys.readouterr().out
    assert [source[item] for item in range(56)] == [json.loads(line)["text"] for line in LINES[:56]]
    with pytest.raises(UserError, match=r"a\.jsonl, line 57: not JSON"):
        source[56]


def test_all_is_checked_of_data_that_take_little_time(tmp_path, capsys):
    TextSource(write_files(tmp_path, {"a.jsonl": "\n".join(LINES), "b.txt": "b"}))
    assert not capsys.readouterr().out


def test_fingerprint_is_of_names_and_sizes_and_not_of_the_place(tmp_path):
    files = {"a.txt": "one", "b/c.txt": "two"}
    first = TextSource(write_files(tmp_path / "x", files)).fingerprint()
    assert first == TextSource(write_files(tmp_path / "y", files)).fingerprint()
    assert (first["files"], first["bytes"]) == (2, 6)
    changed = ({**files, "a.txt": "longer"}, {**files, "d.txt": "three"}, {"a.txt": "one", "b/d.txt": "two"})
    for n, other in enumerate(changed):
        assert TextSource(write_files(tmp_path / str(n), other)).fingerprint()["digest"] != first["digest"]


def test_a_long_line_is_parsed_once_and_not_once_a_piece(tmp_path, monkeypatch):
    lines = [{"text": "short"}, {"text": "".join(f"line {n}\n" for n in range(4000))}]
    path = write_files(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, lines))})
    source, parsed = text.TextSource(path, 256), []
    from_json = fields.from_json
    monkeypatch.setattr(fields, "from_json", lambda *given: parsed.append(given) or from_json(*given))
    assert "".join(texts(source)) == lines[0]["text"] + lines[1]["text"]
    assert len(source) > 100
    assert len(parsed) <= 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"text": "one"}\n{"text": "two"}\n', r"a\.json has JSON lines.*rename it to end with \.jsonl"),
        ("a.ndjson", '{"text": "one"}\n{"text": "two"}\n', r"a\.ndjson has JSON lines"),
        ("A.JSONL", '{"text": "one"}\n{"text": "two"}\n', r"A\.JSONL has JSON lines"),
        ("a.json.gz", gzip.compress(b"text", mtime=0), r"a\.json\.gz is compressed.*unpack it first"),
        ("a.txt.zst", b"(\xb5/\xfd zipped", r"a\.txt\.zst is compressed"),
    ],
)
def test_files_that_are_no_text_as_they_stand_are_errors_that_say_so(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        TextSource(write_files(tmp_path, {"b.txt": "text", name: text}))


def test_a_set_of_files_numbered_beyond_all_reason_is_no_numbered_set(tmp_path):
    source = TextSource(write_files(tmp_path, {"x-00000-of-99999999999999": "one"}))
    assert texts(source) == ["one"]


def test_a_file_changed_at_the_same_size_has_another_fingerprint(tmp_path):
    first = TextSource(write_files(tmp_path, {"a.txt": "one", "b.txt": "two"})).fingerprint()
    changed = TextSource(write_files(tmp_path, {"b.txt": "too"})).fingerprint()
    assert {name for name in first if first[name] != changed[name]} == {"contents"}


def test_of_large_files_the_fingerprint_reads_a_bounded_sample(tmp_path, monkeypatch):
    (tmp_path / "small.txt").write_bytes(b"s" * 100)
    with open(tmp_path / "wide.txt", "wb") as file:
        file.truncate(100 << 20)  # a hole, which takes no space
    listing = find_files.list_files(str(tmp_path), "dataset_path")
    read_bytes, read = [], files.read

    def counted(*arguments):
        read_bytes.append(len(data := read(*arguments)))
        return data

    monkeypatch.setattr(files, "read", counted)
    before = listing.fingerprint["contents"]
    assert 15 << 20 < sum(read_bytes) <= 16 << 20
    for place in (50, (100 << 20) - 1):  # the first file, and the end of the last
        with open(tmp_path / ("small.txt" if place == 50 else "wide.txt"), "r+b") as file:
            file.seek(place)
            file.write(b"X")
        after = find_files.list_files(str(tmp_path), "dataset_path").fingerprint["contents"]
        assert after != before
        before = after


def test_the_fingerprint_has_another_field_than_text(tmp_path):
    path = write_files(tmp_path, {"a.jsonl": '{"text": "one", "body": "two"}'})
    first, other = (TextSource(path, column=column).fingerprint() for column in ("text", "body"))
    assert other == {**first, "column": "body"}


def test_fingerprint_keeps_the_facts_it_has_always_had(tmp_path):
    found = TextSource(write_files(tmp_path, {"b/c.txt": "two é", "a.txt": "one", "empty": ""})).fingerprint()
    listed = "3 a.txt\n6 b/c.txt\n0 empty"
    expected = {"type": "text", "files": 3, "bytes": 9, "documents": 2, "pieces": 2, "max_document_bytes": 64 * KIB}
    assert {name: found[name] for name in expected} == expected
    assert found["digest"] == hashlib.sha256(listed.encode()).hexdigest()[:16]


def test_fingerprint_names_a_hundred_files_at_most(tmp_path):
    write_files(tmp_path, {f"{n:03}.txt": "x" * (n + 1) for n in range(100)})
    found = TextSource(str(tmp_path)).fingerprint()
    listed = {name: value for name, value in found.items() if name.startswith("file ")}
    assert listed == {f"file {n:03}.txt": n + 1 for n in range(100)}
    write_files(tmp_path, {"100.txt": "x"})
    assert not [name for name in TextSource(str(tmp_path)).fingerprint() if name.startswith("file ")]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x-00000-of-00003.txt", "x-00002-of-00003.txt"], r"of 3 files x-00001-of-00003\.txt is missing"),
        (["d/x-00001-of-00003.txt"], r"d/x-00000-of-00003\.txt, d/x-00002-of-00003\.txt are missing"),
        (["x-00000-of-00003-ab12.txt", "x-00001-of-00003-cd34.txt"], "x-00002-of-00003 is missing"),
        (["x.000-of-100.txt"], r"x\.005-of-100\.txt and 94 more are missing"),
        (["x-00001-of-00003.txt", "x-00003-of-00003.txt"], r"x-00002-of-00003\.txt is missing"),
    ],
)
def test_a_missing_file_of_a_numbered_set_is_an_error_that_names_it(tmp_path, names, message):
    path = write_files(tmp_path, dict.fromkeys([*names, "other.txt"], "x"))
    with pytest.raises(UserError, match=rf"^dataset_path={path}: .*{message}"):
        TextSource(path)


def test_a_part_of_a_numbered_set_may_be_chosen(tmp_path):
    write_files(tmp_path, {f"x-{n:05}-of-00003.txt": str(n) for n in (0, 1)})
    assert texts(TextSource(f"{tmp_path}/x-00001-of-00003.txt")) == ["1"]
    assert texts(TextSource(f"{tmp_path}/x-0000[01]-of-*")) == ["0", "1"]
    with pytest.raises(UserError, match=r"x-00002-of-00003\.txt is missing"):
        TextSource(f"{tmp_path}/*.txt")
    write_files(tmp_path, {"x-00002-of-00003.txt": "2"})
    assert texts(TextSource(str(tmp_path))) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("long", "said"),
    [
        (0, "30 documents"),
        (1, "30 documents, 3% of them cut"),
        (15, "30 documents, 50% of them cut"),
        (30, "30 documents, cut into pieces"),
    ],
)
@pytest.mark.parametrize("name", ["d.txt", "d.jsonl"])
def test_how_many_documents_are_cut_is_said(config, tmp_path, long, said, name):
    texts = ["line\n" * 60 if n < long else "short" for n in range(30)]
    files = {f"{n:02}.txt": text for n, text in enumerate(texts)}
    if name == "d.jsonl":
        files = {name: "\n".join(json.dumps({"text": text}) for text in texts)}
    keys = config(dataset_path=write_files(tmp_path, files), max_document_bytes=256, eval_interval=-1)
    data, _ = open_sources(keys, None)
    (line,) = describe_data(train_specs(keys.data), data)
    assert said in line
    assert ("cut" in line) == (long > 0)
    halves = train_validation_split(data.sources[0], 0.5)
    assert sum(int(amount(half).split()[0]) for half in halves) == 30, "pieces are no documents"


def test_split_puts_each_document_whole_on_one_side(tmp_path):
    files = {f"{n}.txt": f"{n:03}\n" * (40 * KIB) for n in range(30)}  # 160 KiB: three pieces each
    source = TextSource(write_files(tmp_path, files))
    train, held_out = train_validation_split(source, 0.2)
    assert Counter(texts(train) + texts(held_out)) == Counter(texts(source))
    on_each_side = [{piece[:3] for piece in texts(part)} for part in (train, held_out)]
    assert not on_each_side[0] & on_each_side[1]
    assert 1 <= len(on_each_side[1]) <= 15
    assert train.fingerprint() != held_out.fingerprint()


def test_split_of_jsonl_is_by_line(tmp_path):
    lines = "\n".join(json.dumps({"text": f"document {n}"}) for n in range(2000))
    train, held_out = train_validation_split(TextSource(write_files(tmp_path, {"a.jsonl": lines})), 0.1)
    assert not set(texts(train)) & set(texts(held_out))
    assert len(train) + len(held_out) == 2000
    assert 150 < len(held_out) < 250  # 200 expected, standard deviation 13


def test_documents_added_later_move_none_between_the_parts(tmp_path):
    files = {f"{n}.txt": f"{n}" for n in range(100)}
    before = [set(texts(part)) for part in train_validation_split(TextSource(write_files(tmp_path / "x", files)), 0.3)]
    more = {**files, **{f"a{n}.txt": f"a{n}" for n in range(100)}}
    after = [set(texts(part)) for part in train_validation_split(TextSource(write_files(tmp_path / "x", more)), 0.3)]
    assert before[0] <= after[0]
    assert before[1] <= after[1]


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.98])
def test_split_leaves_no_part_empty(list_source, fraction):
    for count in (2, 3, 10):
        parts = train_validation_split(list_source(map(str, range(count))), fraction)
        assert min(map(len, parts)) >= 1


def test_one_document_can_not_be_split(list_source):
    with pytest.raises(UserError, match=r"eval_dataset_path.*eval_interval=-1"):
        train_validation_split(list_source(["one"]), 0.5)


def test_open_sources_holds_out_only_if_the_run_evaluates(config, tmp_path):
    path = write_files(tmp_path, {f"{n}.txt": f"{n}" for n in range(20)})

    def opened(**keys):
        train, evaluation = open_sources(config(dataset_path=path, **keys), None)
        return len(train.sources[0]), [len(part.source) for part in evaluation]

    trained, (held_out,) = opened()
    assert trained + held_out == 20
    assert opened(eval_interval=-1) == (20, [])
    assert opened(eval_dataset_path=f"{path}/1?.txt") == (20, [10])
    with pytest.raises(UserError, match=r"eval_dataset_path=.*no such"):
        opened(eval_dataset_path=f"{path}/none")


def test_synthetic_ids_are_uniform_and_a_function_of_seed_and_number():
    source = SyntheticSource(vocab_size=10, length=5000, seed=1)
    ids = source.row(7)[0].ids
    assert ids.shape == (5001,)
    assert ids.dtype == np.int32
    assert (ids == SyntheticSource(10, 5000, 1).row(7)[0].ids).all()
    counts = np.bincount(ids, minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 500).max() < 5 * np.sqrt(450)
    for other in (source.row(8)[0].ids, SyntheticSource(10, 5000, 2).row(7)[0].ids):
        assert abs((ids == other).mean() - 0.1) < 0.03


def test_synthetic_training_and_evaluation_data_differ(config):
    train, (held_out,) = open_sources(config(dataset_type="synthetic", eval_dataset_path="x"), None)
    assert not any((train.sources[0].row(n)[0].ids == held_out.source.row(n)[0].ids).all() for n in range(10))


def test_a_file_that_loses_its_end_while_it_is_read_is_an_error_that_names_it(tmp_path):
    """Cuts between its pieces were looked for behind its end."""
    path = write_files(tmp_path, {"a.txt": "word " * 2000})
    source = TextSource(path, max_document_bytes=256)
    write_files(tmp_path, {"a.txt": "word " * 200})
    assert source[0].startswith("word ")
    for piece in range(5, len(source)):
        with pytest.raises(UserError, match=r"a\.txt is shorter than when the run opened it"):
            source[piece]


def test_a_folder_that_can_not_be_listed_is_named_or_an_error(tmp_path, monkeypatch, capsys):
    """`os.walk` passes over it without a word, and the run would learn from a part of its data."""
    path = write_files(tmp_path, {"a.txt": "A", "lost+found/b.txt": "B", "c/d.txt": "C"})
    failure = PermissionError(errno.EACCES, "Permission denied", f"{path}/lost+found")

    def failing(folder, scandir=os.scandir):
        if str(folder).endswith("lost+found"):
            raise failure
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    for pattern in ("", "/**/*.txt"):
        assert texts(TextSource(path + pattern)) == ["A", "C"]
        assert f"{path}/lost+found is passed over: Permission denied" in capsys.readouterr().out
    failure = OSError(errno.EUCLEAN, "Structure needs cleaning", f"{path}/lost+found")
    for pattern in ("", "/**/*.txt"):
        with pytest.raises(UserError, match="can't be read: Structure needs cleaning"):
            TextSource(path + pattern)
