"""Reads and writes configuration text: YAML whose plain words and numbers mean what they mean in Python.

YAML 1.1 takes `1e-3` for a string, `1:30` for ninety and `no` for false. Here a plain scalar stays text (`Plain`) until
the key's default determines its type.
"""

import contextlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from src import shipped
from src.config.keys import frozen
from src.system.errors import UserError, clipped

CONFIGS = shipped("configs")
BASE = CONFIGS / "base.yml"

BOOLS = {"true": True, "True": True, "false": False, "False": False}
NOTHING = ("", "null", "None")
TYPE_NAMES = {
    **{bool: "true or false", int: "an integer", float: "a number", str: "a string"},
    **{Mapping: "a mapping, such as {name: value}", object: "a list, such as [a, b]"},
}
MAX_NODES, MAX_DEPTH = 100_000, 50  # strings, lists and mappings of one YAML document, and levels of nesting
MAX_NAME, MAX_PATH = 255, 4095  # bytes of a local path: of each name, and in all


def unprintable(text: str, *, is_name: bool) -> str:
    """Returns an error message if `text` has half a surrogate pair or, if it is a name, a NUL character; else ""."""
    match = re.search("[\0\ud800-\udfff]" if is_name else "[\ud800-\udfff]", text)
    return f"the character {match[0]!a} is not text" if match else ""


def too_long(path: str) -> str:
    """Returns an error message if a local path has more bytes than a file system allows, else ""."""
    names = os.fsencode(path).split(b"/")
    if max(map(len, names)) <= MAX_NAME and sum(map(len, names)) + len(names) <= MAX_PATH + 1:
        return ""
    return f"is too long for a path: at most {MAX_NAME} bytes between slashes and {MAX_PATH} in all"


def file_name(text: str) -> str:
    """Returns `text`, or raises UserError if no file can have that name."""
    if problem := unprintable(text, is_name=True):
        raise UserError(f"{text!a} names no file: {problem}")
    if problem := too_long(text):
        raise UserError(f"{clipped(text)} {problem}")
    return text


class Plain(str):
    """A scalar without quotes in the YAML: `128`, unlike `"128"`."""


def _fault(problem: str, at: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


class _Loader(yaml.BaseLoader):
    """BaseLoader for strings, lists and mappings only; other tags and repeated keys are errors."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        if tag != {"scalar": "!!str", "sequence": "!!seq", "mapping": "!!map"}[node.id]:
            raise _fault(f"the tag {tag} is not supported: values are texts, lists and mappings", node)
        return super().construct_object(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        if problem := unprintable(node.value, is_name=False):
            raise _fault(problem, node)
        return Plain(node.value) if node.style is None else node.value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key := self.construct_object(key_node), str):
                raise _fault("found unhashable key", key_node)
            if key in mapping:
                raise _fault(f"the key {key} is given twice", key_node)
            mapping[str(key)] = self.construct_object(value_node)
        return mapping


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes each string that would otherwise not be read back as the same string."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        several_lines = len(f"{text}.".splitlines()) > 1  # YAML has more line ends than \n
        reads_otherwise = text in NOTHING or literal(Plain(text)) != text or several_lines
        return self.represent_scalar("tag:yaml.org,2002:str", str(text), style='"' if reads_otherwise else None)


for _text_type in (str, Plain):
    _Dumper.add_representer(_text_type, _Dumper.represent_text)


def parse(text: str, where: str) -> Any:
    """Parses YAML into dicts, lists and strings, unquoted ones as `Plain`; raises UserError naming `where` and line."""
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        if not (isinstance(error, yaml.MarkedYAMLError) and error.problem_mark):
            raise UserError(f"{where} is not valid YAML: {error}") from None
        mark, pattern = error.problem_mark, None
        if not isinstance(error, yaml.constructor.ConstructorError):
            # A star begins an alias in YAML, but here more likely a pattern of weight names.
            pattern = re.compile(r"\*[^\s,\]}]*").match(text, (error.context_mark or mark).index)
        hint = f". A value that begins with * needs quotes: '{pattern[0]}'" if pattern else ""
        place = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise UserError(f"{where} is not valid YAML, {place}{hint}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be read") from None
    _check_size(value, where)
    return Plain("") if value is None else value


def _check_size(value: Any, where: str, depth: int = 1) -> int:
    """Counts a value and those within it, also each time that an alias repeats them.

    Raises UserError for more than MAX_NODES values or MAX_DEPTH levels.
    """
    count = 1
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        count += _check_size(each, where, depth + 1)
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise UserError(f"{where} has more than {MAX_NODES:,} values, or more than {MAX_DEPTH} levels")
    return count


def read_file(path: Path) -> dict[str, Any]:
    """Reads the keys of a YAML file, in its order; raises UserError if it can't be read, or as `parse_keys` does."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return parse_keys(text, str(path))


def parse_keys(text: str, where: str) -> dict[str, Any]:
    """Parses the keys of a YAML document, in its order; raises UserError if it is malformed or not a mapping."""
    value = parse(text, where)
    if value == "":
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where} holds {_named(value)}; expected lines of `key: value`, as in {BASE}")
    return value


