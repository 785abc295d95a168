"""Loads and calls users' functions, which they name as module:function; errors name the user's line."""

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
    """Imports the function that `name` names as module:function; `key` is the config key with this value, for errors.

    Raises UserError if there is no such module or function, or if the module raises or tries to end the process;
    TransientError if it raises for a reason that may pass.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"{key}={name}: expected module:function, such as my_data:documents")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including sys.exit
        if not (isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")):
            raise _failure(f"{key}={name}: importing {module_name}", error) from error
        raise UserError(
            f"{key}={name}: module {error.name} is neither in the working directory nor installed"
        ) from None
    if not callable(function := getattr(module, attribute, None)):
        functions = [other for other in dir(module) if callable(getattr(module, other))]
        raise UserError(f"{key}={name}: {module_name} has no function {attribute}.{did_you_mean(attribute, functions)}")
    return function


def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function and returns its result; `what` names it in errors.

    Raises UserError if the function raises or tries to end the process, for example by sys.exit; TransientError if it
    raises for a reason that may pass, such as a store that does not answer.
    """
    try:
        return function(*arguments)
    except (UserError, TransientError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failure(what, error) from error


def class_name(thing: Any) -> str:
    """Names a value's class, with its module."""
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
    """Returns the metrics that `what` returned, unchanged; raises UserError if they are not {name: (sum, count)}.

    `taken` are names that other metrics have. If there are any, as for metrics of an evaluation, names must not contain
    `/` either, because it separates a metric's name from the name of an evaluation set.
    """
    if not isinstance(metrics, dict) or not all(
        isinstance(pair, tuple | list) and [np.shape(each) for each in pair] == [(), ()] for pair in metrics.values()
    ):
        raise UserError(f"{what} must return {{name: (sum, count)}}, both scalars: it returned {metrics}")
    if wrong := [name for name in metrics if not isinstance(name, str) or name in taken or (taken and "/" in name)]:
        without = ", without /" if taken else ""
        raise UserError(f"{what} must name its metrics with strings{without}, not {', '.join(map(str, wrong))}")
    return metrics
