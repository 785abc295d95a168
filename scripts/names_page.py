"""Writes the tables of docs/from_maxtext_and_pax.md, from src/extras/migration_hints.yml.

Run `python scripts/names_page.py` after an edit. The page's other text is kept: a table's rows replace those in it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from src.extras.migration_hints import NOTHING_TO_TYPE, RETIRED_FLAGS, read_table  # noqa: E402

PAGE = ROOT / "docs" / "from_maxtext_and_pax.md"
RULE = "|---|---|"


def typed(words: str) -> str:
    """Formats words to type as code, or says that there is nothing to type."""
    return f"`{words}`" if words else NOTHING_TO_TYPE


def answer(template: str | Mapping[str, str]) -> str:
    """Formats what to type instead of a name, or for each of its values."""
    if isinstance(template, str):
        return typed(template)
    return "; ".join(f"{value}: {typed(words)}" for value, words in template.items())


def tables(program: str, table: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Returns the rows of a section's tables, two cells each, by the line that heads a table."""
    if program == RETIRED_FLAGS:
        return {"| flag | now |": [(f"`{name}`", answer(by_value)) for name, by_value in table.items()]}
    names = [(f"`{name}`", answer(template)) for name, template in table["names"].items()]
    for key, by_value in table.get("values", {}).items():
        for value, hint in by_value.items():
            cell = typed(hint["type"]) if isinstance(hint, Mapping) else hint or NOTHING_TO_TYPE
            names.append((f"`{key}={value}`", cell))
    sizes = [(f"`{names}`", typed(words)) for names, words in table.get("sizes", {}).items()]
    keys = [(", ".join(f"`{key}`" for key in row["keys"]), row["why"]) for row in table["explained"]]
    return {
        f"| {program} | MinText |": names,
        "| Sizes | What they imply |": sizes,
        "| Keys | What MinText does |": keys,
    }


def page(text: str) -> str:
    """Returns the page's text with the rows of its tables replaced by the ones of `tables`."""
    sections, rows, lines = read_table(), {}, []
    in_table = False  # whether the old rows of a table are being left out
    for line in text.splitlines():
        if line.startswith("## "):
            program = line.removeprefix("## ")
            rows = tables(program, sections[program]) if program in sections else {}
        in_table = line in rows or (in_table and line.startswith("|"))
        if line in rows:
            lines += [line, RULE, *(f"| {left} | {right} |" for left, right in rows[line])]
        elif not in_table:
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
