"""Declares keys of the configuration: `key(default, comment, ...)` is a field of a frozen dataclass."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, dataclass_transform

T = TypeVar("T")

DTYPES = ("bfloat16", "float32")


class Range(NamedTuple):
    """Valid values, in words and as a test; a key may replace `max`, the largest number (None: no limit)."""

    words: str
    holds: Callable[[Any], bool]
    max: float | None = 2**30


# fmt: off
# POSITIVE refuses numbers near 1e-38, below which float32 loses precision and then becomes 0.
POSITIVE         = Range("a positive number, 1e-30 or more", lambda x: x >= 1e-30)
ABOVE_0          = Range("a positive number", lambda x: x > 0)
FROM_0           = Range("0 or more", lambda x: x >= 0)
FROM_1           = Range("1 or more", lambda x: x >= 1)
FROM_2           = Range("2 or more", lambda x: x >= 2)
FROM_64          = Range("64 or more", lambda x: x >= 64)
FROM_0_OR_UNSET  = Range("0 or more, or -1", lambda x: x >= -1)
FROM_1_OR_UNSET  = Range("1 or more, or -1", lambda x: x >= 1 or x == -1)
AXIS_SIZE        = FROM_1_OR_UNSET._replace(max=2**20)
ABOVE_0_OR_UNSET = Range("a positive number, or -1", lambda x: x > 0 or x == -1)
SHARE            = Range("from 0 to 1", lambda x: 0 <= x <= 1, None)
BELOW_1          = Range("at least 0 and less than 1", lambda x: 0 <= x < 1, None)
SHARE_ABOVE_0    = Range("more than 0, at most 1", lambda x: 0 < x <= 1, None)
SHARE_OR_UNSET   = Range("more than 0, at most 1, or -1", lambda x: 0 < x <= 1 or x == -1, None)
POWER_OF_2       = Range("a power of two, from 1 up", lambda x: x >= 1 and x & (x - 1) == 0)
SEED             = Range("at least 0 and less than 2**32", lambda x: 0 <= x < 2**32, None)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the configuration: its default, valid values, lines in base.yml, and the commands that read it."""

    default: Any
    comment: str  # the line that explains it
    allowed: Range | tuple[str, ...] = ()  # the range of a number, or the choices for a string
    max: float | None = None  # the largest number, beyond any machine's memory or time; larger ones may overflow
    per_layer: bool = False  # a pattern of `decoder_segments` may set it per layer
    resume_invariant: bool | None = None  # a run cannot resume with another value; None: see schema.collect
    example: str = ""  # an example of a list of non-empty strings, such as `[attention.*]`
    is_path: bool = False
    is_local: bool = False  # the path is on this machine's file system, not in a remote store
    any_text: bool = False  # the string may have NUL characters, which a name may not have
    commands: tuple[str, ...] = ()  # the only commands that read it, the main one first; empty: no limit
    ignored: str = "in files"  # where other commands accept it with a note: anywhere, in files, nowhere
    above: str = ""  # comment lines above it in base.yml
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the comment of each entry of a mapping
    name: str = ""
    section: str = ""  # the attribute of `Config` that has it
    group: str = ""  # the title in base.yml


def frozen(value: Any) -> Any:
    """Makes `value` immutable at every depth: tuples for lists, read-only mappings for dicts."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(entry) for name, entry in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def key(
    default: Any, comment: str, allowed: Range | tuple[str, ...] = (), max: float | None = None, **more: Any
) -> Any:
    """Declares a key; the arguments are fields of `Key`. If one command reads it, its comment begins with that name.

    `max`: the largest number; None: the maximum of the range `allowed`.
    """
    if max is None and isinstance(allowed, Range):
        max = allowed.max
    commands = more.get("commands", ())
    comment = f"{commands[0]}: {comment}" if len(commands) == 1 else comment
    declared = Key(frozen(default), comment, allowed, max, **more)
    return dataclasses.field(default_factory=lambda: declared.default, metadata={"key": declared})


def choice(default: str, comment: str, table: Mapping[str, Any], **more: Any) -> Any:
    """Declares a key whose value is a name in a table; each entry's `note` is a line above the key in base.yml."""
    width = max(map(len, table))
    lines = [f"{comment}:"]
    for name, entry in table.items():
        lines.append(f"  {name:{width}}  {entry.note}")
    return key(default, "one of the above", tuple(table), above="\n".join(lines), **more)


def path(default: str, comment: str, **more: Any) -> Any:
    """Declares a key whose value is a path."""
    return key(default, comment, is_path=True, **more)


@dataclass_transform(frozen_default=True)
def group(cls: type[T]) -> type[T]:
    """Makes a class of declared keys a frozen dataclass; its docstring is their title in base.yml."""
    return dataclasses.dataclass(frozen=True)(cls)
