"""Manages a run's folder, `<base_output_directory>/<run_name>`, on a disk or on a store that can't append to files."""

import contextlib
import datetime
import itertools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

import jax
from etils import epath

from src.data.processes import gather_json
from src.system.disk import any_path, lock, new_file
from src.system.errors import TransientError, UserError
from src.system.storage_errors import Failure, StoreError, failure_of, one_line

# Files and folders that a run writes into its folder.
FILES = ("config.yml", "environment.json", "metrics.jsonl", "report.html", "sample.txt")
FOLDERS = ("checkpoints", "tensorboard")
# Matches a run's config.yml, also if a crash left it empty. A run does not replace any other config.yml.
_OWN_CONFIG = rb"(?s)run_name: .*\nbase_output_directory: .*\nmodel_name: .*\naccept_changes: |\Z"


class RunFolder:
    """Reads and writes the files of one run, in `path`. Only process 0 writes; on other processes writing does nothing.

    `write_text` writes complete files directly to the folder. Files that grow (metrics.jsonl, TensorBoard's) are
    written under `local`: the folder itself if it is on a local disk, else a temporary folder whose files `sync`
    uploads. A run syncs before each checkpoint, so that the store has all lines up to the step it is resumed from.
    """

    def __init__(self, base_output_directory: str, run_name: str) -> None:
        self.name = run_name
        self._is_remote = is_remote(base_output_directory)
        # Orbax requires absolute paths; paths on a store are absolute already.
        base = base_output_directory if self._is_remote else os.path.abspath(os.path.expanduser(base_output_directory))
        self.path = epath.Path(base) / run_name
        self.local = Path(tempfile.mkdtemp(prefix="mintext-")) if self._is_remote else Path(self.path)
        self._synced: dict[Path, tuple[int, int]] = {}  # (bytes, modification time in ns) of uploaded files
        self._lock: int | None = None  # file descriptor of the folder while it is locked
        self._created: list[Path] = []  # created by `lock`: the folder and its parents, innermost first

    def check_writable(self) -> None:
        """Raises UserError if the folder is not writable, or a run would replace files that no run wrote.

        Process 0 tries by writing a file and deleting it. Raises TransientError if a store does not answer.
        """
        for name in () if self._is_remote else FILES + FOLDERS:
            kind, place = ("folder" if name in FOLDERS else "file"), Path(self.path / name)
            # `lexists`, because a broken link would otherwise look like an unused name.
            if os.path.lexists(place) and not (place.is_dir() if name in FOLDERS else place.is_file()):
                raise UserError(
                    f"{place} is not a {kind}, and a run writes its own there: move it away, or use another run_name"
                )
        if jax.process_index() != 0:
            return
        try:
            folder = self.path if self._is_remote else _nearest_existing(self.path)
            probe = folder / f".mintext_write_test_{uuid.uuid4().hex}"  # unique, because several runs may start at once
            probe.write_text("")
            probe.unlink()
        except Exception as error:  # each store's client has its own exception types
            problem = f"cannot write to {self.path}: {type(error).__name__}: {error}"
            if self._is_remote and failure_of(error) is Failure.TRANSIENT:
                raise TransientError(f"{problem}. Is this machine online, and logged in to the store?") from error
            raise UserError(
                f"{problem}. Expected base_output_directory to be a folder or bucket this user may write to."
            ) from error
        config, found = self.path / "config.yml", [name for name in FILES if (self.path / name).exists()]
        if not found or (self.path / "checkpoints").exists():
            return
        if not (config.exists() and re.match(_OWN_CONFIG, config.read_bytes())):
            there = f"{self.path / found[0]} exists, and {config} is not from a run"
            raise UserError(f"{there}: a run would replace it. Move it away, or use another run_name")

    def lock(self) -> None:
        """Locks a folder on a local disk until `close`; raises UserError if another run has locked it."""
        if jax.process_index() != 0 or self._is_remote:
            return
        created = [folder for folder in (Path(self.path), *Path(self.path).parents) if not folder.exists()]
        message = f"another process is running in {self.path}: wait for it, or use another run_name"
        self._lock = lock(Path(self.path), message)
        self._created = created

    def write_text(self, name: str, text: str) -> None:
        """Writes the file `name` in the folder atomically: readers see either the old or the new content.

        Only process 0 writes, and makes the folder if it is missing; others do nothing.
        """
        if jax.process_index() != 0:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_remote:  # an object appears only once it is complete
            (self.path / name).write_bytes(text.encode())
        else:
            with new_file(Path(self.path / name)) as file:
                file.write(text.encode())

    def read_text(self, name: str) -> str | None:
        """Reads the file `name` as the function `read_text` does."""
        return read_text(self.path / name)

    def fetch(self, name: str) -> Path:
        """Prepares the growing file `name` under `local`, with the lines of earlier starts; returns its path."""
        file = self.local / name
        if jax.process_index() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            if self._is_remote and (self.path / name).exists():
                file.write_bytes((self.path / name).read_bytes())
        return file

    def set_aside(self, name: str) -> str:
        """Renames the file `name`, such as metrics.jsonl, to the next unused name, such as metrics.1.jsonl.

        Returns the new name; "" if the file is missing or empty, and on all processes but the first.
        """
        file = self.path / name
        if jax.process_index() != 0 or not (file.exists() and file.stat().length):
            return ""
        names = (f"{file.stem}.{number}{file.suffix}" for number in itertools.count(1))
        aside = next(name for name in names if not (self.path / name).exists())
        (self.path / aside).write_bytes(file.read_bytes())  # a store has no rename
        file.unlink()
        return aside

    def sync(self) -> None:
        """Uploads the growing files that have changed since the last call."""
        if not self._is_remote or jax.process_index() != 0:
            return
        for file in self.local.rglob("*"):
            version = (file.stat().st_size, file.stat().st_mtime_ns)
            if file.is_file() and self._synced.get(file) != version:
                (self.path / file.relative_to(self.local).as_posix()).write_bytes(file.read_bytes())
                self._synced[file] = version

    def close(self) -> None:
        """Syncs, deletes the folders that `lock` created if they are empty, unlocks, and deletes temporary files."""
        self.sync()
        if self._lock is not None:
            with contextlib.suppress(OSError):  # stops at a folder that has files
                for folder in self._created:
                    folder.rmdir()
            os.close(self._lock)
            self._lock = None
        if self._is_remote:
            shutil.rmtree(self.local)


