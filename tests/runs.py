"""Whole runs of a tiny model, as a user starts them: in this process (8 devices) or as commands of their own."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import tensorstore as ts

from src import train
from src.checkpoint import resume
from src.checkpoint.resume import new_state
from src.run import run as src_run
from src.step.trace import trace_train_step
from src.system.exit_codes import run_command
from tests import quick_compilation

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs" / "base.yml")

# Set before the first run compiles: later JAX would not look at it.
_CACHE = os.environ["MINTEXT_TEST_PROGRAMS"]  # of conftest.py
jax.config.update("jax_compilation_cache_dir", _CACHE)
# Writing a smaller program takes more time than another worker or process saves, where there is one that needs it.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

GLOBAL_BATCH = 8
TINY = {
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 258,
    "max_target_length": 64,
    "dtype": "float32",
    "remat_policy": "none",
    "learning_rate": 1e-2,
    "jax_cache_dir": _CACHE,
    "run_name": "run",
}


def arguments(devices=8, **keys):
    """A command line of a tiny run whose global batch is 8 rows on any number of devices."""
    keys = {**TINY, "per_device_batch_size": GLOBAL_BATCH / devices, **keys}
    return [BASE, *(f"{key}={value}" for key, value in keys.items())]


def write_corpus(folder, documents=60, seed=0, words=(5, 150)):
    """Text files that a model has something to learn from, a document each; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for n in range(documents):
        text = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(rng.randint(*words)))
        (folder / f"{n:03}.txt").write_text(text)
    return folder


# ---- In this process


_BUILT, _NO_FIELDS = {}, {}


def build_once(config, devices, options, fields=_NO_FIELDS):
    """In place of `run.build`: tracing and compiling a step again takes half of a short run's time."""
    sections = (config.model, config.step, config.batch, config.mesh, config.evaluation.eval_metrics)
    key = repr((sections, devices, dict(options), fields))
    if key not in _BUILT:
        _BUILT[key] = trace_train_step(config, devices, options, fields)
    return _BUILT[key]


_INITIAL = {}


def initialise_once(plan, abstract, weights=_NO_FIELDS):
    """In place of `resume.new_state`: compiling the initial state takes a quarter of a short run's time."""
    if weights:
        return new_state(plan, abstract, weights)
    if id(plan) not in _INITIAL:  # the plan is kept too, so that no other one gets its id
        _INITIAL[id(plan)] = plan, jax.device_get(new_state(plan, abstract))
    # Copies, because steps are given their state's memory.
    return jax.tree.map(lambda x, leaf: jax.device_put(np.array(x), leaf.sharding), _INITIAL[id(plan)][1], abstract)


@contextlib.contextmanager
def built_once():
    """Within it, runs build each step and initial state once in this process."""
    with (
        mock.patch.object(src_run, "trace_train_step", build_once),
        mock.patch.object(resume, "new_state", initialise_once),
    ):
        yield


def main(argv):
    """`train.main`, which builds each step and initial state once in this process."""
    with built_once():
        return train.main(argv)


def run_here(**keys):
    """The run's result."""
    return main(arguments(**keys))


def refusal(monkeypatch, capsys, argv):
    """The one message that a command line is refused with, after what every refused command does was checked."""
    monkeypatch.setattr(sys, "argv", ["src.train", *argv])
    capsys.readouterr()
    code = None
    try:
        run_command(main)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr().err
    assert code == 2, f"the command was not refused; it wrote: {written}"
    assert written.startswith("error: ")
    assert written.count("error: ") == 1
    assert "Traceback" not in written
    return written


# ---- As a command of its own


def start(log, devices=1, root=ROOT, optimised=False, **keys):
    """Starts `python -m src.train` on so many virtual devices; its output goes to the file `log`."""
    command = [sys.executable, "-m", "src.train", *arguments(devices, **keys)]
    return start_command(command, log, devices, root, optimised)


def start_command(command, log, devices=1, root=ROOT, optimised=False):
    """Starts any command from the repository's root, or that of a copy; `optimised`: as XLA compiles for users."""
    # Without what this process was given for the tests, so that they run what users run, but for the compiler's haste.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PJRT_"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if not optimised:
        env |= quick_compilation.ENVIRONMENT
    with open(log, "w") as output:
        return subprocess.Popen(command, cwd=root, env=env, stdout=output, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def ended(*processes):
    """None of the processes outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(process, log, code=0):
    """Waits for a command's end; returns its output."""
    with ended(process):
        process.wait(timeout=300)
    output = Path(log).read_text()
    assert process.returncode == code, output
    return output


def wait_until(condition, process):
    """Returns when the condition holds, or a process ended before it did."""
    while process.poll() is None and not condition():
        time.sleep(0.002)


def last_step(folder):
    """The step of the last whole line of metrics.jsonl, which may be being written; 0 where there is none."""
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return json.loads(whole[-1])["step"] if whole else 0


def free_address():
    """host:port for a coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# ---- What a run left


def lines(folder):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    """(step, loss) of each train line."""
    return [(line["step"], line["loss"]) for line in lines(folder) if "loss" in line]


def evaluations(folder):
    """(step, eval_loss) of each eval line."""
    return [(line["step"], line["eval_loss"]) for line in lines(folder) if "eval_loss" in line]


def steps_saved(folder):
    """Without what was set aside, such as 20.damaged."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def saved_arrays(folder, step):
    """Every array of a checkpoint by its name, read by TensorStore alone."""
    checkpoint = folder / "checkpoints" / str(step)
    names = json.loads((checkpoint / "meta" / "metadata").read_text())["arrays"]

    def read(name):
        kvstore = {"driver": "ocdbt", "base": f"file://{checkpoint}/state/", "path": f"{name}/"}
        return np.asarray(ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result().read().result())

    return {name: read(name) for name in names}


def bits(arrays):
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def contents(folder):
    """Every file below a folder with its bytes; empty where there is no folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
