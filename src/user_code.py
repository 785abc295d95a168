"""Functions that users write and the configuration names as module:function: finding them, and blaming their lines."""

import contextlib
import importlib
import os
import pkgutil
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from src.config.values import nearest
from src.errors import TransientError, UserError
from src.storage_errors import Failure, failure_of

SLOW_SECONDS = 60


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function that `name`, module:function, means; `key` gave it.

    Raises:
        UserError: there is none, or its module can't be imported.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"{key}={name}: expected module:function, such as my_data:documents")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise _failure(f"{key}={name}: importing {module_name}", error) from error
        parent, _, missing = error.name.rpartition(".")
        where = getattr(sys.modules[parent], "__path__", []) if parent else None
        raise UserError(
            f"{key}={name}: there is no module {error.name} in the folder the command is run in, nor installed."
            + nearest(missing, [found.name for found in pkgutil.iter_modules(where)])
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit among them
        raise _failure(f"{key}={name}: importing {module_name}", error) from error
    if not callable(function := getattr(module, attribute, None)):
        functions = [other for other in dir(module) if callable(getattr(module, other))]
        raise UserError(f"{key}={name}: {module_name} has no function {attribute}.{nearest(attribute, functions)}")
    return function


def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that a user wrote. Where it raises, a UserError says so of `what`.

    Of a failure that may pass, as of a store that it reads, a TransientError does. Where the function would end the
    process, as by sys.exit, it is an error too: that is not its to decide.
    """
    try:
        return function(*arguments)
    except (UserError, TransientError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failure(what, error) from error


@contextlib.contextmanager
def says_if_slow(what: str) -> Iterator[None]:
    """Prints one line if what is done within takes longer than a minute: code of a user may never end."""
    timer = threading.Timer(SLOW_SECONDS, print, [f"still waiting for {what}"], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def class_name(thing: Any) -> str:
    """Returns the name of a value's class, with its module."""
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _failure(what: str, error: BaseException) -> Exception:
    """What to say of an error in code of the user: where it was raised there, if it was."""
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith(("<", *libraries))
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    kind = TransientError if failure_of(error) is Failure.TRANSIENT else UserError
    return kind(f"{what} raised {type(error).__name__}: {error}{place}")
