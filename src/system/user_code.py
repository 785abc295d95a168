"""Loads and calls functions that users write and name as module:function; errors name the user's line."""

import importlib
import os
import sysconfig
import traceback
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from src.system.errors import TransientError, UserError, did_you_mean
from src.system.storage_errors import Failure, failure_of


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Imports the function `name`, module:function, the value of `key`; raises UserError if that is not possible."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"{key}={name}: expected module:function, such as my_data:documents")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit among them
        if not (isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")):
            raise _failure(f"{key}={name}: importing {module_name}", error) from error
        raise UserError(
            f"{key}={name}: there is no module {error.name} in the folder the command is run in, nor installed"
        ) from None
    if not callable(function := getattr(module, attribute, None)):
        functions = [other for other in dir(module) if callable(getattr(module, other))]
        raise UserError(f"{key}={name}: {module_name} has no function {attribute}.{did_you_mean(attribute, functions)}")
    return function


def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function and returns its result; `what` names it in errors.

    Raises UserError: the function raised, or tried to end the process, as by sys.exit. Raises TransientError: it raised
    because of something that may pass, such as a store that does not answer.
    """
    try:
        return function(*arguments)
    except (UserError, TransientError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failure(what, error) from error


def class_name(thing: Any) -> str:
    """Returns the name of a value's class, with its module."""
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _failure(what: str, error: BaseException) -> Exception:
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith(("<", *libraries))
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    kind = TransientError if failure_of(error) is Failure.TRANSIENT else UserError
    return kind(f"{what} raised {type(error).__name__}: {error}{place}")


def check_metrics(what: str, metrics: Any, taken: Collection[str] = ()) -> Any:
    """Returns metrics that `what` returned; raises UserError for what is no {name: (sum, count)}.

    An evaluation's, which cannot have the names `taken`, have no / in theirs: it comes before the name of a set.
    """
    if not isinstance(metrics, dict) or not all(
        isinstance(pair, tuple | list) and [np.shape(each) for each in pair] == [(), ()] for pair in metrics.values()
    ):
        raise UserError(f"{what} must return {{name: (sum, count)}}, scalars both: it returned {metrics}")
    if wrong := [name for name in metrics if not isinstance(name, str) or name in taken or (taken and "/" in name)]:
        without = ", without /" if taken else ""
        raise UserError(f"{what} must name its metrics by texts{without}, otherwise than {', '.join(map(str, wrong))}")
    return metrics
