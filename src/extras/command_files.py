"""Reads and writes the files that keys of commands name; replaces a file only if it is empty or of the same kind."""

import contextlib
import os
import re
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from src.system.disk import any_path, new_file
from src.system.errors import UserError

T = TypeVar("T")

# The beginnings of files that commands write, by the key with their path or by their name. No others are replaced.
_BEGINNINGS = {
    "results_path": rb'\{\n  "(eval_loss["/]|results": .*"model": "mintext")',
    "scores_path": rb'\{"text": [^\n]*"log_probs": \[null',
    "logits_path": rb"\x93NUMPY\x02\x00.{4}\{'descr': '<f4', 'fortran_order': False, 'shape': \(\d+, \d+, \d+\)",
    "decode_path": rb'\{"id": 0, "sample": 0, "prompt": ',
    "decode_path's settings": rb'\{.*"decode_samples": .*"prompts": ',
    "compile_report": rb'\{\n  "topology": ',
    "compiled_trainstep_file": rb"MinText compiled training step, ",
    "pgle_profile": rb"MinText PGLE profile, ",
    "report": rb"<!doctype html>.*\n  --page: #",
    "report of src.verify": rb'\{\n  "model_name": ',
    "calibration": rb'\{\n  "kind": ',
    "report of src.plan": rb'\{\n  "plan": ',
    "page of src.plan": rb"<!doctype html>.*\n  --page: #",
}


def is_own(kind: str, file: Any) -> bool:
    """Tells whether a file, local or an `epath.Path`, is empty or begins like files of this kind."""
    with file.open("rb") as opened:
        beginning = opened.read(2**24)
    return not beginning or re.match(_BEGINNINGS[kind], beginning, re.DOTALL) is not None


def read_lines(path: Path, key: str, of_json: Callable[[str], T]) -> list[str | T]:
    """Reads a file's lines except blank ones; converts the lines of a .jsonl file by `of_json`.

    Raises UserError if the file cannot be read, or if `of_json` raises ValueError.
    """
    try:
        # Editors on Windows begin files with a byte order mark. `splitlines` would also split within JSON strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={path} cannot be read: {error}") from None
    values: list[str | T] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(of_json(line) if path.suffix == ".jsonl" else line)
        except ValueError as error:
            raise UserError(f"{key}={path}, line {number}: {error}") from None
    return values


def check_outputs(paths: Mapping[str, str]) -> None:
    """Raises UserError if a key's path cannot be written, or two keys have the same path; leaves no files behind.

    An existing file must be empty or of the key's kind.
    """
    keys: dict[Any, str] = {}
    for key, path in paths.items():
        with _writing(key, path) as target:
            folder = target.parent
            while "://" not in path and not folder.exists():
                folder = folder.parent
            probe = folder / f".{target.name}.{os.getpid()}.part"
            probe.write_bytes(b"")
            probe.unlink()
        if target in keys:
            raise UserError(f"{keys[target]} and {key} are both {path}: give each a file of its own")
        keys[target] = key


def write_output(key: str, path: str, content: bytes) -> None:
    """Writes a file and the folders that it needs; raises UserError as `check_outputs` does, or if writing fails."""
    with _writing(key, path) as target:
        target.parent.mkdir(parents=True, exist_ok=True)
        if "://" in path:  # stores write objects atomically
            target.write_bytes(content)
            return
        with new_file(target) as file:
            file.write(content)


@contextlib.contextmanager
def _writing(key: str, path: str) -> Generator[Any]:
    """Yields the file to write, with symbolic links resolved.

    Raises UserError if something exists there that is not a regular file, or is neither empty nor of the kind `key`
    (`is_own`), and for any failure in the block.
    """
    try:
        if "://" in path:
            target = any_path(path)
        else:
            target = Path(os.path.realpath(os.path.expanduser(path)))
            if target.exists() and not target.is_file():
                raise ValueError("it exists and is not a regular file")
        if target.exists() and not is_own(key, target):
            raise ValueError("another file exists there that this command did not write: name a new one, or delete it")
        yield target
    except Exception as error:  # each store's client has its own exception types
        reason = str(error) if type(error) in (ValueError, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{key}={path}: cannot write it: {reason}") from error
