"""Lists the commands that use a run's model after its last step: to ask it, measure it, and export it."""

import os
import shlex
import sys

import jax

from src.config.schema import KEYS, Data
from src.data.types import Tokenizer
from src.system.errors import from_here


def next_commands(
    folder: os.PathLike[str], tokenizer: Tokenizer | None, data: Data, prompt: str, eval_interval: int, steps: int
) -> list[str]:
    """Lists the commands that work with this run, one per line; none for a run of several processes.

    src.decode needs a tokenizer; src.evaluate, data that were held out; src.convert, a folder on this machine.
    """
    if jax.process_count() > 1:  # the mesh of several hosts may not fit on one
        return []
    run, python = from_here(folder), from_here(sys.executable)
    devices = jax.config.jax_num_cpu_devices  # the virtual devices of the run's mesh
    environment = f"JAX_NUM_CPU_DEVICES={devices} " if devices > 1 else ""
    commands = {}
    if tokenizer:
        chats = data.use_sft and tokenizer.chat_template
        # The default prompt suits only the default data, Python's source: otherwise let the user type one.
        own_data = data.dataset_path or data.datasets or data.dataset_type != "text"
        asks = chats or (own_data and prompt == KEYS["prompt"].default)
        arguments = ["interactive=true"] if asks else [f"prompt={prompt}"]
        commands["ask it"] = ["src.decode", run, *arguments, *["use_chat_template=true"] * bool(chats)]
    if eval_interval > 0:  # otherwise the model was trained on all of the data
        commands["measure it"] = ["src.evaluate", run]
    if "://" not in run:
        commands["export it"] = ["src.convert", "to-hf", run, os.path.join(run, f"hf-{steps}")]
    return [f"{what + ':':12}{environment}{shlex.join([python, '-m', *words])}" for what, words in commands.items()]
