"""Explains that the path or name of a configuration or model does not exist, and suggests what to type."""

import re
from collections.abc import Iterator
from pathlib import Path

from src.config.model_folders import is_hf_folder
from src.config.run_configs import CONFIG
from src.config.yaml import CONFIGS
from src.system.errors import did_you_mean, first_few


def no_config(path: Path) -> str:
    """Explains that a path is not a configuration: what it is instead, or what to type."""
    if path.parts[:1] == ("hf:",):
        name = str(path).replace("hf:/", "hf://")
        return f"{name} is a model, not a run: type configs/base.yml model_name={name} load_parameters_path={name}"
    if path.is_dir():
        if keys := _model_in(path):
            return f"{path} is a model's folder, not a run's: type configs/base.yml {keys}"
        runs = first_few(runs_in(path))
        return f"{path} is a folder without a config.yml, so it is not a run's." + f" Runs in it: {runs}." * bool(runs)
    if not path.suffix and (runs := first_few(runs_in(path.parent), near=str(path))):
        return f"there is no run {path}.{similar_runs(path)} Runs in {path.parent}: {runs}."
    files = [
        str(file.relative_to(CONFIGS.parent)) for file in sorted(CONFIGS.rglob("*.yml")) if file.parent.name != "chips"
    ]
    beside = sorted(file.name for file in path.parent.glob("*") if file.suffix in (".yml", ".py"))
    hint = did_you_mean(path.name, beside, f"{path.parent}/") or did_you_mean(path.name, files)
    return f"there is no file {path}." + (hint or f" There are {first_few(files, near=str(path))}.")


def _model_in(folder: Path) -> str:
    """Returns the keys to type for a folder that src.convert or Hugging Face wrote; empty if it has no model."""
    if (folder / "model.yml").is_file():
        return f"model_name={folder}/model.yml load_parameters_path={folder}/checkpoint"
    return f"model_name={folder} load_parameters_path={folder}" if is_hf_folder(folder) else ""


def no_model(name: str, path: Path) -> str:
    """Explains that `path`, the file for this `model_name`, does not exist."""
    if keys := _model_in(Path(name).expanduser()):
        return f"model_name={name} is a folder with a model file: type {keys}"
    models = sorted(file.stem for file in (CONFIGS / "models").glob("*.yml"))
    hint = did_you_mean(name, models) or f" There are {first_few(models, near=name)}."
    if re.fullmatch(r"[\w-]+/[\w.-]+", name):
        hint = f" If it is a model on huggingface.co, type hf://{name}."
    return (
        f"model_name={name}: there is no file {path}.{hint} A name ending in .yml is a path, and so is the folder "
        "of a Hugging Face model."
    )


def runs_in(folder: Path) -> Iterator[str]:
    """Yields the paths of the runs in a local folder, newest first."""
    configs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return (str(file.parent) for file in configs)


def similar_runs(path: Path) -> str:
    """Suggests a run in the same folder with a similar name (` Did you mean runs/first?`), or returns ""."""
    return did_you_mean(path.name, [Path(run).name for run in runs_in(path.parent)], f"{path.parent}/")
