"""The file `report=`: the rows found, and a digest of config and code, so that an interrupted command can continue."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.config.schema import Config
from src.config.yaml import dump
from src.extras.code_digest import code_digest
from src.extras.command_files import write_output
from src.extras.verify.rows import Row

KIND = "report of src.verify"  # name of this kind of file in command_files.py and in messages


def write(path: str, head: Mapping[str, Any], rows: Sequence[Row], unfinished: Sequence[str]) -> None:
    """Writes `head`, the rows and the letters of unfinished checks as JSON; does nothing for an empty path.

    Raises UserError like `write_output`.
    """
    if path:
        listed = [row._asdict() for row in rows]
        for row in listed:
            figure = row["figure"]
            # JSON has no infinity or NaN.
            row["figure"] = figure if figure is None or math.isfinite(figure) else str(figure)
        text = json.dumps({**head, "unfinished": unfinished, "rows": listed}, indent=2, allow_nan=False)
        write_output(KIND, path, f"{text}\n".encode())


def finished(path: str, digest: str) -> dict[str, list[Row]]:
    """Reads the rows of the checks that an interrupted command completed, by the check's letter.

    Empty if there is no such report, the last command that wrote it completed all checks, `digest` is empty, or the
    report has another digest.
    """
    if not digest or not path or not Path(path).is_file() or not Path(path).stat().st_size:
        return {}
    try:
        found, rows = json.loads(Path(path).read_text()), {}
    except ValueError:  # not a report: it is overwritten
        return {}
    if not isinstance(found, dict) or found.get("digest") != digest or not found["unfinished"]:
        return {}
    for values in found["rows"]:
        if values["check"] not in found["unfinished"]:
            figures = {name: values[name] and float(values[name]) for name in ("figure", "bound")}
            rows.setdefault(values["check"], []).append(Row(**values | figures))
    return rows


def digest_of(config: Config, arguments: Any) -> str:
    """Digests a config, the arguments of checks, the code in `src/`, and the versions of Python and all packages.

    Empty if the config names code elsewhere, which may import anything.
    """
    named = (config.step.loss, config.batch.batch_transform)
    if not all(name.startswith("src.") for name in named if name):
        return ""
    return code_digest(sys.version, dump(dict(config)), arguments)
