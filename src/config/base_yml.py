"""Writes configs/base.yml from the schema: `python -m src.config.base_yml > configs/base.yml`."""

from collections.abc import Mapping
from typing import Any

from src.config.keys import Key
from src.config.schema import KEYS
from src.config.yaml import dump

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


if __name__ == "__main__":
    print(base_yml(), end="")
