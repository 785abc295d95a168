"""Sends a run's metrics from metrics.jsonl to Weights & Biases and MLflow, in threads that no step waits for."""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Any, BinaryIO, Self

import jax

from src import installing
from src.checkpoint.run_folder import RunFolder, is_remote
from src.config.load import from_yaml
from src.config.schema import KEYS, defaults
from src.config.step_keys import Compilation
from src.data.batch_schedule import size_keys
from src.run.metrics import read_entry, scalars
from src.system.disk import names
from src.system.errors import (
    FAULT,
    INTERRUPTED,
    MISTAKE,
    TRY_AGAIN,
    TransientError,
    UserError,
    changed_keys,
    clipped,
    say,
)

RETRY_SECONDS = 60.0
END_SECONDS = 20  # for all trackers at the run's end; a machine about to be preempted leaves about thirty seconds
MAX_TEXT = 4900  # MLflow's stores accept at least 5000 characters per parameter or tag
MAX_METRICS, MAX_TEXTS = 1000, 100  # MLflow's limits per request, for metrics, and for parameters or tags
RATE = "train/learning_rate"  # in every step, and sent to MLflow as a step's last metric

Steps = Mapping[int, Mapping[str, float]]  # scalars by step, in order
# A tracker's file in the run's folder: the tracked run's `id`, the last `step` it received, `trained_by`, a digest of
# the settings that determine updates (`_trained_by`), and `since`, the step after which they apply.
Saved = Mapping[str, Any]


class Tracking:
    """Makes the trackers in `report_to` follow a run, on process 0.

    Each one reads metrics.jsonl in its own thread: no step waits for a slow or unreachable tracker, and it receives the
    steps that it missed once it is back, or when the run is resumed. At the run's end, all of them together have
    `END_SECONDS`.
    """

    def __init__(self, report_to: tuple[str, ...]) -> None:
        """Raises UserError if a package or MLflow's address is missing."""
        self.stopped_by = 0  # the signal that ended the run early
        self.lacks_evaluation = False  # whether the last step's evaluation is still to come, in the resumed run
        self._names, self._followers = report_to, list[_Follower]()
        for name in report_to:
            spec = find_spec(name)
            # A `wandb` folder of offline runs looks like a package without origin.
            if spec is None or spec.origin is None:
                raise UserError(f"report_to={name} needs a package that is not installed: {installing('trackers')}")
        if "mlflow" in report_to and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise UserError(
                "report_to=mlflow needs the environment variable MLFLOW_TRACKING_URI, such as http://HOST:5000; for a "
                "folder, file:///FOLDER and MLFLOW_ALLOW_FILE_STORE=true"
            )

    def start(self, folder: RunFolder, resume_step: int | None) -> None:
        """Follows the run's metrics.jsonl.

        `resume_step` is the step after which the run resumes, as do its folder's tracked runs; None: a new run.
        """
        for name in dict.fromkeys(self._names):
            self._followers.append({"wandb": _Wandb, "mlflow": _Mlflow}[name](name, folder, resume_step))
            self._followers[-1].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        codes = {UserError: MISTAKE, TransientError: TRY_AGAIN, KeyboardInterrupt: INTERRUPTED}
        code = next((codes[base] for base in codes if isinstance(error, base)), FAULT if error else 0)
        code = code or (128 + self.stopped_by if self.stopped_by else 0)
        for follower in self._followers:
            follower.exit_code, follower.is_whole = code, error is None and not self.lacks_evaluation
            follower.ended.set()
        deadline = time.monotonic() + END_SECONDS
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                follower.has_told = True
                _tell(f"{follower.name} did not receive everything within {END_SECONDS} s; metrics.jsonl has it")


