"""Files appear whole or not at all, and a folder has one holder."""

import os
import threading

import pytest

from src.system.disk import lock, new_file
from src.system.errors import UserError


def test_a_file_appears_when_it_is_whole_and_not_where_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with new_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(TypeError), new_file(path) as file:
        file.writelines([b"half", "and what is no bytes"])
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    path, both = tmp_path / "file", threading.Barrier(2)

    def write(text):
        with new_file(path) as file:
            both.wait(60)
            file.write(text)
            both.wait(60)

    thread = threading.Thread(target=write, args=[b"a" * 1000])
    thread.start()
    write(b"b" * 1000)
    thread.join()
    assert path.read_bytes() in (b"a" * 1000, b"b" * 1000)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_is_locked_until_its_descriptor_is_closed(tmp_path):
    folder = tmp_path / "new" / "folder"
    held = lock(folder, "it is taken")
    with pytest.raises(UserError, match="it is taken"):
        lock(folder, "it is taken")
    os.close(held)
    os.close(lock(folder, "it is taken"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_its_last_holder_removes_meanwhile_is_made_and_locked_again(tmp_path, monkeypatch, when):
    """A lock of the removed folder would keep nobody out of the one that is made in its place."""
    folder, removed = tmp_path / "folder", []

    def open_beside_holder(path, flags, open_it=os.open):
        descriptor = open_it(path, flags) if when == "after" or removed else -1
        if not removed:
            removed.append(os.rmdir(path))
        return descriptor if descriptor >= 0 else open_it(path, flags)

    monkeypatch.setattr(os, "open", open_beside_holder)
    held = lock(folder, "it is taken")
    with pytest.raises(UserError, match="it is taken"):
        lock(folder, "it is taken")
    os.close(held)
    assert len(removed) == 1
