"""Runs tasks of EleutherAI's lm-evaluation-harness, which `bash setup.sh eval` installs, on a model's `Answers`."""

import contextlib
import hashlib
import json
import random
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from src.config.command_keys import HarnessTasks
from src.extras.evaluation.answers import Answers
from src.system.errors import UserError, did_you_mean, first_few


class _Model(LM):
    def __init__(self, answers: Answers, model_info: Mapping[str, Any]) -> None:
        super().__init__()
        self._answers, self._model_info = answers, model_info

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._answers.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._answers.rolling_log_likelihoods([text for (text,) in (request.args for request in requests)])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._answers.completions([request.args for request in requests])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._answers.render_chat(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._answers.tokenizer.chat_template or ""

    def get_model_info(self) -> dict[str, Any]:
        return dict(self._model_info)

    @property
    def tokenizer_name(self) -> str:
        fingerprint = json.dumps(self._answers.tokenizer.fingerprint(), sort_keys=True)
        return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


class _Unknown(UserError):
    """Reports a name that matches no task of those listed so far."""


class Tasks(TaskManager):
    """Loads the tasks that the keys name, as `loaded`; raises UserError for an unknown name or a missing folder."""

    def __init__(self, keys: HarnessTasks, include_defaults: bool) -> None:
        folder = Path(keys.include_path).expanduser()
        if keys.include_path and not folder.is_dir():
            raise UserError(f"include_path={keys.include_path}: there is no such folder")
        super().__init__(include_path=str(folder) if keys.include_path else None, include_defaults=include_defaults)
        self.keys = keys
        self.loaded = super().load(self._names())

    def load(self, _: Any) -> Any:  # noqa: D102  # called by `simple_evaluate`, which would load the tasks again
        return self.loaded

    def _names(self) -> list[str]:
        """Expands the names and * patterns that the key lists; an item may also be the path of a .yaml file.

        Raises `_Unknown` for an item that matches no task.
        """
        all_names: list[str] = []
        for name in filter(None, map(str.strip, self.keys.tasks.split(","))):
            is_file = name.endswith((".yaml", ".yml")) and Path(name).is_file()
            names = [name] if is_file else self.match_tasks([name])
            if not names:
                raise _Unknown(
                    f"tasks: {name} is not one of the {len(self.all_tasks):,} tasks that the harness knows."
                    f"{did_you_mean(name, self.all_tasks)} include_path=FOLDER adds the tasks of its .yaml files"
                )
            all_names += [name for name in names if name not in all_names]
        return all_names


def find_tasks(keys: HarnessTasks) -> Tasks:
    """Loads the tasks and their data. Raises UserError if one is unknown, can't be loaded, or is not supported."""
    if keys.include_path:  # listing the harness's own tasks takes ten seconds
        with contextlib.suppress(_Unknown):
            return _loaded(keys, include_defaults=False)
    return _loaded(keys, include_defaults=True)


def _loaded(keys: HarnessTasks, include_defaults: bool) -> Tasks:
    try:
        tasks = Tasks(keys, include_defaults)
    except UserError:
        raise
    except Exception as error:  # a task's code and data come from others and may raise anything
        kind = _Unknown if isinstance(error, KeyError) else UserError
        raise kind(
            f"the harness can't load tasks={keys.tasks}: {type(error).__name__}: {error}. Most tasks fetch their data "
            "from the Hugging Face Hub; one with files on this machine has, in its .yaml, dataset_path: json and "
            "dataset_kwargs: {data_files: FILES}"
        ) from error
    for name, task in tasks.loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(
                f"tasks: {name} runs code that a model writes, or shows it images, which is not supported here: "
                "python -m src.convert to-hf writes a folder for the harness's own --model hf"
            )
    return tasks


def run_tasks(
    tasks: Tasks, use_chat_template: bool, answers: Answers, model_info: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Runs tasks; returns the harness's results, including `model_info`, as JSON values, and lines for the user.

    Raises UserError if `num_fewshot` is more than a task has examples for, and as `answers` does.
    """
    keys, num_fewshot = tasks.keys, tasks.keys.num_fewshot
    try:
        results = simple_evaluate(
            model=_Model(answers, model_info),
            tasks=[*tasks.loaded["tasks"]],
            num_fewshot=None if num_fewshot == -1 else num_fewshot,
            limit=(keys.limit if keys.limit < 1 else int(keys.limit)) or None,
            apply_chat_template=use_chat_template,
            task_manager=tasks,
            log_samples=False,
        )
    except ValueError as error:
        innermost = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if innermost is not random.Random.sample.__code__:  # from which the harness takes its examples
            raise
        raise UserError(f"num_fewshot={num_fewshot} is more than a task has examples for") from error
    lines = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    differing = [f"{task} {count}" for task, count in results["n-shot"].items() if num_fewshot not in (-1, count)]
    if differing:
        lines.append(f"num_fewshot={num_fewshot} does not apply to tasks that set their own: {first_few(differing)}")
    if answers.truncated:
        lines.append(f"{answers.truncated:,} requests do not fit max_target_length: they lost their beginning")
    text = json.dumps(results, default=handle_non_serializable)
    return json.loads(text, parse_constant=lambda _: None), lines
