import os
from pathlib import Path

import pytest

from src.errors import UserError
from src.run_folder import RunFolder


def test_on_a_disk_growing_files_are_written_in_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("runs", "a")
    folder.write_text("config.yml", "steps: 1  # é\n")
    with open(folder.fetch("metrics.jsonl"), "a") as file:
        file.write("1\n")
    folder.sync()
    folder.close()
    assert (tmp_path / "runs/a/config.yml").read_text(encoding="utf-8") == "steps: 1  # é\n"
    assert (tmp_path / "runs/a/metrics.jsonl").read_text() == "1\n"
    assert folder.local == tmp_path / "runs/a"
    again = RunFolder(str(tmp_path / "runs"), "a")
    assert again.read_text("config.yml") == "steps: 1  # é\n"
    assert again.read_text("absent") is None
    assert again.fetch("metrics.jsonl").read_text() == "1\n"


def test_the_check_leaves_nothing(tmp_path):
    RunFolder(str(tmp_path / "new" / "runs"), "a").check_writable()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "runs").write_text("kept")
    with pytest.raises(UserError, match="base_output_directory"):
        RunFolder(str(tmp_path / "runs" / "deep"), "a").check_writable()
    assert (tmp_path / "runs").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="PermissionError"):
        RunFolder(str(tmp_path), "a").check_writable()
    tmp_path.chmod(0o700)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs Linux's /proc")
def test_a_file_system_that_takes_no_files_is_an_error():
    with pytest.raises(UserError, match="cannot write to /proc/a"):
        RunFolder("/proc", "a").check_writable()
