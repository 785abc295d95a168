"""Loads and calls functions that users write and name as module:function; errors name the user's line."""

import ast
import contextlib
import hashlib
import importlib
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
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


def code_digests(name: str, key: str) -> dict[str, str]:
    """Returns a digest of each module of a user's code: the module in `name`, the value of `key`, and all it imports.

    It may import a module at its top, in a function, or through another one. Installed packages, Python's library and
    MinText are left out. Raises UserError as `load_function`.
    """
    load_function(name, key)
    modules, found = [name.partition(":")[0]], dict[str, str]()
    for module in modules:  # more are added meanwhile
        package = module.rpartition(".")[0]
        imported = () if found else (vars(sys.modules[module]).get(fact) for fact in ("__file__", "__loader__"))
        file, loader = imported or _user_file(module)
        if file and module not in found:
            code = loader.get_data(file) if hasattr(loader, "get_data") else Path(file).read_bytes()
            found[module] = hashlib.sha256(code).hexdigest()[:8]
            with contextlib.suppress(SyntaxError, ValueError):  # it is not Python
                modules += _imports(ast.parse(code), module if Path(file).stem == "__init__" else package)
        modules += [package] * bool(package)
    return found


def _imports(code: ast.AST, package: str) -> Iterator[str]:
    """Yields the modules that code in a package may import; what it imports from a module may be one too."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            yield from (".".join(filter(None, (parent, node.module, alias.name))) for alias in node.names)


def _user_file(module: str) -> tuple[str | None, Any]:
    """Finds the file of a module that is neither installed nor a part of Python or MinText, and what reads it."""
    library = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}|.*(site|dist)-packages")
    folders = [each for each in map(str, sys.path) if not library.match(each) and module.partition(".")[0] != "src"]
    parents = module.split(".")[:-1]
    # A .zip on the path has a finder too. Python's own for "" is that of the folder it was made in.
    finders = filter(None, (pkgutil.get_importer(os.path.join(each or os.getcwd(), *parents)) for each in folders))
    specs = filter(None, (finder.find_spec(module) for finder in finders))
    return next(((spec.origin, spec.loader) for spec in specs if (spec.origin or "").endswith(".py")), (None, None))


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
