"""Checks that all processes of a run build the same training step."""

import hashlib
import re
from base64 import b64decode
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from src.step.optimizer import hparams_at
from src.step.trace import TracedTrainStep
from src.system.errors import UserError


def check_same_program(traced: TracedTrainStep, steps: int) -> None:
    """Raises UserError on every process if any would train differently from process 0 in a run of `steps` steps."""
    if jax.process_count() == 1:
        return
    # A step's run-time inputs must not differ either: compare the hyper-parameters at both ends and in the middle.
    hparams = str([hparams_at(traced.plan.step, steps, step) for step in (0, 1, steps // 2, steps - 1)])
    texts = {"the traced step": program_text(traced.jax_traced), "its hyper-parameters": hparams}
    mine = np.array([list(hashlib.sha256(text.encode()).digest()) for text in texts.values()], np.uint8)
    everyones = np.asarray(multihost_utils.process_allgather(mine))  # [processes, texts, bytes]
    differ = (everyones != everyones[0]).any(axis=2)
    if differ.any():
        processes = ", ".join(map(str, np.flatnonzero(differ.any(axis=1))))
        what = " and ".join(text for text, differs in zip(texts, differ.any(axis=0), strict=True) if differs)
        raise UserError(
            f"process {processes} would train differently from process 0: {what} differ. Keys, code and packages are "
            "the same, so look at the environment of the processes (XLA_FLAGS, JAX_*), at other packages, and at your "
            "own functions"
        )


def program_text(traced: jax.stages.Traced, kernel_text: Callable[[bytes], str] = lambda bytecode: "") -> str:
    """Writes the traced step as a string that is equal for equal steps: in any process, for present or absent devices.

    It combines StableHLO and the jaxpr, because neither is complete. StableHLO has shardings, donation and constants,
    but only a Python object's address for kernels that XLA asks Python to partition; the jaxpr has their settings. A
    Pallas kernel's serialised form names its source files, so `kernel_text` writes it instead; by default it is left
    out.
    """
    lowered = traced.lower().as_text()
    lowered = re.sub(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d+"', r"\1", lowered)
    lowered = re.sub(r", \\22debug_locations\\22: \\22[A-Za-z0-9+/=]+\\22", "", lowered)  # a kernel's, from JAX 0.12 on
    lowered = re.sub(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+", lambda body: kernel_text(b64decode(body[0])), lowered)
    lowered = re.sub(r'(?<=, ir = ")ML(?:[^"\\]|\\.)*', lambda body: kernel_text(_unescaped(body[0])), lowered)
    # Python prints the names that a remat policy saves in a different order in each process.
    jaxpr = re.sub(r"frozenset\(\{(.*?)\}\)", lambda match: ", ".join(sorted(match[1].split(", "))), str(traced.jaxpr))
    # Only for devices that are present, JAX prints the kind of memory even if it is the default one.
    jaxpr = jaxpr.replace(", memory_kind=device)", ")")
    return re.sub(r" at 0x[0-9a-f]+", "", jaxpr) + lowered


def _unescaped(text: str) -> bytes:
    whole = re.sub(r"\\(\\|[0-9A-F]{2})", lambda match: "\\" if match[1] == "\\" else chr(int(match[1], 16)), text)
    return whole.encode("latin1")
