"""Where the results of a long compilation go: looked at before it, written whole."""

import os

import pytest

from src.aot.outputs import check_outputs, write_output
from src.errors import UserError


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_what_can_be_written_is_let_through_and_nothing_is_left(tmp_path):
    (tmp_path / "old").write_text("kept")
    check_outputs({"a": str(tmp_path / "new"), "b": str(tmp_path / "x" / "y" / "new"), "c": str(tmp_path / "old")})
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "kept"


def test_a_file_is_written_with_its_folders_and_replaced_whole(tmp_path):
    path = tmp_path / "x" / "file"
    for content in (b"first", b"second"):
        write_output("a", str(path), content)
        assert path.read_bytes() == content
        assert names(path.parent) == ["file"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "to_pipe"):
        for refused in (lambda path: check_outputs({"a": path}), lambda path: write_output("a", path, b"x")):
            with pytest.raises(UserError, match=f"a={path}: cannot write it: it is there, and no regular file"):
                refused(str(path))
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe", "to_pipe"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write it: NotADirectoryError"):
        check_outputs({"a": str(tmp_path / "file" / "x")})


def test_an_unknown_protocol_is_named():
    for refused in (lambda path: check_outputs({"a": path}), lambda path: write_output("a", path, b"x")):
        with pytest.raises(UserError, match="a=foo://x: cannot write it: foo:// is no protocol"):
            refused("foo://x")


def test_two_keys_have_two_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="a and b are both"):
        check_outputs({"a": str(tmp_path / "file"), "b": str(tmp_path / "link")})


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="no space left"):
        write_output("a", str(tmp_path / "file"), b"x")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"
