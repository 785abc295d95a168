"""Disks and stores that fail: what is tried again, what is damage, and what of a run's checkpoints always stands."""

import errno
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath

from src.checkpoint import checkpointer as checkpoint
from src.checkpoint import restore, set_aside
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.run_folder import absolute
from src.system import storage_errors
from src.system.errors import TransientError, UserError
from src.system.storage_errors import Failure, StoreError, failure_of, tensorstore_errors
from tests import runs
from tests.checkpoint.arrays import abstract, make_mesh, make_values, place, same


def checkpointer(directory, max_to_keep=3, async_save=True):
    return Checkpointer(directory, max_to_keep=max_to_keep, async_save=async_save)


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 2, 2))


@pytest.fixture(scope="module")
def wanted(mesh):
    return abstract(place(make_values(0), mesh))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mesh):
    """checkpoints/ with steps 10 and 20, not to be changed."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    saver = checkpointer(directory)
    for step in (10, 20):
        saver.save(step, place(make_values(step), mesh), {})
    saver.close()
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """The same, for one test to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds that were waited between attempts; nothing waits."""
    waited = []
    monkeypatch.setattr(storage_errors.time, "sleep", waited.append)
    return waited


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code):
        super().__init__(f"an answer of {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file"), Failure.DAMAGED),
        (FileNotFoundError("fsspec's"), Failure.DAMAGED),
        *((OSError(number, "x"), Failure.TRANSIENT) for number in (errno.EIO, errno.ESTALE, errno.EMFILE)),
        (TimeoutError(), Failure.TRANSIENT),
        *((HttpError(code), Failure.TRANSIENT) for code in (429, 503, "503")),
        (OSError(errno.ENOSPC, "x"), Failure.FULL),
        (PermissionError(errno.EACCES, "x"), Failure.OTHER),
        (HttpError(403), Failure.OTHER),
        (TypeError("x"), Failure.OTHER),
        *((ValueError(f"{status}: of a user's own code"), Failure.OTHER) for status in ("INTERNAL", "UNKNOWN")),
        (MemoryError(), Failure.OTHER),
    ],
)
def test_types_and_numbers_tell_what_an_error_means(error, failure):
    assert failure_of(error) is failure
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = error
    assert failure_of(wrapped) is failure


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ('DATA_LOSS: Error opening "zarr" driver', Failure.DAMAGED),
        ('Error opening "zarr" driver: it cannot be decoded', Failure.DAMAGED),
        *((f"{status}: x", Failure.TRANSIENT) for status in ("UNKNOWN", "ABORTED", "UNAVAILABLE", "INTERNAL")),
        ("RESOURCE_EXHAUSTED: x: Too many open files [os_error_code='24']", Failure.TRANSIENT),
        ("RESOURCE_EXHAUSTED: x: No space left on device [os_error_code='28']", Failure.FULL),
        ("PERMISSION_DENIED: x", Failure.OTHER),
        ("UNKNOWN: x: Too many levels of symbolic links [os_error_code='40']", Failure.OTHER),
    ],
)
def test_tensorstores_status_counts_where_tensorstore_is_called_and_nowhere_else(message, failure):
    assert failure_of(ValueError(message)) is Failure.OTHER
    with pytest.raises(StoreError) as raised, tensorstore_errors():
        raise ValueError(message)
    assert failure_of(raised.value) is failure
    assert str(raised.value) == f"ValueError: {message}"


# ---- Reading


def unreadable(file):
    """Puts in a file's place one that Linux answers with EIO; returns what was there."""
    contents = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")
    return contents


def test_a_read_error_that_passes_changes_nothing(directory, wanted, monkeypatch):
    metadata = directory / "20" / "meta" / "metadata"
    contents, waited = unreadable(metadata), []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            metadata.unlink()
            metadata.write_bytes(contents)

    monkeypatch.setattr(storage_errors.time, "sleep", sleep)
    state, _, messages = checkpointer(directory).restore_latest(wanted)
    assert same(state, make_values(20))
    assert messages == []
    assert waited == [1.0, 2.0]


def test_a_read_error_that_stays_ends_the_command_and_keeps_the_checkpoint(directory, wanted, sleeps, mesh):
    metadata = directory / "20" / "meta" / "metadata"
    contents = unreadable(metadata)
    with pytest.raises(TransientError, match=r"could not be read: OSError: .*Input/output error"):
        checkpointer(directory).restore_latest(wanted)
    assert sleeps == [1.0, 2.0, 4.0, 8.0]
    metadata.unlink()
    metadata.write_bytes(contents)
    assert same(checkpointer(directory).restore_latest(wanted)[0], make_values(20))


