"""Records the metrics of each step in metrics.jsonl and TensorBoard, and on the console."""

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from typing import NamedTuple, Self

import jax
from jax.sharding import Mesh

from src.config.schema import Step
from src.model.flops import FlopsPerToken
from src.run.metrics import INTERNALS, TRAIN_KEYS, Entry, MetricsLog, StepPrinter, perplexity
from src.step.optimizer import learning_rate
from src.step.state import TrainState
from src.step.train_step import Metrics
from src.system.errors import UserError

MAX_SKIPPED = 10  # consecutive updates: if all of these batches fail, the weights are the cause


class Result(NamedTuple):
    """The outcome of a run. If it had finished before, only process 0 has metrics, read from metrics.jsonl."""

    state: TrainState  # after the last step
    metrics: Mapping[str, float]  # of the last step
    eval_metrics: Mapping[str, float]  # of the last evaluation
    stopped_by: int  # the signal that ended the run early, SIGTERM or SIGINT; 0: none

    @property
    def exit_code(self) -> int:
        """The command's exit code; 143, after SIGTERM, tells schedulers to start the run again."""
        return 128 + self.stopped_by if self.stopped_by else 0


class NonFiniteError(UserError):
    """Ends a run because losses or gradients are not finite, or weights are too large to compute with."""


