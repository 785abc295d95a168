"""The processes of a job: how they find each other, and that each was started with the same configuration."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from src.config_yaml import base, dump
from src.errors import UserError, first_few

# What may differ from process to process: which one it is, and where a host has what all have. That training data and
# tokenizer are the same, their fingerprint tells (src/data/global_arrays.py).
OF_ONE_PROCESS = ("process_id", "coordinator_address", "jax_cache_dir", "dataset_path", "datasets", "tokenizer_path")


def start_distributed(config: Mapping[str, Any]) -> None:
    """Joins the processes of a job; where there is no cluster, the job is this process.

    JAX finds TPU pods, SLURM, Open MPI and, where the package `kubernetes` is installed, Kubernetes by itself;
    `coordinator_address`, `num_processes` and `process_id` serve anything else.
    """
    if jax.distributed.is_initialized():
        return
    if address := config["coordinator_address"]:
        print(f"waiting for {config['num_processes']} processes at {address}", flush=True)
        jax.distributed.initialize(address, config["num_processes"], config["process_id"])
        return
    try:
        jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        # JAX has no call that asks whether there is a cluster. These are its answers that it found none, and that this
        # process (a notebook's, on its second run) has computed with JAX already and so can't join one any more.
        if not any(
            answer in str(error) for answer in ("coordinator_address should be defined", "before any JAX calls")
        ):
            raise


def check_same_config(config: Mapping[str, Any]) -> None:
    """Raises UserError on every process where one was started with another value of a key than process 0."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    texts = {key: dump(config[key]) for key in base().defaults if key not in OF_ONE_PROCESS}
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts.values()]
    everyones = _gather(np.frombuffer(b"".join(digests), np.uint32).reshape(len(texts), 2))
    differ = (everyones != everyones[0]).any(axis=(0, 2))
    if not differ.any():
        return
    differing = {key: text for (key, text), differs in zip(texts.items(), differ, strict=True) if differs}
    written = json.dumps(differing).encode()
    longest = int(_gather(np.array([len(written)])).max())
    values = [json.loads(row.tobytes()) for row in _gather(np.frombuffer(written.ljust(longest), np.uint8))]
    lines = [f"  {key}: {_by_process([value[key] for value in values])}" for key in differing]
    raise UserError(
        "the processes of this job were started with different configurations: give all of them the same command, but "
        f"for {', '.join(OF_ONE_PROCESS)}\n" + "\n".join(lines)
    )


def _gather(x: np.ndarray) -> np.ndarray:
    """[processes, ...]: the arrays of all processes, of one shape."""
    return np.asarray(multihost_utils.process_allgather(x))


def _by_process(values: list[str]) -> str:
    """Which processes have which value, such as `0.01 in process 0; 0.02 in process 1, 2, 3, 4, 5 and 3 more`."""
    said = []
    for value in dict.fromkeys(values):
        numbers = [str(process) for process, other in enumerate(values) if other == value]
        said.append(f"{value} in process {first_few(numbers)}")
    return "; ".join(said)