def read_text(file: epath.Path) -> str | None:
    """Reads a file's text, with U+FFFD for invalid UTF-8; None if the file does not exist."""
    return file.read_bytes().decode(errors="replace") if file.exists() else None


def dated_name(base_output_directory: str) -> str:
    """Names a run without a run_name by the time of its start on process 0's clock.

    A store has no locks, so there random digits distinguish runs that start in the same second.
    """
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return gather_json(now + f"-{uuid.uuid4().hex[:6]}" * is_remote(base_output_directory))[0]


def _nearest_existing(folder: epath.Path) -> epath.Path:
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return _nearest_existing(folder.parent)
    return folder


@contextlib.contextmanager
def in_run_folder(folder: epath.Path) -> Generator[None]:
    """Attaches the run's folder and its newest checkpoint to unexpected errors, for the message by `run_command`."""
    try:
        yield
    except (UserError, TransientError):
        raise
    except BaseException as error:
        kept = getattr(error, "latest_checkpoint", "") or describe_latest(folder)
        vars(error).update(run_folder=folder, latest_checkpoint=kept)
        raise


def latest_step(folder: epath.Path) -> int | None:
    """Finds the step of a run's newest complete checkpoint; None without one, or if the folder cannot be read."""
    return _newest_complete(folder / "checkpoints")


def _newest_complete(checkpoints: epath.Path) -> int | None:
    with contextlib.suppress(Exception):  # each store's client has its own exception types
        return next((step for step in steps_in(checkpoints) if not is_unfinished(checkpoints / str(step))), None)
    return None


def describe_step(folder: epath.Path, step: int | None) -> str:
    """Names the checkpoint that a run would resume from, for a message; `step` is None if there is none."""
    return "there is no checkpoint" if step is None else f"the checkpoint of step {step} in {folder} is intact"


def describe_latest(folder: epath.Path) -> str:
    """Describes the checkpoint of `latest_step` for a message."""
    return describe_step(folder, latest_step(folder))


def write_error(checkpoints: epath.Path, step: int, size: int, error: Exception) -> Exception:
    """Makes the error that explains to a user why a checkpoint of `size` bytes could not be written.

    Returns UserError or TransientError, or `error` itself if it is not from a disk or store.
    """
    newest = _newest_complete(checkpoints)
    intact = "No other checkpoint was found" if newest is None else f"Checkpoint {newest} is intact"
    failure = failure_of(error)
    if failure is Failure.FULL:
        free = ""
        if not is_remote(checkpoints):
            disk = _nearest_existing(checkpoints)  # the folder itself may be what could not be made
            free = f", and {_gib(shutil.disk_usage(disk).free)} are free"
        return UserError(
            f"no space is left in {checkpoints}: checkpoint {step} has {_gib(size)} of arrays{free}. {intact}. Free "
            "space, or keep fewer checkpoints (max_num_checkpoints_to_keep); then run the same command to resume."
        )
    message = f"checkpoint {step} could not be written to {checkpoints}: {one_line(error)}. {intact}."
    if failure is Failure.TRANSIENT:
        return TransientError(f"{message} Run the same command to resume.")
    return UserError(message) if isinstance(error, OSError | StoreError) else error


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def steps_in(folder: epath.Path) -> list[int]:
    """Lists the steps of the checkpoints in a folder, complete or not, newest first."""
    try:  # `is_dir` would be False if a store does not answer
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    # 004 and ٣ are also decimal, but are not names of checkpoints.
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def absolute(path: epath.PathLike) -> epath.Path:
    """Makes a path absolute, as Orbax requires; paths on an object store are absolute already.

    Raises UserError for an unknown protocol.
    """
    full = any_path(path).expanduser()
    return full if is_remote(full) else full.resolve()


def is_unfinished(step_folder: epath.Path) -> bool:
    """Whether a store has only a part of a checkpoint; on a disk, a folder gets its final name when it is complete."""
    return is_remote(step_folder) and not (step_folder / "commit_success.txt").exists()


def is_remote(path: epath.PathLike) -> bool:
    """Whether the path is on an object store, which has neither rename nor append."""
    return "://" in str(path)