class _Follower(threading.Thread):
    """Sends a run's metrics to a tracker, from one thread. Any error in its package means that it is unreachable.

    A subclass has `_begin(keys) -> Saved`, which starts a tracked run with the config's keys or continues the saved
    one, and returns its `id` and the last `step` it has; `_log(steps)`, which yields the last step sent so far, so that
    no step is lost if it fails; and `_finish(sample)`, with the text generated at the run's end, or "".
    """

    _begin: Any
    _log: Any
    _finish: Any

    def __init__(self, name: str, folder: RunFolder, resume_step: int | None) -> None:
        super().__init__(name=name, daemon=True)
        self._folder, self._file = folder, f"{name}.json"
        self._interval = 10.0 if is_remote(folder.path) else 1.0  # seconds; a small file is written each time
        self._resume_step, self._saved = resume_step, dict[str, Any]()  # `_saved` is empty until it is read
        self._last = 0  # the last step in metrics.jsonl
        self.has_told = False  # whether the tracker's failure was reported
        self.ended, self.exit_code = threading.Event(), 0  # the end of the run, and its exit code
        self.is_whole = False  # whether metrics.jsonl has all lines of the last step

    def run(self) -> None:
        """Follows the run; reports the first failure, and retries periodically, the last time when the run ends."""
        is_last = False
        while not is_last:
            is_last = self.ended.is_set()
            try:
                return self._follow()
            except Exception as error:  # from any package or network
                message = f"{type(error).__name__}: {clipped(' '.join(str(error).split()), 300).rstrip('.')}"
                if not self.has_told:
                    _tell(
                        f"{self.name} failed, and the run continues without it: {message}. metrics.jsonl has "
                        "everything; retrying silently every minute"
                    )
                self.has_told = True
            self.ended.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        keys = from_yaml(self._folder.read_text("config.yml") or "")
        self._saved = self._saved or self._go_on(_trained_by({**defaults(), **keys}))
        self._save({**self._saved, **self._begin(json.loads(json.dumps(keys, default=dict)))})
        with (self._folder.local / "metrics.jsonl").open("rb") as file:
            steps: dict[int, dict[str, float]] = {}
            ended = False
            while not ended:
                ended = self.ended.wait(self._interval)
                if not names(self._folder.local / "metrics.jsonl", file):
                    raise FileNotFoundError("metrics.jsonl was deleted or replaced")  # `run` opens it again
                self._read(file, steps)
                # A step is complete once another has begun. The last one before an error may lack its evaluation, which
                # the resumed run computes and then sends.
                last = [] if ended and self.is_whole else list(steps)[-1:]
                if complete := {step: steps.pop(step) for step in list(steps) if step not in last}:
                    try:
                        for step in self._log(complete):
                            self._saved["step"] = step
                    finally:
                        self._save(self._saved)
        # A run without a sample, or one resumed after its end, may find an older sample in the folder.
        sample = (self.exit_code == 0 and keys.get("sample_length") and self._folder.read_text("sample.txt")) or ""
        self._finish(sample if sample.startswith(f"after step {self._last}\n") else "")

    def _go_on(self, trained_by: str) -> dict[str, Any]:
        """Loads the tracked run's saved state, or starts a new one if its steps are now trained differently."""
        saved, start = {"step": 0}, self._resume_step or 0
        if self._resume_step is not None:
            saved |= json.loads(self._folder.read_text(self._file) or "{}")
        if saved.get("trained_by") == trained_by and saved["since"] <= start:
            return saved
        if saved["step"] > start:
            _tell(
                f"{self.name}: its run has steps after {start} with other settings, and keeps them; a new tracked run "
                "gets all steps of this run"
            )
            saved = {"step": 0}
        return {**saved, "trained_by": trained_by, "since": start}

    def _read(self, file: BinaryIO, steps: dict[int, dict[str, float]]) -> None:
        for line in file:
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                return
            if entry := read_entry(line):
                self._last = entry["step"]
                if self._last > self._saved["step"]:
                    steps.setdefault(self._last, {}).update(scalars(entry))

    def _save(self, saved: dict[str, Any]) -> None:
        self._folder.write_text(self._file, json.dumps(saved))
        self._saved = saved


def _trained_by(keys: Mapping[str, Any]) -> str:
    """Digests the settings that determine an update; others, such as the mesh, only change its rounding."""
    schedule = keys["learning_rate_schedule_steps"]
    sizes = size_keys(keys["enable_rampup_batch_size"])
    rows = {key: keys[key] * keys["gradient_accumulation_steps"] * jax.device_count() for key in sizes}
    declared = [KEYS[name] for name in changed_keys(defaults(), keys) if name in KEYS]
    trains = [key for key in declared if key.section in ("model", "step", "batch", "data")]
    settings = {key.name: keys[key.name] for key in trains if key.group != Compilation.__doc__} | {
        **rows,
        "gradient_accumulation_steps": 1,
        "learning_rate_schedule_steps": keys["steps"] if schedule == -1 else schedule,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=dict).encode()).hexdigest()