def test_tensorstore_says_the_same_of_a_file_that_cannot_be_opened(directory, wanted, sleeps):
    for file in (directory / "20" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.unlink()
        file.symlink_to(file.name)
    with pytest.raises(UserError, match="could not be read: ValueError: UNKNOWN"):
        checkpointer(directory).restore_latest(wanted)
    assert sleeps == []
    assert names_in(directory) == ["10", "20"]


def test_a_fault_of_the_reader_is_no_damage(directory, wanted, monkeypatch):
    def read_arrays(*args):
        raise TypeError("an upgrade changed this")

    monkeypatch.setattr(restore, "_read_arrays", read_arrays)
    with pytest.raises(UserError, match="could not be read: TypeError: an upgrade changed this"):
        checkpointer(directory).restore_latest(wanted)


def test_a_checkpoint_under_another_steps_name_is_passed_over_and_set_aside(directory, wanted, mesh):
    """Resumed from, it would stand where the run saves that step, which would then be refused."""
    shutil.copytree(directory / "20", directory / "30")
    resumed = checkpointer(directory)
    state, _, messages = resumed.restore_latest(wanted)
    assert same(state, make_values(20))
    (message,) = messages
    assert message.startswith("checkpoint 30 is passed over: it is the checkpoint of step 20 under another name.")
    resumed.save(30, place(make_values(30), mesh), {})
    resumed.close()
    assert names_in(directory) == ["10", "20", "30", "30.damaged"]


def test_a_damaged_checkpoint_is_renamed_and_never_deleted(directory, wanted, mesh):
    for count in ("", "-2"):
        (directory / "20" / "meta" / "metadata").write_text("{")
        contents = {path.name: path.read_bytes() for path in (directory / "20").rglob("*") if path.is_file()}
        resumed = checkpointer(directory, max_to_keep=1)
        _, _, messages = resumed.restore_latest(wanted)
        assert f"The next checkpoint saved renames it to 20.damaged{count}" in messages[0]
        resumed.save(20, place(make_values(20), mesh), {})
        resumed.close()
        aside = directory / f"20.damaged{count}"
        assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == contents
    assert names_in(directory) == ["10", "20", "20.damaged", "20.damaged-2"]


# ---- Writing


def failing(method, errors):
    """A method of Orbax that does what it does, but raises the errors first, one a call."""
    original = getattr(ocp.CheckpointManager, method)

    def attempt(self, *args, **kwargs):
        raise_next(errors)
        return original(self, *args, **kwargs)

    return attempt


def raise_next(errors):
    if errors and (error := errors.pop(0)):
        raise error


EIO = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("async_save", [True, False])
def test_a_write_error_that_passes_is_tried_again(async_save, tmp_path, mesh, wanted, sleeps, monkeypatch):
    monkeypatch.setattr(ocp.CheckpointManager, "save", failing("save", [EIO, EIO]))
    saver = checkpointer(tmp_path, async_save=async_save)
    assert saver.save(10, place(make_values(10), mesh), {}) == []
    saver.close()
    assert sleeps == [1.0, 2.0]
    state, _, messages = checkpointer(tmp_path).restore_latest(wanted)
    assert same(state, make_values(10))
    assert messages == []


def test_what_a_killed_run_left_is_removed_before_anything_is_written(directory, mesh, sleeps, monkeypatch):
    """In the background it went on after a manager had failed, and took files of the attempt after that."""
    left = directory / "30.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    for name in range(2000):
        (left / str(name)).touch()
    names, save = [], failing("save", [EIO])

    def attempt(self, *args, **kwargs):
        names.append(names_in(directory))
        return save(self, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", attempt)
    saver = checkpointer(directory)
    saver.save(30, place(make_values(30), mesh), {})
    saver.close()
    assert names == [["10", "20"], ["10", "20"]]
    assert names_in(directory) == ["10", "20", "30"]


def test_the_last_checkpoint_is_written_again_where_it_failed_in_the_background(
    tmp_path, mesh, wanted, sleeps, monkeypatch
):
    saver = checkpointer(tmp_path)
    saver.save(10, place(make_values(10), mesh), {})
    finalize = ocp.CheckpointManager._finalize
    errors = [EIO]

    def fail_before_it_is_whole(self, step, steps_to_remove):
        raise_next(errors)
        finalize(self, step, steps_to_remove)

    saver.wait()
    monkeypatch.setattr(ocp.CheckpointManager, "_finalize", fail_before_it_is_whole)
    saver.save(20, place(make_values(20), mesh), {})
    saver.close()
    assert errors == []
    state, _, messages = checkpointer(tmp_path).restore_latest(wanted)
    assert same(state, make_values(20))
    assert messages == []


@pytest.mark.parametrize("async_save", [True, False])
def test_a_checkpoint_that_is_whole_despite_an_error_is_kept(async_save, tmp_path, mesh, wanted, sleeps, monkeypatch):
    save = ocp.CheckpointManager.save

    def fail_when_it_is_whole(self, step, **kwargs):
        save(self, step, **kwargs)
        self.wait_until_finished()
        raise EIO

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail_when_it_is_whole)
    saver = checkpointer(tmp_path, async_save=async_save)
    for step in (10, 20):
        assert saver.save(step, place(make_values(step), mesh), {}) == []
    saver.close()
    assert (sleeps, names_in(tmp_path)) == ([], ["10", "20"])
    assert same(checkpointer(tmp_path).restore_latest(wanted)[0], make_values(20))


def test_a_checkpoint_that_failed_in_the_background_is_left_out_once(tmp_path, mesh, sleeps, monkeypatch):
    """Its arrays are gone by the time it is known, so the next one is written in its place; two in turn are an end."""
    begun = []

    def wait(self):
        raise_next([EIO] if begun[-1] in (20, 40, 50) else [])

    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda self, step, **kwargs: begun.append(step))
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", wait)
    saver = checkpointer(tmp_path)
    told = []

    def save_all():
        for step in (10, 20, 30, 40, 50, 60):
            told.extend(saver.save(step, place(make_values(step), mesh), {}))

    with pytest.raises(TransientError, match=r"checkpoint 50 could not be written .* Run the same command to resume"):
        save_all()
    assert [message.split("(")[0] for message in told] == [
        "checkpoint 20 could not be written ",
        "checkpoint 40 could not be written ",
    ]


