"""Stand-ins for the packages wandb and mlflow, which write down each call; the test of real ones reads those calls."""

import json
import sys

COMMON = """
import json
import os
import threading
import time


LOCK = threading.Lock()


def record(name, /, *args, **kwargs):
    if os.environ.get("HANGS") == name:
        time.sleep(600)
    with LOCK, open(os.environ["CALLS"], "a+") as file:
        file.seek(0)
        tried = sum(json.loads(line)[0] == name for line in file)
        file.write(json.dumps([name, args, kwargs], default=lambda value: value.plain) + "\\n")
    if os.environ.get("FAILS") == name and tried < int(os.environ.get("TIMES", "1000")):
        raise OSError(f"{name} is\\nout of reach")


def calls(name):
    with LOCK, open(os.environ["CALLS"]) as file:
        return [(args, kwargs) for called, args, kwargs in map(json.loads, file) if called == name]


class Plain:
    def __init__(self, *args):
        self.plain = args
"""

WANDB = """
from calls import Plain, calls, record


class Settings(Plain):
    def __init__(self, **kwargs):
        self.plain = kwargs


def setup(**kwargs):
    record("setup", **kwargs)


IN_USE = set()


def init(**kwargs):
    record("init", **kwargs)
    if kwargs["id"] in IN_USE:
        raise RuntimeError(f"run ID {kwargs['id']} is in use")
    return Run(kwargs["id"] or f"id{len(calls('init'))}")


def teardown():
    record("teardown")
    IN_USE.clear()


class Run:
    offline, url, dir, starting_step = False, "https://wandb.test/run", "", 0

    def __init__(self, id):
        self.id, self.summary = id, Summary()
        IN_USE.add(id)

    def log(self, *args, **kwargs):
        record("Run.log", *args, **kwargs)

    def finish(self, **kwargs):
        record("Run.finish", **kwargs)
        IN_USE.discard(self.id)


class Summary:
    def __setitem__(self, key, value):
        record("summary", key, value)
"""

MLFLOW = """
import threading
from types import SimpleNamespace as Names

from calls import calls, record

ACTIVE = threading.local()


def get_tracking_uri():
    return "http://mlflow.test"


def active_run():
    return getattr(ACTIVE, "run", None)


def start_run(**kwargs):
    record("start_run", **kwargs)
    ACTIVE.run = Names(info=Names(run_id=kwargs.get("run_id") or f"id{len(calls('start_run'))}", experiment_id="0"))
    return ACTIVE.run


def end_run(*args):
    record("end_run", *args)
    ACTIVE.run = None


class MlflowClient:
    def log_batch(self, *args, **kwargs):
        record("MlflowClient.log_batch", *args, **kwargs)

    def set_tag(self, *args):
        record("MlflowClient.set_tag", *args)

    def get_run(self, *args):
        record("MlflowClient.get_run", *args)
        batches = [kwargs for of, kwargs in calls("MlflowClient.log_batch") if of == list(args)]
        kinds = {kind: dict(each for batch in batches for each in batch.get(kind, ())) for kind in ("params", "tags")}
        steps = {name: step for batch in batches for name, value, time, step in batch.get("metrics", ())}
        metrics = [Names(key=name, step=step) for name, step in steps.items()]
        return Names(data=Names(**kinds, to_proto=lambda: Names(metrics=metrics)))
"""

ENTITIES = """
from calls import Plain


class Param(Plain): ...


class RunTag(Plain): ...


class Metric(Plain): ...
"""


def install(folder, monkeypatch):
    """Puts the stand-ins before any installed package; returns the file that gets their calls."""
    packages = folder / "packages"
    files = {
        "calls.py": COMMON,
        "wandb/__init__.py": WANDB,
        "mlflow/__init__.py": MLFLOW,
        "mlflow/entities.py": ENTITIES,
    }
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    monkeypatch.syspath_prepend(packages)
    for name in ("calls", "wandb", "mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, None)  # so that the stand-in is forgotten after the test
        del sys.modules[name]
    (folder / "calls").touch()
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.test")
    for name in ("WANDB_NAME", "WANDB_DIR", "FAILS", "HANGS", "TIMES"):
        monkeypatch.delenv(name, raising=False)
    return folder / "calls"


def calls_of(file, name):
    """The (args, kwargs) of each call of a function, in order."""
    return [(args, kwargs) for called, args, kwargs in map(json.loads, file.read_text().splitlines()) if called == name]


def sent(file, run="id1"):
    """By tracker, the steps in the order in which they came, each with its scalars; MLflow's of one run.

    A call that raised is among them too.
    """
    to_mlflow = {}
    for (run_id,), kwargs in calls_of(file, "MlflowClient.log_batch"):
        for name, value, _, step in kwargs.get("metrics", ()) if run_id == run else ():
            assert name not in to_mlflow.setdefault(step, {}), f"{name} of step {step} came twice"
            to_mlflow[step][name] = value
    to_wandb = [(kwargs["step"], args[0]) for args, kwargs in calls_of(file, "Run.log")]
    return {"wandb": to_wandb, "mlflow": list(to_mlflow.items())}