class _Wandb(_Follower):
    """Sends metrics to Weights & Biases; its environment variables set the project, entity and mode."""

    _run: Any = None

    def _begin(self, keys: Mapping[str, Any]) -> Saved:
        import wandb

        if self._run:  # of a failed try: its id is in use until it is finished
            try:
                self._run.finish()
            except Exception:
                # W&B's own process is gone. `teardown` makes it start another one, and raises the same error again.
                with contextlib.suppress(Exception):
                    wandb.teardown()
        # Silent: without an API key it would ask for one on the terminal, in the middle of a run. Both timeouts also
        # delay the process's end.
        limits = {"init_timeout": END_SECONDS, "finish_timeout": END_SECONDS - 5}
        settings = wandb.Settings(console="off", silent=True, **limits)
        wandb.setup(settings=settings)
        path, saved = self._folder.path, self._saved
        self._run = wandb.init(
            id=saved.get("id"),
            resume="allow" if "id" in saved else None,
            name=None if "id" in saved else os.environ.get("WANDB_NAME") or self._folder.name,
            dir=None if is_remote(path) or os.environ.get("WANDB_DIR") else str(path),
            config=dict(keys),
            allow_val_change=True,  # a resumed run may have other values
            reinit="create_new",
            settings=settings,
        )
        _tell(f"wandb: {f'offline, in {self._run.dir}' if self._run.offline else self._run.url}")
        return {"id": self._run.id, "step": max(saved["step"], self._run.starting_step - 1)}

    def _log(self, steps: Steps) -> Iterator[int]:
        for step, values in steps.items():
            self._run.log(dict(values), step=step)
            yield step

    def _finish(self, sample: str) -> None:
        if sample:
            self._run.summary["sample"] = sample
        self._run.finish(exit_code=self.exit_code)


class _Mlflow(_Follower):
    """Sends metrics to MLflow; its environment variables set the server and the experiment."""

    def _begin(self, keys: Mapping[str, Any]) -> Saved:
        # By default MLflow retries 7 times, which takes minutes; this thread retries itself.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow
        from mlflow.entities import Param, RunTag

        known = {"run_id": self._saved["id"]} if "id" in self._saved else {"run_name": self._folder.name}
        run = mlflow.active_run() or mlflow.start_run(**known)
        self._id, self._client = run.info.run_id, mlflow.MlflowClient()
        texts = {key: value if value and isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
        texts = {key: clipped(text, MAX_TEXT) for key, text in texts.items()}
        sent = self._client.get_run(self._id).data
        params = [Param(key, text) for key, text in texts.items() if key not in sent.params]
        # A parameter can't change, but a resumed run may change its number of steps, and change it back: use tags for
        # these.
        now = {**texts, **sent.params, **sent.tags}
        tags = [RunTag(key, text) for key, text in texts.items() if now[key] != text]
        for begin in range(0, max(len(params), len(tags)), MAX_TEXTS):
            part = slice(begin, begin + MAX_TEXTS)
            self._client.log_batch(self._id, params=params[part], tags=tags[part])
        _tell(f"mlflow: run {self._id} of experiment {run.info.experiment_id} at {mlflow.get_tracking_uri()}")
        self._last_steps = {metric.key: metric.step for metric in sent.to_proto().metrics}
        return {"id": self._id, "step": self._last_steps.get(RATE, 0)}

    def _log(self, steps: Steps) -> Iterator[int]:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        ordered = [(key, step) for step, values in steps.items() for key in sorted(values, key=RATE.__eq__)]
        # With other characters in a name, MLflow rejects the whole batch.
        named = [(re.sub(r"[^\w./ :-]", "_", key), steps[step][key], step) for key, step in ordered]
        # A failed request, or a kill, may have left a part of a step on the server.
        new = [Metric(key, value, now, step) for key, value, step in named if step > self._last_steps.get(key, 0)]
        for begin in range(0, len(new), MAX_METRICS):
            self._client.log_batch(self._id, metrics=new[begin : begin + MAX_METRICS])
        yield max(steps)

    def _finish(self, sample: str) -> None:
        import mlflow

        if sample:
            self._client.set_tag(self._id, "sample", clipped(sample, MAX_TEXT))
        mlflow.end_run("KILLED" if self.exit_code >= 128 else "FAILED" if self.exit_code else "FINISHED")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the main thread reports a closed output
        say([line])
