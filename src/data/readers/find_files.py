"""Finds the files of a config's path: a file, a folder or a glob, local or remote."""

import fnmatch
import glob
import itertools
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from src.data.readers import stores
from src.data.readers.files import Listing, is_remote, walk
from src.data.rules import PRESENT_RULES
from src.system.errors import UserError, first_few
from src.system.storage_errors import attempted

# More than six digits are not a count of files, and listing the missing numbers would take forever.
_SHARD = re.compile(r"(?P<before>.*?)(?<!\d)(?P<number>\d{3,6})-of-(?P<total>\d{3,6})(?!\d)(?P<after>[^/]*)")


def list_files(path: str, key: str, rules: int = PRESENT_RULES) -> Listing:
    """Lists the files of a config's path: a file, a folder (its files at any depth, except hidden ones) or a glob.

    From data rules 2 on, links to folders are followed; a folder path and `**` read a folder with several names once.

    Raises UserError if the path is empty or does not exist, no installed package can read it, or a folder or a glob
    lacks a file of a numbered set (x-00000-of-00010 and so on); TransientError if a store fails. `key` is the path's
    config key, for messages.
    """
    if not path:
        raise UserError(f"{key} is empty: expected a file, a folder or a glob")
    setting = f"{key}={path}"
    if is_remote(path):
        folder, pattern, sizes = stores.find(path, setting, _fixed_part(path))
    else:
        folder, pattern, sizes = _find_local(path, rules)
    if pattern and not sizes:
        raise UserError(f"{setting}: there is no such file or folder, and no file that matches")
    if pattern is not None:
        _check_no_gaps(sizes, pattern or "*", setting)
    return Listing(folder, dict(sorted(sizes.items())), pattern == "", setting, rules)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:] or "*") for start in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def size(file: str) -> int:
    """Returns a local file's size in bytes; raises as `attempted` does, and UserError for a pipe or a device."""
    found = attempted(file, lambda: os.stat(file))
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{file} is not a regular file: leave it out with a glob that does not match it")
    return found.st_size


# A folder, the pattern of its file names ("" for all files, None for a single file), and the sizes by name.
_Found = tuple[str, str | None, dict[str, int]]


def _find_local(path: str, rules: int) -> _Found:
    place, pattern = Path(path.removeprefix("file://")).expanduser(), None
    if place.is_dir():
        folder, pattern, names = place, "", attempted(path, lambda: walk(str(place), rules=rules))
    elif place.is_file():
        folder, names = place.parent, [place.name]
    else:
        folder, pattern = Path(_fixed_part(str(place))), place.name
        wanted = place.relative_to(folder)
        if "**" in wanted.parts and rules > 1:
            found = attempted(path, lambda: walk(str(folder)))
            matches = [name for name in found if _fits(name.split("/"), wanted.parts)]
        else:
            matches = glob.glob(str(wanted), root_dir=folder, recursive=True)
        names = [name for name in matches if (folder / name).is_file()]
    return str(folder), pattern, {name: size(os.path.join(folder, name)) for name in names}


def _fixed_part(path: str) -> str:
    """Returns the deepest folder of a path that has no wildcard in its name or above it."""
    protocol, colon, place = path.rpartition("://")
    parts = place.split("/")[:-1]
    fixed = "/".join(itertools.takewhile(lambda part: not set(part) & set("*?["), parts))
    return protocol + colon + (fixed or ("/" if place.startswith("/") else ""))


def _check_no_gaps(names: Collection[str], pattern: str, setting: str) -> None:
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            # A hash that differs between files may follow the numbers, so only the file type is compared.
            kind = (match["before"], match["total"], os.path.splitext(match["after"])[1])
            sets.setdefault(kind, {})[int(match["number"])] = match["after"]
    for (before, total, _), numbers in sets.items():
        first = int(0 not in numbers and int(total) in numbers)  # some sets count from 1
        (after, *other_ends) = set(numbers.values())
        unlisted = set(range(first, first + int(total))) - set(numbers)
        begins = [f"{before}{number:0{len(total)}}-of-{total}" for number in sorted(unlisted)]
        missing = [begin for begin in begins if fnmatch.fnmatch(os.path.basename(begin + after), pattern)]
        if missing:
            listed = first_few(begin if other_ends else begin + after for begin in missing)
            raise UserError(
                f"{setting}: of {int(total)} files {listed} {'is' if len(missing) == 1 else 'are'} missing. Restore "
                "the missing files, or leave them out with a glob that does not match them, such as x-0000[0-4]-of-*"
            )
