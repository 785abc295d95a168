import errno
import logging
import os
import re
import socket
from pathlib import Path

import jax
import pytest

from src.checkpoint import restore
from src.checkpoint.contents import compare_configs
from src.checkpoint.run_folder import FILES, FOLDERS, RunFolder, dated_name, write_error
from src.checkpoint.run_rules import run_rules
from src.config.load import to_yaml
from src.run.environment import environment
from src.system.errors import TransientError, UserError
from src.system.version import version
from tests.tiny import load


def test_runs_without_a_name_do_not_share_a_folder_of_a_store():
    """If they start in the same second: a store has no lock, as a disk has."""
    names = {dated_name("gs://bucket/runs") for _ in range(8)}
    assert len(names) == 8
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\w{6}", name) for name in names)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", dated_name("runs"))


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


def test_metrics_without_a_line_are_not_set_aside(tmp_path):
    """Of starts that ended before their first step each would leave an empty file."""
    folder = RunFolder(str(tmp_path), "a")
    folder.fetch("metrics.jsonl").touch()
    assert folder.set_aside("metrics.jsonl") == ""
    folder.fetch("metrics.jsonl").write_text("1\n")
    assert folder.set_aside("metrics.jsonl") == "metrics.1.jsonl"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.1.jsonl"]


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


def test_a_store_out_of_reach_may_answer_later(monkeypatch):
    aiohttp = pytest.importorskip("aiohttp")

    def look_up(*_, **__):
        host = aiohttp.client_reqrep.ConnectionKey("storage.googleapis.com", 443, True, True, None, None, None)
        raise aiohttp.ClientConnectorDNSError(host, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))

    folder = RunFolder("gs://bucket", "a")
    monkeypatch.setattr(type(folder.path), "write_text", look_up)
    with pytest.raises(TransientError, match=r"cannot write to gs://bucket/a: .*Is this machine online, and logged in"):
        folder.check_writable()


def test_a_stores_client_prints_no_traceback_of_an_error_that_it_raises(caplog):
    logging.getLogger("gcsfs").error("_request out of retries")
    assert not caplog.records


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs Linux's /proc")
def test_a_file_system_that_takes_no_files_is_an_error():
    with pytest.raises(UserError, match="cannot write to /proc/a"):
        RunFolder("/proc", "a").check_writable()


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", ".", "/tmp/x", "//", "a//b", "a/", "a\0b", "a\nb", "n" * 256, "a/" + "n" * 256]
)
def test_a_run_name_that_would_leave_the_output_folder_or_is_no_name_is_refused(name):
    with pytest.raises(UserError, match="run_name="):
        load(run_name=name)


@pytest.mark.parametrize("name", ["", "a", "sweep/lr-1e-3", "..a", "a b", "n" * 255, "été"])
def test_names_and_names_within_folders_are_run_names(name):
    assert load(run_name=name).run.run_name == name


def test_an_output_folder_with_nul_in_its_name_is_refused():
    with pytest.raises(UserError, match="base_output_directory="):
        load(base_output_directory="a\0b")


def test_the_check_takes_no_notice_of_other_runs_files(tmp_path):
    """A run that starts at the same moment may remove its file, and a link may lie there under any name but ours."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".mintext_write_test").symlink_to(tmp_path / "precious")
    before = sorted(tmp_path.iterdir())
    RunFolder(str(tmp_path), "a").check_writable()
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("place", ["loop/a", "gone/a", "n" * 300])
def test_an_output_folder_that_can_not_be_made_is_an_error(tmp_path, place):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot write to"):
        RunFolder(str(tmp_path / place), "a").check_writable()


@pytest.mark.parametrize("name", FILES + FOLDERS)
@pytest.mark.parametrize("kind", ["the other kind", "a link to itself"])
def test_what_stands_where_the_run_writes_must_be_of_its_kind(tmp_path, name, kind):
    place = tmp_path / "a" / name
    place.parent.mkdir()
    if name != "config.yml":  # so that the folder is a run's own
        (place.parent / "config.yml").touch()
    if kind == "a link to itself":
        place.symlink_to(place)
    elif name in FOLDERS:
        place.write_text("")
    else:
        place.mkdir()
    with pytest.raises(UserError, match=f"{place} is not a {'folder' if name in FOLDERS else 'file'}"):
        RunFolder(str(tmp_path), "a").check_writable()


def test_only_process_0_looks_at_metrics_that_it_sets_aside(tmp_path, monkeypatch):
    """On others the file may disappear between two looks at it."""
    folder = RunFolder(str(tmp_path), "a")
    file = folder.fetch("metrics.jsonl")
    file.write_text("1\n")

    def exists(path):
        file.unlink()  # as process 0 does
        return True

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(type(folder.path), "exists", exists)
    assert folder.set_aside("metrics.jsonl") == ""


def test_an_empty_output_folder_is_the_working_folder_for_all_that_look_for_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(RunFolder("", "a").path) == tmp_path / "a"
    (tmp_path / "a/checkpoints/3").mkdir(parents=True)
    (tmp_path / "a/config.yml").write_text("logical_axis_rules: {latent: []}\n")
    monkeypatch.setattr(restore, "newest_meta", lambda path: ({"data": {}}, ""))
    config = load(base_output_directory="", run_name="a")
    assert config.mesh.logical_axis_rules["latent"] == ()
    assert run_rules(config.run, config.checkpoint) == 1


def test_a_git_that_may_not_be_executed_is_as_none(tmp_path, monkeypatch):
    (tmp_path / "git").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    environment.cache_clear()
    try:
        assert environment()["MinText"] == version()
    finally:
        environment.cache_clear()


def test_a_disk_too_full_for_the_folder_of_checkpoints_is_answered_like_any_full_disk(tmp_path):
    answer = write_error(RunFolder(str(tmp_path), "a").path / "checkpoints", 5, 2**30, OSError(errno.ENOSPC, "full"))
    assert isinstance(answer, UserError)
    assert re.search(
        r"checkpoint 5 has 1 GiB of arrays, and .* GiB are free\. No other checkpoint was found", str(answer)
    )


def test_a_start_that_was_killed_before_its_first_checkpoint_binds_no_later_one(tmp_path):
    folder = RunFolder(str(tmp_path), "a")
    folder.write_text("config.yml", to_yaml(load()))
    changed = load(max_target_length=32, enable_checkpointing="false")
    (tmp_path / "a/checkpoints/5.orbax-checkpoint-tmp").mkdir(parents=True)
    assert compare_configs(changed, folder) == []
    (tmp_path / "a/checkpoints/5").mkdir()
    with pytest.raises(UserError, match="has checkpoints"):
        compare_configs(changed, folder)