class Recorder:
    """Records each of a run's `steps` while the next one runs, so that the devices need not wait for the host.

    `log` and `printer` are None except in process 0. `flops` is the cost of a token.
    """

    def __init__(
        self,
        keys: Step,
        steps: int,
        log: MetricsLog | None,
        printer: StepPrinter | None,
        flops: FlopsPerToken,
        mesh: Mesh,
    ) -> None:
        self.last: Entry = {}  # the metrics of the step recorded last
        self.last_finite = 0  # the last step with a finite loss and gradient: the weights before it are good
        self.skipped = 0  # steps recorded since then
        self._empty = 0  # steps of this start without a token that counts in the loss; below 0 once one has counted
        self.recorded = 0  # the last step whose lines are all written
        self._keys, self._steps, self._log, self._printer = keys, steps, log, printer
        self._flops, self._devices = flops, mesh.size
        self._peak: float | None = None  # CPUs have no published peak rate
        if (device := mesh.devices.flat[0]).platform != "cpu":
            from src.parallel.chips import run_peak

            self._peak = run_peak(device.device_kind, keys.dtype, keys.matmul_precision)
        self._pending: tuple[int, Metrics, int, float] | None = None
        self._data_wait = 0.0
        self._ended = 0.0  # when the pending step was found to be computed; 0: not yet
        self._clock = time.perf_counter()

    def __enter__(self) -> Self:
        if self._printer:
            self._printer.__enter__()
        self.start_clock()
        return self

    def __exit__(self, *error: object) -> None:
        if self._log and self._printer:
            self._printer.__exit__(*error)
            with contextlib.suppress(*[OSError] if error[0] else []):  # the first error reports a full disk already
                self._log.close()

    def start_clock(self) -> None:
        """Starts the clock of the next step; earlier time is not counted in any step."""
        self._clock = time.perf_counter()

    @contextlib.contextmanager
    def waits_for_data(self) -> Generator[None]:
        """Measures the body, which takes a batch, as the next step's `data_wait_seconds`."""
        begin = time.perf_counter()
        # On a CPU, a small step may be computed by the time its call returns: its time ends here, not at the next call.
        if self._pending and all(array.is_ready() for array in jax.tree.leaves(self._pending[1])):
            self._ended = begin
        yield
        self._data_wait = time.perf_counter() - begin

    def add(self, step: int, metrics: Metrics, tokens: int) -> None:
        """Queues the metrics of update `step` (from 1), which may still be computing, and records the previous one.

        `tokens`: the batch's size, rows x T. Raises NonFiniteError for the previous update if it is not finite and has
        to stop the run (`on_nonfinite`), if it is skipped as the last of MAX_SKIPPED in a row or of the run, or if it
        made the weights unusable. Raises UserError if no token of the first steps counts in the loss, or if a metric of
        the user's loss has the name of another.
        """
        self.flush()
        self._pending = (step, metrics, tokens, self._data_wait)

    def flush(self) -> None:
        """Waits for the queued step and records it; raises as `add` does."""
        if self._pending is None:
            return
        (step, arrays, tokens, data_wait), self._pending = self._pending, None
        arrays = dict(arrays)
        internals, user_metrics = arrays.pop("internals", {}), jax.device_get(arrays.pop("user_metrics", {}))
        if taken := sorted(
            name for name in user_metrics if name in TRAIN_KEYS or name.startswith(("eval_", *INTERNALS))
        ):
            raise UserError(
                f"loss={self._keys.loss}: metrics cannot be named {', '.join(taken)}: in metrics.jsonl, these names or "
                f"those beginning with eval_, {', '.join(INTERNALS)} mean other figures"
            )
        metrics = {name: value.tolist() for name, value in jax.device_get(arrays).items()}
        now = self._ended or time.perf_counter()
        seconds, self._clock, self._ended = now - self._clock, now, 0.0
        is_empty = metrics["finite"] and math.isnan(metrics["loss"])  # no token of the batch counts in the loss
        self._empty += 1 if is_empty else -self._steps
        if metrics["finite"]:
            self.last_finite, self.skipped = step, 0
        else:
            self.skipped += 1
        self._check(step, metrics)
        rate, flops, peak = tokens / seconds / self._devices, self._flops, self._peak  # rate: tokens/s per device
        mfu = {} if peak is None else {"mfu": rate * flops.causal / peak, "mfu_palm": rate * flops.palm / peak}
        self.last = {
            "step": step,
            "perplexity": perplexity(metrics["loss"]),
            **{name: metrics[name] for name in TRAIN_KEYS if name in metrics},
            "learning_rate": learning_rate(self._keys, self._steps, step - 1),
            "step_time_seconds": seconds,
            "data_wait_seconds": data_wait,
            "tokens_per_second": tokens / seconds,
            "tflops_per_device": rate * flops.causal / 1e12,
            **mfu,  # docs/performance.md explains mfu and mfu_palm
            **{name: value.tolist() for name, value in user_metrics.items()},
        }
        if self._log and self._printer:
            self._log.write(self.last)
            if internals and step % self._keys.log_internals == 0:
                norms = jax.device_get(internals)
                self._log.write({"step": step, **{name: value.tolist() for name, value in norms.items()}})
            self._printer.train(self.last)
            if is_empty:
                self._printer.say(f"step {step}: no update is made because no token of the batch counts in the loss")
            elif self.skipped:
                self._printer.say(f"step {step}: the update is skipped because it is not finite")
            elif metrics.get("spike"):
                self._printer.say(f"step {step}: the update is skipped because of a spike in loss or gradient norm")
        self.recorded = step

    def _check(self, step: int, metrics: Entry) -> None:
        advice, keys, loss = "", self._keys, metrics["loss"]
        # If the loss is finite, and only the gradient is not, this dict has no key True.
        aborts = {math.isnan(loss): keys.abort_on_nan_loss, math.isinf(loss): keys.abort_on_inf_loss}
        if not metrics["usable"]:
            problem = f"step {step}: the update made weights so large that no layer can be computed with them."
        elif self.skipped and keys.on_nonfinite == "stop" and aborts.get(True, True):
            numbers = f"loss {loss:g} and gradient norm {metrics['grad_norm']:g}"
            problem = f"step {step}: {numbers} are not both finite. The update was not made."
            advice = ", or skip such updates with on_nonfinite=skip"
        elif self.skipped == MAX_SKIPPED or (self.skipped and step == self._steps):
            problem = f"step {step}: the last {self.skipped} updates were skipped because none was finite."
        elif self._empty == MAX_SKIPPED or self._empty == step == self._steps:
            raise UserError(
                f"no token of the first {self._empty} steps counts in the loss, so nothing is learned. With use_sft "
                "and long_documents=truncate, a prompt longer than a row leaves no room for its answer: raise "
                "max_target_length, or use split. A batch_transform may set loss_mask to 0. src.inspect_data shows the "
                "rows."
            )
        else:
            return
        if self.skipped == step:
            raise NonFiniteError(
                f"{problem} No update was made before, so the learning rate cannot be the cause: check the loss, the "
                "data, and the initial weights."
            )
        raise NonFiniteError(f"{problem} Try a smaller learning_rate or gradient_clipping_threshold{advice}.")

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Records an evaluation after update `step`."""
        if self._log and self._printer:
            self._log.write({"step": step, **metrics})
            self._printer.evaluation({"step": step, **metrics})

    def sync(self) -> None:
        """Forces every recorded line to disk."""
        if self._log:
            self._log.flush()