def literal(value: Any) -> Any:
    """Converts each plain scalar in `value`: to a bool if in `BOOLS`, to an int or float if possible, else to a str.

    An integer beyond the range of a float becomes an infinite float, which no key accepts.
    """
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [literal(entry) for entry in value]
    if not isinstance(value, Plain):
        return value
    if value in BOOLS:
        return BOOLS[value]
    for number in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            found = number(value)
            math.isfinite(found)  # an integer of more than 308 digits raises OverflowError
            return found
    return str(value)


def convert(value: Any, default: Any, name: str = "") -> Any:
    """Converts a parsed `value` to the type of `default`.

    An integer may be written `1e3`, a float as an integer. Nothing (`None`, `null`, empty) is an empty string, list or
    mapping, but never a number. Raises ValueError if `value` is of another type; the message names both types, after
    `name`.
    """
    empty = isinstance(value, Plain) and value in NOTHING
    name = f"{name}: " if name else ""
    match default:
        case bool():
            if isinstance(value, Plain) and value in BOOLS:
                return BOOLS[value]
        case int() | float():
            number = literal(value)
            is_number = type(number) in (int, float) and math.isfinite(number)
            if is_number and (isinstance(default, float) or number == int(number)):
                return type(default)(number)
        case str():
            if isinstance(value, str):
                return "" if empty else str(value)
        case tuple():
            if empty or isinstance(value, list):
                return () if empty else frozen(literal(value))
            if isinstance(value, str):
                raise ValueError(f"{name}expected a list, as in [{value}], got {_named(value)}")
        case Mapping():
            if empty or isinstance(value, dict):
                return frozen({} if empty else literal(value))
    raise ValueError(f"{name}expected {type_name(default)}, got {_named(value)}")


def type_name(value: Any) -> str:
    """Names the type of a value in messages."""
    return next(name for kind, name in TYPE_NAMES.items() if isinstance(value, kind))


def parse_argument(text: str, default: Any, where: str) -> Any:
    """Parses the text after `key=`; `default` is the key's, or None for an unknown key.

    The text is YAML, but a string key takes it as it is, without outer quotes. Raises UserError for malformed YAML; for
    an unknown key, it counts as a string instead.
    """
    if isinstance(default, str):
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
        return text[1:-1] if quoted else Plain(text)
    try:
        return parse(text, where)
    except UserError:
        if default is None:
            return Plain(text)
        raise


def _named(value: Any) -> str:
    if isinstance(value, Plain) and value in NOTHING:
        return "nothing"
    value = literal(value)
    kind = type_name(value).split(",")[0]
    if isinstance(value, float) and not math.isfinite(value):
        kind = "a number that is not finite"
    return f"{kind} ({dump(value)})" if not isinstance(value, bool) else dump(value)


def dump(value: Any) -> str:
    """Writes `value` as one line of YAML, which `parse` and `convert` read back."""
    style = {"Dumper": _Dumper, "default_flow_style": True, "allow_unicode": True, "width": math.inf}
    return yaml.dump([_plain_types(value)], **style).strip()[1:-1]


def _plain_types(value: Any) -> Any:
    if isinstance(value, Mapping | ConfigDict):  # a ConfigDict is not a Mapping
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_types(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value  # an array or scalar of NumPy or JAX
