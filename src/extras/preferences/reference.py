"""Saves the reference model's log-probabilities in a run's folder, so that later starts need not compute them again."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

from src.checkpoint.agreement import of_process_0
from src.checkpoint.format import checksum_of
from src.checkpoint.run_folder import RunFolder
from src.system.errors import UserError
from src.system.json_text import parse_json

LogProbs = dict[str, list[float]]  # both answers' log-probabilities in nats, by `pairs.pair_keys`


def saved_reference(folder: RunFolder, facts: Any, compute: Callable[[], LogProbs]) -> LogProbs:
    """Returns the log-probabilities that `compute` gives, which are saved in the run's folder and computed only once.

    Their file is named by a digest of `facts`, a JSON value of everything that they depend on. Raises UserError if the
    file is damaged, and as `of_process_0` and `compute` do.
    """
    name = f"reference-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if (saved := of_process_0(lambda: folder.read_text(name))) is None:
        content = {"log_probs": compute()}
        folder.write_text(name, json.dumps(content | {"checksum": checksum_of(content)}))
        return content["log_probs"]
    with contextlib.suppress(ValueError, KeyError, AttributeError):
        content = parse_json(saved)
        if content.pop("checksum") == checksum_of(content):
            return content["log_probs"]
    raise UserError(f"{folder.path / name} is damaged: restore it, or use another run_name")