def test_a_store_that_stays_away_ends_in_a_transient_error(directory, mesh, sleeps, monkeypatch):
    monkeypatch.setattr(ocp.CheckpointManager, "save", failing("save", [EIO] * 5))
    with pytest.raises(TransientError, match=r"checkpoint 30 could not be written .* Checkpoint 20 is intact"):
        checkpointer(directory).save(30, place(make_values(30), mesh), {})
    assert len(sleeps) == 4


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, which is full soon."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_says_what_was_needed_and_what_stands(async_save, small_disk, mesh, wanted, capfd):
    saver = checkpointer(small_disk / "checkpoints", async_save=async_save)
    first = make_values(10)

    def save_both():
        saver.save(10, place(first, mesh), {})
        saver.wait()
        (small_disk / "others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**16))
        saver.save(20, place(make_values(20), mesh), {})
        saver.wait()

    with pytest.raises(UserError) as error:
        save_both()
    saver.close()
    message = str(error.value)
    assert f"no space is left in {small_disk}/checkpoints" in message
    assert f"checkpoint 20 has {sum(x.nbytes for x in jax.tree.leaves(first)) / 2**30:.3g} GiB of arrays" in message
    assert "Checkpoint 10 is intact" in message
    assert capfd.readouterr().err == ""  # neither Orbax nor TensorStore talk to the user
    assert names_in(small_disk / "checkpoints") == ["10"]
    assert same(checkpointer(small_disk / "checkpoints").restore_latest(wanted)[0], make_values(10))


def test_a_save_that_fails_is_the_last_line_of_the_run_and_the_only_one_of_its_error(tmp_path):
    """Orbax's threads would log hundreds of lines before it, and asyncio some after it."""
    keys = {"base_output_directory": tmp_path, "dataset_path": runs.write_corpus(tmp_path / "corpus"), "steps": 4}
    argv = runs.arguments(1, **keys, checkpoint_period=2, jax_cache_dir="")
    blocks = 40  # of 512 bytes or 1 KiB: room for every file of a run but that of the arrays
    shell = f"ulimit -f {blocks}; exec {sys.executable} -m src.train " + " ".join(map(shlex.quote, argv))
    log = tmp_path / "log"
    output = runs.finish(runs.start_command(["sh", "-c", shell], log), log, code=2).splitlines()
    assert not [line for line in output if "Traceback" in line or "orbax" in line.replace(output[-1], "")]
    assert output[-1].startswith(f"error: checkpoint 2 could not be written to {tmp_path}/run/checkpoints: ")
    assert output[-1].endswith(" No other checkpoint was found.")


def test_a_command_does_not_wait_for_threads_of_orbax_that_will_not_end():
    program = """
import threading, time
from src.system.exit_codes import run_command
from src.system.errors import TransientError
def main(argv):
    thread = type("Waiting", (threading.Thread,), {"__module__": "orbax.checkpoint._src.futures.future"})
    thread(target=time.sleep, args=[600]).start()
    raise TransientError("the disk")
run_command(main)"""
    done = subprocess.run([sys.executable, "-c", program], cwd=runs.ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (75, "error: the disk\n")


def test_a_folder_in_a_checkpoints_place_is_refused_and_left(directory, mesh):
    saver = checkpointer(directory)
    saver.save(30, place(make_values(30), mesh), {})
    (directory / "40").mkdir()
    (directory / "40" / "mine").write_text("x")
    with pytest.raises(UserError, match=r"checkpoints/40 exists already, and this run did not write it"):
        saver.save(40, place(make_values(40), mesh), {})
    saver.close()
    assert (directory / "40" / "mine").read_text() == "x"


# ---- What stays


def test_the_last_good_checkpoint_stays_until_the_next_has_proven_good(tmp_path, mesh, wanted):
    saver = checkpointer(tmp_path, max_to_keep=1)
    for step in (10, 20, 30):
        saver.save(step, place(make_values(step), mesh), {})
    saver.wait()
    assert set(names_in(tmp_path)) >= {"20", "30"}
    assert saver.quarantine_nonfinite(30) == ["30.nonfinite"]
    saver.close()
    assert names_in(tmp_path) == ["20", "30.nonfinite"]
    assert same(checkpointer(tmp_path).restore_latest(wanted)[0], make_values(20))


def test_an_unfinished_checkpoint_gets_no_new_name(directory, monkeypatch):
    (directory / "30").mkdir()
    monkeypatch.setattr(set_aside, "is_unfinished", lambda folder: True)  # only a store has such checkpoints
    assert set_aside.set_aside(epath.Path(directory), 30, "nonfinite") == ""
    assert names_in(directory) == ["10", "20"]


def test_many_old_checkpoints_are_deleted_by_one_listing_a_save(directory, mesh, monkeypatch):
    for step in range(1000, 1300):
        (directory / str(step)).mkdir()
        (directory / str(step) / "file").write_text("x")
    listings = []
    listed = checkpoint.steps_in
    monkeypatch.setattr(checkpoint, "steps_in", lambda folder: listings.append(folder) or listed(folder))
    saver = checkpointer(directory)
    saver.save(2000, place(make_values(30), mesh), {})
    saver.wait()
    saver.prune()
    saver.close()
    assert names_in(directory) == ["1298", "1299", "2000"]
    assert len(listings) == 2


def test_an_old_checkpoint_that_can_not_be_deleted_is_named_until_it_can(tmp_path, mesh, monkeypatch):
    rmtree = type(absolute(tmp_path)).rmtree

    def failing(path, *args, **kwargs):
        if path.name == "10":
            raise PermissionError(errno.EACCES, "not allowed")
        return rmtree(path, *args, **kwargs)

    saver = checkpointer(tmp_path, max_to_keep=1)
    message = (
        f"checkpoint 10 could not be deleted and takes up space in {tmp_path}: PermissionError: [Errno 13] not allowed"
    )
    with monkeypatch.context() as patch:
        patch.setattr(type(absolute(tmp_path)), "rmtree", failing)
        assert [saver.save(step, place(make_values(step), mesh), {}) for step in (10, 20, 30)] == 3 * [[]]
        assert all(deletion.exception() for deletion in saver._deletions.values())  # waits
        assert saver.save(40, place(make_values(40), mesh), {}) == [message]
        assert saver.finish() == [message]
    assert names_in(tmp_path) == ["10", "40"]
    assert saver.finish() == []
    saver.close()
    assert names_in(tmp_path) == ["40"]


# ---- What is logged


def test_orbax_is_quiet_while_a_run_saves_and_only_then(tmp_path, mesh, caplog, monkeypatch):
    for logger in ("absl", "asyncio"):  # others may be saving
        monkeypatch.setattr(logging.getLogger(logger), "filters", [])

    def logged():
        """Which of Orbax's records, and of asyncio's, come through; and what deleted objects report to."""
        caplog.clear()
        for logger, path in (("absl", "/x/orbax/checkpoint.py"), ("absl", "/x/y.py"), ("asyncio", "/x/events.py")):
            for level in (logging.WARNING, logging.ERROR):
                record = logging.LogRecord(logger, level, path, 1, "message", None, None)
                logging.getLogger(logger).handle(record)
        return [(Path(record.pathname).name, record.levelname) for record in caplog.records], sys.unraisablehook

    everything = logged()
    assert len(everything[0]) == 6
    saver = checkpointer(tmp_path)
    saver.save(10, place(make_values(10), mesh), {})
    kept, hook = logged()
    assert kept == [("y.py", "WARNING"), ("y.py", "ERROR")]
    assert hook != everything[1]
    saver.close()
    assert logged() == everything
