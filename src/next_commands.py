"""Lists commands that use a finished run's model, ready to be pasted."""

import contextlib
import os
import shlex
import sys

import jax

from src.config.command_keys import Decoding
from src.config.schema import Data, Evaluation, Model
from src.data.types import Tokenizer
from src.errors import UserError


def next_commands(
    folder: os.PathLike[str],
    tokenizer: Tokenizer | None,
    model: Model,
    data: Data,
    decoding: Decoding,
    evaluation: Evaluation,
    max_target_length: int,
) -> list[str]:
    """Returns a line for each command that would work with a run: to ask the model, to measure it, to export it."""
    if jax.process_count() > 1:  # a mesh of several hosts may not fit one
        return []
    run, python = _from_here(folder), _from_here(sys.executable)
    devices = jax.config.jax_num_cpu_devices  # virtual devices, which the run's mesh consists of
    environment = f"JAX_NUM_CPU_DEVICES={devices} " if devices > 1 else ""
    commands = {}
    if tokenizer:
        chats = data.use_sft and tokenizer.chat_template
        arguments = ["interactive=true", "use_chat_template=true"] if chats else [f"prompt={decoding.prompt}"]
        commands["ask it"] = ["src.decode", run, *arguments]
    if evaluation.eval_interval > 0:  # otherwise nothing was held out, and the model was trained on all of the data
        commands["measure it"] = ["src.evaluate", run]
    if "://" not in run:
        from src.hf.model_keys import find_family  # imports every family

        with contextlib.suppress(UserError):  # of none
            find_family(model, max_target_length)
            commands["export it"] = ["src.convert", "to-hf", run, os.path.join(run, "hf")]
    return [f"{what + ':':12}{environment}{shlex.join([python, '-m', *words])}" for what, words in commands.items()]


def _from_here(path: str | os.PathLike[str]) -> str:
    """Returns the path relative to the working directory, if it is below it."""
    path = os.fspath(path)
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
