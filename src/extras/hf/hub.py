"""Fetches models named hf://ORG/NAME[@REVISION] from the Hugging Face Hub, into huggingface_hub's own cache."""

import contextlib
import errno
import functools
import json
import re
import sys
from pathlib import Path

from src.config.run_configs import HUB
from src.system.errors import TransientError, UserError, clipped

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"  # a folder of weights has one of these
# Files copied unchanged next to converted weights. Besides these, only config.json, the files named above and below,
# and weights are fetched.
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
    "additional_chat_templates/tool_use.jinja",
)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # for src/extras/hf/peft.py
_SMALL = ("config.json", ADAPTER_CONFIG, INDEX, *COMPANIONS)


def pinned(path: str, saved_path: str = "") -> str:
    """Returns `hf://ORG/NAME@COMMIT` for a path on the hub; other paths are returned unchanged.

    A path without a revision is pinned to `saved_path`, the one in a run's folder, if that names the same repository:
    a resumed run uses the commit that it began with. Raises UserError and TransientError as `local_folder` does.
    """
    if not path.startswith(HUB):
        return path
    repository, revision = _parts(path)
    if not revision and saved_path.startswith(f"{HUB}{repository}@"):
        return saved_path
    commit = revision if re.fullmatch("[0-9a-f]{40}", revision) else Path(_fetched(path, False)).name
    return f"{HUB}{repository}@{commit}"


def local_folder(path: str, weights: bool = True) -> str:
    """Returns the local folder of a path on the hub, after fetching its files; other paths are returned unchanged.

    Without `weights`, only the small files are fetched. If several processes on a host need them, the cache's locks let
    only one fetch them. Raises UserError if the name is malformed, there is no such model or revision, it is gated,
    HF_HUB_OFFLINE is set and the cache lacks it, or the cache can't be written; TransientError if the hub does not
    answer.
    """
    return _fetched(path, weights) if path.startswith(HUB) else path


def _parts(path: str) -> tuple[str, str]:
    match = re.fullmatch(rf"{HUB}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", path)
    if not match:
        raise UserError(f"{path}: expected {HUB}ORG/NAME, or {HUB}ORG/NAME@REVISION (branch, tag or commit)")
    return match[1], match[2] or ""


@functools.cache
def _fetched(path: str, weights: bool) -> str:
    folder = _snapshot(path, _SMALL)
    if weights:  # a repository may have them in several formats: fetch only safetensors
        index, names = Path(folder, INDEX), {SINGLE, ADAPTER_WEIGHTS}
        if index.is_file():
            # folder.py reports a damaged index.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                names = set(map(str, json.loads(index.read_bytes())["weight_map"].values()))
        _snapshot(f"{HUB}{_parts(path)[0]}@{Path(folder).name}", (*_SMALL, *sorted(names)))
    return folder


def _snapshot(path: str, names: tuple[str, ...]) -> str:
    import httpx2  # huggingface_hub's HTTP client
    from huggingface_hub import constants, errors, snapshot_download, utils

    repository, revision = _parts(path)
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    hub, token = constants.ENDPOINT, "log in by `hf auth login`, or set HF_TOKEN"
    try:
        return snapshot_download(repository, revision=revision or None, allow_patterns=list(names))
    except errors.HFValidationError as error:
        raise UserError(f"{path} is not a model name: {_short(error)}") from None
    except errors.GatedRepoError:
        raise UserError(f"{path} is gated: accept its terms at {hub}/{repository}, then {token}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{path}: {hub} has no {repository}, or it is private: check the name, or {token}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{path}: {repository} has no branch, tag or commit {revision}") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, httpx2.HTTPError) as error:
        if constants.is_offline_mode():
            where = f"{constants.HF_HUB_CACHE} lacks files of it"
            raise UserError(f"{path}: HF_HUB_OFFLINE is set, and {where}: unset it, or fetch them beforehand") from None
        raise TransientError(f"{path}: {hub} does not answer: {_short(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cache = constants.HF_HUB_CACHE
            raise UserError(f"{path}: no space is left in {cache}: free some, or set HF_HOME to another disk") from None
        raise UserError(f"{path} cannot be fetched into {constants.HF_HUB_CACHE}: {_short(error)}") from None


def _short(error: Exception) -> str:
    return clipped(" ".join(str(error).split()), 300)
