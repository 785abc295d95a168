"""Keeps the log-probabilities of a run's reference model in the run's folder."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from src.checkpoint.restore import checksum_of, of_process_0
from src.checkpoint.run_folder import RunFolder
from src.errors import UserError
from src.json_text import parse_json

LogProbs = dict[str, list[float]]  # of both answers of a pair, by `src.data.pairs.pair_keys`


def kept_in(folder: RunFolder, facts: Any, compute: Callable[[], LogProbs]) -> LogProbs:
    """Returns what `compute()` gave once, from a file whose name is a digest of `facts`: all that it depends on.

    Raises UserError for a file that is damaged, and as `compute` does.
    """
    name = f"reference-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if (saved := of_process_0(lambda: folder.read_text(name))) is None:
        content = {"log_probs": compute()}
        folder.write_text(name, json.dumps(content | {"checksum": checksum_of(content)}))
        return content["log_probs"]
    try:
        content = parse_json(saved)
        if content.pop("checksum") == checksum_of(content):
            return content["log_probs"]
    except (ValueError, KeyError, AttributeError):
        pass
    raise UserError(f"{folder.path / name} is damaged: restore it, or use another run_name")
