"""MinText: the package `src` in a checkout, `mintext` where pip has installed it (pyproject.toml)."""

import re
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Returns the path of a folder that stands beside `src/` in a checkout, and in the package that pip installs."""
    return inside if (inside := FOLDER / name).is_dir() else FOLDER.parent / name


def as_installed(text: str) -> str:
    """Returns a text for users with commands that work where pip has installed MinText: `-m mintext.train`."""
    if __name__ == "src":
        return text
    text = re.sub(r"bash setup\.sh (?!aot\b)(\w+)", rf'pip install "{__name__}[\1]"', text)
    return text.replace("bash setup.sh aot", "a checkout's `bash setup.sh aot`").replace("-m src.", f"-m {__name__}.")


class _OwnModules:
    """Answers `from src.x import y`, as all the code has it, by the installed package's module x, which is no copy."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.startswith("src.") and find_spec(__name__ + name[3:]) is None:
            raise ModuleNotFoundError(f"no module {name}: with {__name__}, src is a name of its own package", name=name)
        return ModuleSpec(name, self) if name.startswith("src.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(__name__ + spec.name[3:])
        spec.loader_state = module.__spec__  # which importing replaces
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state


if __name__ != "src":
    if "src" in sys.modules:
        raise ImportError(f"{__name__} calls itself src, and that is {sys.modules['src']} here: import it elsewhere")
    sys.modules["src"] = sys.modules[__name__]
    sys.meta_path.insert(0, _OwnModules())
