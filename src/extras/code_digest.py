"""Digests MinText's code, so that commands reuse saved results only with the code that computed them."""

import hashlib
from collections.abc import Collection
from importlib import metadata

from src import FOLDER


def code_digest(*others: object, folders: Collection[str] = ("",), packages: Collection[str] | None = None) -> str:
    """Returns a SHA-256, in hex, of the Python files in `folders` of `src/`, the versions of `packages`, and `others`.

    By default it covers all of `src/`, and all installed packages. `others` are digested by their `repr`.
    """
    installed = {(each.name, each.version) for each in metadata.distributions()}
    versions = sorted((each for each in installed if packages is None or each[0] in packages), key=repr)
    digest = hashlib.sha256(repr((versions, others)).encode())
    for file in sorted(file for folder in folders for file in (FOLDER / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(FOLDER)} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
