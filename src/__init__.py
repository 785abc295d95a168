"""MinText: the package `src` in a checkout, `mintext` if pip has installed it (pyproject.toml)."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Returns the path of a folder such as `configs`: beside `src/` in a checkout, inside an installed package."""
    return inside if (inside := FOLDER / name).is_dir() else FOLDER.parent / name


def as_installed(text: str) -> str:
    """Replaces each `-m src.` in `text` by the package's name: `-m mintext.` if pip has installed MinText."""
    return text.replace("-m src.", f"-m {__name__}.")


def installing(extra: str) -> str:
    """Names, for a message, the command that installs the packages of the optional part `extra`, such as `data`."""
    if __name__ == "src":
        return f"bash setup.sh {extra}"
    return "a checkout's `bash setup.sh aot`" if extra == "aot" else f'pip install "{__name__}[{extra}]"'


# Former names of modules, which users' code and the config.yml of older runs may still use -> present names.
MOVED = {
    "errors": "system.errors",
    "command_line": "run.resolve_config",
    "loaded_model": "extras.generation.loaded_model",
    "step.dpo": "extras.preferences.dpo",
    "model.embeddings": "model.rope",
}


class _OtherNames:
    """Imports modules by other names: a former one (`MOVED`), or `src.x` for module x of the installed package."""

    def find_spec(self: Any, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(("src.", f"{__name__}.")):
            return None
        module = _module_named(name)
        if module == name:
            return None
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"no module {name}: {__name__} uses the name src for its own package", name=name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_module_named(spec.name))
        spec.loader_state = module.__spec__  # importing replaces __spec__; `exec_module` restores it
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


class _MissingExtras:
    """Raises MissingExtra for a module of `src/extras/`; it is the last finder, asked if no other found the module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if f"{name}.".startswith(f"{__name__}.extras."):
            from src.system.errors import MissingExtra

            raise MissingExtra(name)


def _module_named(name: str) -> str:
    tail = name.partition(".")[2]
    return f"{__name__}.{MOVED.get(tail, tail)}"


if __name__ == "src":
    sys.meta_path.append(_OtherNames())
else:
    if "src" in sys.modules:
        raise ImportError(f"{__name__} needs the name src, which is {sys.modules['src']} here: import it elsewhere")
    sys.modules["src"] = sys.modules[__name__]
    sys.meta_path.insert(0, _OtherNames())
sys.meta_path.append(_MissingExtras())
