"""Writes configs/base.yml (`python -m src.config.base_yml > configs/base.yml`), and the answers of `--help`."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from src.config.hints import hints
from src.config.keys import Key
from src.config.schema import KEYS
from src.config.yaml import Plain, dump
from src.system.errors import UserError

HEADER = """\
# Every key of MinText, once, with its default. Type a key on the command line as key=value;
# nested ones are dotted (logical_axis_rules.mlp=[]). `python -m src.train --help KEY` prints a key's lines.
# Precedence, lowest first: this file, the file model_name names, the YAML on the command line, key=value.
# Written by `python -m src.config.base_yml` from src/config/schema.py: change it there.
"""


def base_yml() -> str:
    """Returns the text of configs/base.yml: the keys of each group with their defaults and comments."""
    groups = {title: "\n".join(map(key_lines, keys)) for title, keys in keys_by_group().items()}
    return HEADER + "".join(f"\n# ---- {title}\n{lines}\n" for title, lines in groups.items())


def keys_by_group() -> dict[str, list[Key]]:
    """Returns the keys by the titles of base.yml, in its order."""
    groups: dict[str, list[Key]] = {}
    for key in KEYS.values():
        groups.setdefault(key.group, []).append(key)
    return groups


def key_lines(key: Key) -> str:
    """Returns a key's lines in base.yml."""
    lines = [f"# {line}" for line in key.above.splitlines()]
    if key.entries:
        lines.append(_line(f"{key.name}:", key.comment))
        lines.extend(_line(f"  {name}: {dump(value)}", key.entries[name]) for name, value in key.default.items())
    else:
        lines.append(_line(f"{key.name}: {_spelled(key.default)}", key.comment))
    return "\n".join(lines)


def _line(text: str, comment: str) -> str:
    return f"{text:34}  # {comment}" if comment else text


def _spelled(default: Any) -> str:
    if type(default) is int:
        return f"{default:_}" if abs(default) >= 10_000 else str(default)
    if type(default) is float and 0 < abs(default) < 1e-3:
        digits, _, exponent = f"{default:.1e}".partition("e")
        return f"{digits}e{int(exponent)}"
    return "{}" if isinstance(default, Mapping) and not default else dump(default)


# ---- Help


def help_text(word: str) -> str:
    """Returns base.yml's lines about a key, or about all keys with a word, those that have it in their names first.

    Of another trainer's key it is what to type here. Raises UserError for a word that no key has.
    """
    if word in KEYS:
        return f"{KEYS[word].group}\n{key_lines(KEYS[word])}"
    if hint := hints().migration_hint(word, Plain("...")):
        return hint.sentence
    in_text = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)  # where a word begins: "rate" finds no "generates"
    by_name = [key for key in KEYS.values() if word.lower() in key.name]
    by_text = [key for key in KEYS.values() if key not in by_name and in_text.search(key_lines(key))]
    if by_name or by_text:
        return "\n".join(map(key_lines, by_name + by_text))
    raise UserError(f"there is no key {word}.{hints().meant(word)} --help alone lists all keys.")


def overview(text: str, command: str, groups: tuple[str, ...]) -> str:
    """Returns a command's usage, the lines of its own keys, and the names of all others."""
    in_full, names_only = [], []
    for title, keys in keys_by_group().items():
        if title.startswith(groups):
            in_full += [f"\n{title}", *map(key_lines, keys)]
        else:
            names = textwrap.fill("  ".join(key.name for key in keys), 118)
            names_only.append(f"\n{title}\n{textwrap.indent(names, '  ')}")
    heading = "\nAll other keys" if in_full else "\nKeys, with their defaults in configs/base.yml"
    topic = f"{f'python -m {command} --help WORD':49} what the key of this name does, or all keys with this word"
    return "\n".join([text, topic, *in_full, heading, *names_only])


if __name__ == "__main__":
    print(base_yml(), end="")
