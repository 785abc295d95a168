"""Files that are written to after a source was opened, whatever reads them."""

import json
import os
import subprocess
import sys

import fsspec
import pytest

from src.config.dataset_spec import train_specs
from src.data.fingerprint import check_unchanged
from src.data.open import open_source, train_validation_split
from src.data.readers import files, find_files
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.preferences.pairs import PairRows, PairSource
from src.system.errors import UserError
from tests import runs
from tests.data import every_source

NEEDS = {
    "array_record": "array_record",
    "tfds": "tensorflow_datasets",
    "parquet": "pyarrow",
    "hf": "datasets",
    "custom": None,
    "synthetic": None,
}
KINDS = ("text", "jsonl", "chats", "pairs", "array_record", "tfds", "parquet", "tokens", "hf")
CHAT = {"prompt": "2 + 2 =", "completion": " 4"}
PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


@pytest.fixture
def open_kind(config, tmp_path):
    """Writes data of a kind, and opens them; returns the source, the files it reads, and the one that is changed."""

    def make(kind):
        folder = tmp_path / kind
        if needed := NEEDS.get(kind):
            pytest.importorskip(needed, reason="bash setup.sh dev installs it")
        if kind in ("chats", "pairs", "hf"):
            folder.mkdir()
            record = {"chats": CHAT, "pairs": PAIR, "hf": {"text": "a text"}}[kind]
            (folder / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 20)
            settings = {"dataset_type": "hf" if kind == "hf" else "text", "dataset_path": str(folder)}
        else:
            settings = every_source.write(folder, kind, lambda text: [256, *text.encode(), 257])
        keys = config(**settings, use_sft=kind == "chats")
        inputs = InputSpec.of(keys, ByteTokenizer())
        if kind == "pairs":
            source = PairRows(inputs, PairSource(str(folder), "dataset_path", inputs))
        else:
            source = open_source(train_specs(keys.data)[0], inputs)
        source.fingerprint()
        return source, sorted(path for listing in source.listings for path in listing.paths)

    return make


def flip(path):
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_in_any_file_of_any_kind_is_an_error_that_names_the_file(open_kind, kind):
    source, paths = open_kind(kind)
    assert paths
    assert check_unchanged([source], []) == []
    for path in paths:
        flip(path)
        with pytest.raises(UserError, match=f"^{path} changed while the run reads it"):
            check_unchanged([source], [])
        (line,) = check_unchanged([], [source])  # of what only evaluations read
        assert line.startswith(f"{path} changed while the run reads it")
        flip(path)
        (line,) = check_unchanged([source], [])
        assert line.startswith(f"{path} was written, with no change in size or in the compared contents")
        assert check_unchanged([source], []) == []
        os.utime(path, (1, 1))
        assert len(check_unchanged([source], [])) == 1


def test_both_parts_of_data_of_which_some_are_held_out_watch_the_files(open_kind):
    source, paths = open_kind("text")
    parts = train_validation_split(source, 0.2)
    flip(paths[0])
    for part in parts:
        with pytest.raises(UserError, match="changed while the run reads it"):
            check_unchanged([part], [])


@pytest.mark.parametrize("kind", ["custom", "synthetic"])
def test_data_without_files_are_not_watched(config, kind, tmp_path):
    keys = config(**every_source.write(tmp_path / kind, kind, None))
    source = open_source(train_specs(keys.data)[0], InputSpec.of(keys, ByteTokenizer()))
    assert check_unchanged([source], [source]) == []


def test_a_store_s_file_that_is_written_to_is_noticed():
    store = fsspec.filesystem("memory")
    for name in ("a", "b"):
        store.pipe_file(f"/watched/{name}.txt", b"some text")
    try:
        listing = find_files.list_files("memory://watched", "dataset_path")
        assert listing.fingerprint["files"] == 2
        assert listing.written_since() == ("", False)
        store.pipe_file("/watched/a.txt", b"some text")
        line, differs = listing.written_since()
        assert line.startswith("memory://watched/a.txt was written")
        assert not differs
        store.pipe_file("/watched/a.txt", b"new  text")
        assert listing.written_since() == ("memory://watched/a.txt changed while the run reads it", True)
    finally:
        store.rm("/watched", recursive=True)


def test_of_many_files_some_are_watched_that_lie_evenly(tmp_path, monkeypatch):
    """So the time is bounded, and a set that is written anew does not pass."""
    monkeypatch.setattr(files, "_WATCHED", 10)
    for number in range(95):
        (tmp_path / f"{number:02}.txt").write_text("text")
    listing = find_files.list_files(str(tmp_path), "dataset_path")
    assert listing.fingerprint["files"] == 95
    looked_at = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, *rest, **more: looked_at.append(path) or stat(path, *rest, **more))
    for file in tmp_path.iterdir():
        file.write_text("next")
    looked_at.clear()
    line, differs = listing.written_since()
    assert differs
    assert line.startswith(f"{tmp_path}/00.txt, {tmp_path}/10.txt, {tmp_path}/20.txt")
    assert sorted(map(str, {path for path in looked_at if str(path).endswith(".txt")})) == [
        f"{tmp_path}/{number:02}.txt" for number in range(0, 95, 10)
    ]


def test_python_without_assertions_notices_changes_too(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    script = f"""
from src.data.readers.find_files import list_files
listing = list_files({str(tmp_path)!r}, "dataset_path")
listing.fingerprint
open({str(tmp_path / "a.txt")!r}, "w").write("two")
print(listing.written_since())
"""
    command = [sys.executable, "-O", "-c", script]
    ended = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=True)
    assert "changed while the run reads it', True" in ended.stdout
