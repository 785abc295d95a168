"""The file `report=`: what was found, and of which config and code, so that an interrupted command can continue."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from src.config.schema import Config
from src.config.yaml import dump
from src.extras.command_files import write_output
from src.extras.verify.subject import Row

KIND = "report of src.verify"  # in messages
SOURCES = Path(__file__).parents[2]


def write(path: str, head: Mapping[str, Any], rows: Sequence[Row], unfinished: Sequence[str]) -> None:
    """Writes the rows, and the letters of the checks that are not completed; does nothing for an empty path."""
    if path:
        found = {**head, "unfinished": unfinished, "rows": [row._asdict() for row in rows]}
        # JSON has no number that is not finite.
        text = re.sub(r": (NaN|-?Infinity)", r': "\1"', json.dumps(found, indent=2))
        write_output(KIND, path, f"{text}\n".encode())


def finished(path: str, digest: str) -> dict[str, list[Row]]:
    """Reads the rows of the checks that an interrupted command completed, by the check's letter.

    Empty if the last command with this report came to its end, or had another digest.
    """
    if not digest or not path or not Path(path).is_file() or not Path(path).stat().st_size:
        return {}
    found, rows = json.loads(Path(path).read_text()), {}
    if found.get("digest") != digest or not found["unfinished"]:
        return {}
    for values in found["rows"]:
        if values["check"] not in found["unfinished"]:
            figures = {name: values[name] and float(values[name]) for name in ("figure", "bound")}
            rows.setdefault(values["check"], []).append(Row(**values | figures))
    return rows


def digest_of(config: Config, arguments: Any) -> str:
    """Digests a config, the arguments of checks, the code in `src/` and the version of JAX.

    Empty if the config names code elsewhere, which may import anything.
    """
    named = (config.step.loss, config.batch.batch_transform)
    if not all(name.startswith("src.") for name in named if name):
        return ""
    digest = hashlib.sha256(f"{sys.version} {jax.__version__} {dump(dict(config))} {arguments}".encode())
    for file in sorted(SOURCES.rglob("*.py")):
        digest.update(f"{file.relative_to(SOURCES)} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
