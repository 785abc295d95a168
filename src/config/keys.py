"""How a key of the configuration is declared: `key(default, comment, ...)`, a field of a frozen dataclass."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The range of a number, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


# fmt: off
# Of less, 0 or its square is 0 in float32.
POSITIVE          = Range("a positive number, 1e-30 or more", lambda x: x >= 1e-30)
FROM_0            = Range("0 or more", lambda x: x >= 0)
FROM_1            = Range("1 or more", lambda x: x >= 1)
FROM_64           = Range("64 or more", lambda x: x >= 64)
FROM_0_OR_MINUS_1 = Range("0 or more, or -1", lambda x: x >= -1)
FROM_1_OR_MINUS_1 = Range("1 or more, or -1", lambda x: x >= 1 or x == -1)
ABOVE_0_OR_MINUS_1 = Range("a positive number, or -1", lambda x: x > 0 or x == -1)
SHARE             = Range("from 0 to 1", lambda x: 0 <= x <= 1)
SHARE_BELOW_1     = Range("at least 0 and less than 1", lambda x: 0 <= x < 1)
SHARE_ABOVE_0     = Range("more than 0, at most 1", lambda x: 0 < x <= 1)
SHARE_OR_MINUS_1  = Range("more than 0, at most 1, or -1", lambda x: 0 < x <= 1 or x == -1)
POWER_OF_2        = Range("a power of two, from 1 up", lambda x: x >= 1 and x & (x - 1) == 0)
SEED              = Range("at least 0 and less than 2**32", lambda x: 0 <= x < 2**32)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Key:
    """One key's declaration.

    Attributes:
        default: of the key's type.
        comment: the line that explains it.
        allowed: the range of a number, or the texts there are to choose from.
        most: the largest number, more than any machine has room or time for: larger ones overflow where they are
            multiplied. None where the range has an end.
        per_layer: a pattern of `decoder_segments` may give a layer its own.
        not_with: the attention types that do not have it.
        fixed: it makes a run's weights, optimizer arrays or data what they are: a run resumed with another value is
            another run.
        example: of a list whose entries are texts, such as `[attention.*]`.
        is_path: its value is a path.
        is_local: its path is read or written through this machine's file system alone.
        any_text: its text may have any character, not only those that a name may have.
        above: comment lines above it in base.yml.
        entries: of a mapping, what explains each entry.
        name, section, group: where it is declared: its own name, the attribute of `Config`, the title in base.yml.
    """

    default: Any
    comment: str
    allowed: Range | tuple[str, ...] = ()
    most: float | None = None
    per_layer: bool = False
    not_with: tuple[str, ...] = ()
    fixed: bool = False
    example: str = ""
    is_path: bool = False
    is_local: bool = False
    any_text: bool = False
    above: str = ""
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    section: str = ""
    group: str = ""


def frozen(value: Any) -> Any:
    """Returns `value` with tuples for lists and read-only mappings for dicts, at every depth."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(entry) for name, entry in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def key(
    default: Any, comment: str, allowed: Range | tuple[str, ...] = (), most: float | None = None, **more: Any
) -> Any:
    """Declares a key; the arguments are `Key`'s."""
    declared = Key(frozen(default), comment, allowed, most, **more)
    return dataclasses.field(default_factory=lambda: declared.default, metadata={"key": declared})


def fact(default: Any, comment: str, *limits: Any, **more: Any) -> Any:
    """Declares a key of the model that may differ from layer to layer."""
    return key(default, comment, *limits, per_layer=True, **more)


def path(default: str, comment: str, **more: Any) -> Any:
    """Declares a key whose value is a path."""
    return key(default, comment, is_path=True, **more)


def group(cls: type) -> type:
    """Makes a class of declared keys a frozen dataclass; its docstring is their title in base.yml."""
    return dataclasses.dataclass(frozen=True)(cls)
