"""Digests code: results that a command keeps belong to the code that gave them."""

import hashlib
from collections.abc import Collection
from importlib import metadata

from src import FOLDER


def code_digest(*others: object, folders: Collection[str] = ("",), packages: Collection[str] | None = None) -> str:
    """Digests the Python files in these folders of `src/`, the versions of these packages, and `others`.

    Without `packages`, the versions of all that are installed count. `others` count by their representation.
    """
    installed = {(each.name, each.version) for each in metadata.distributions()}
    versions = sorted((each for each in installed if packages is None or each[0] in packages), key=repr)
    digest = hashlib.sha256(repr((versions, others)).encode())
    for file in sorted(file for folder in folders for file in (FOLDER / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(FOLDER)} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
