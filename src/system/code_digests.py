"""Computes digests of users' functions, named module:function, so that a run notices changes in their code."""

import ast
import contextlib
import hashlib
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.system.user_code import load_function

_LIBRARY = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}|.*(site|dist)-packages")


def code_digests(name: str, key: str) -> dict[str, str]:
    """Computes digests of a user's code: of the module that `name` (module:function) names, and of its imports.

    Returns eight hex digits of each module's SHA-256, by the module's name. Imports count at the top of a module, in
    functions, and through other modules, with the packages that contain them; imported modules of installed packages,
    Python's library and MinText are left out. `key` is the config key with the value `name`, for errors. Raises as
    `load_function` does.
    """
    load_function(name, key)
    modules, seen, found = [name.partition(":")[0]], set[str](), dict[str, str]()
    for module in modules:  # the loop appends to it
        if module in seen:
            continue
        seen.add(module)
        package = module.rpartition(".")[0]
        imported = () if found else (vars(sys.modules[module]).get(fact) for fact in ("__file__", "__loader__"))
        file, loader = imported or _user_file(module)
        if file:
            code = loader.get_data(file) if hasattr(loader, "get_data") else Path(file).read_bytes()
            found[module] = hashlib.sha256(code).hexdigest()[:8]
            with contextlib.suppress(SyntaxError, ValueError):  # the file is not Python source
                modules += _imports(ast.parse(code), module if Path(file).stem == "__init__" else package)
        modules += [package] * bool(package)
    return found


def _imports(code: ast.AST, package: str) -> Iterator[str]:
    """Yields the modules that code in a package may import; a name imported from a module may be a module itself."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            yield from (".".join(filter(None, (parent, node.module, alias.name))) for alias in node.names)


def _user_file(module: str) -> tuple[str | None, Any]:
    """Finds a module's file and loader; (None, None) if it is installed, part of Python or MinText, or missing."""
    folders = [each for each in map(str, sys.path) if not _LIBRARY.match(each) and module.partition(".")[0] != "src"]
    parents = module.split(".")[:-1]
    # `pkgutil` has finders for .zip files too. It caches them, so that the one for "" would look in the folder that was
    # the working directory when it was created.
    finders = filter(None, (pkgutil.get_importer(os.path.join(each or os.getcwd(), *parents)) for each in folders))
    specs = filter(None, (finder.find_spec(module) for finder in finders))
    return next(((spec.origin, spec.loader) for spec in specs if (spec.origin or "").endswith(".py")), (None, None))
