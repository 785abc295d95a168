"""Reads configurations in Python: a file whose `get_config()` returns a ConfigDict, or a ConfigDict itself."""

import importlib.util
import traceback
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from src.config.yaml import dump, parse
from src.system.errors import UserError


def read_python(path: Path) -> dict[str, Any]:
    """Runs a file's `get_config()` and returns the keys of its ConfigDict; raises UserError if that fails."""
    try:
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(get_config := getattr(module, "get_config", None)):
            raise UserError(f"{path} has no function get_config(), which returns an ml_collections.ConfigDict")
        config = get_config()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # including sys.exit
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        raise UserError(f"{path}{f', line {line}' if line else ''} raised {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() in {path} returns an object of type {type(config).__name__}: expected an "
            "ml_collections.ConfigDict"
        )
    return config_dict_keys(config, str(path))


def config_dict_keys(config: ConfigDict, where: str) -> dict[str, Any]:
    """Converts a ConfigDict to keys as `parse_keys` returns them.

    Raises UserError for a value that no key may have, or a required one that is not set.
    """
    keys = {}
    for key in config:
        try:
            keys[key] = parse(dump(config[key]), where)
        except (yaml.YAMLError, RecursionError):
            raise UserError(f"{where}: {key}: its value is not a number, text, list or mapping of these") from None
        except RequiredValueError as error:
            raise UserError(f"{where}: {key}: {error}") from None
    return keys
