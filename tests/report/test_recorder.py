"""What becomes of the arrays that steps return: lines, rates, and the answer to a loss that is not finite."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.checkpoint.run_folder import RunFolder
from src.extras.pages import live
from src.extras.pages.history import History
from src.extras.pages.live import LiveReport
from src.model.flops import FlopsPerToken
from src.run import recorder as recorder_module
from src.run.metrics import MetricsLog, StepPrinter
from src.run.recorder import NonFiniteError, Recorder
from src.system.errors import UserError
from tests.tiny import load

FLOPS = FlopsPerToken(causal=2e9, palm=3e9)
TOKENS = 1000


def mesh_of(device_kind, platform, count=4):
    device = SimpleNamespace(device_kind=device_kind, platform=platform)
    return SimpleNamespace(size=count, devices=np.full(count, device))


def recorder_in(folder, mesh=None, done=0, **overrides):
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", None)
    config = load(**overrides)
    printer = StepPrinter(20, done)
    return Recorder(config.step, config.run.steps, log, printer, FLOPS, mesh or mesh_of("cpu", "cpu"))


def step_metrics(loss, grad_norm=0.5, usable=True):
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    numbers = {"loss": loss, "grad_norm": grad_norm, "tokens": float(TOKENS)}
    return jax.tree.map(jnp.asarray, numbers | {"finite": finite, "usable": usable})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_recorded_when_the_next_is_added_or_at_a_flush(tmp_path):
    recorder = recorder_in(tmp_path)
    recorder.add(1, step_metrics(3.0), TOKENS)
    assert lines(tmp_path) == []
    recorder.add(2, step_metrics(2.0), TOKENS)
    assert [line["step"] for line in lines(tmp_path)] == [1]
    recorder.flush()
    recorder.flush()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 3.0), (2, 2.0)]
    assert recorder.last["step"] == 2
    assert recorder.last["perplexity"] == pytest.approx(math.e**2)


def test_steps_that_are_computed_while_they_are_called_have_their_own_times(tmp_path, monkeypatch):
    """As small ones are on a CPU. The last one is recorded at once, as before an evaluation."""
    now = [100.0]
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    recorder = recorder_in(tmp_path)
    for step, (wait, call) in enumerate([(1, 9), (2, 20), (3, 30)], start=1):
        with recorder.waits_for_data():
            now[0] += wait
        now[0] += call
        recorder.add(step, step_metrics(2.0), TOKENS)
    recorder.flush()
    assert [line["step_time_seconds"] for line in lines(tmp_path)] == [10, 22, 33]
    assert [line["data_wait_seconds"] for line in lines(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "peak"),
    [
        ({"dtype": "bfloat16"}, 989.4e12),
        ({"dtype": "float32", "matmul_precision": "default"}, 494.7e12),  # TensorFloat-32
        ({"dtype": "float32", "matmul_precision": "highest"}, 66.9e12),
    ],
)
def test_rates_are_those_of_the_steps_time_and_the_devices_peak(tmp_path, settings, peak):
    mesh = mesh_of("NVIDIA H100 80GB HBM3", "gpu")
    recorder = recorder_in(tmp_path, mesh, done=2, warmup_steps_fraction=0.5, learning_rate=1.0, **settings)
    recorder.add(3, step_metrics(1.0), TOKENS)
    recorder.flush()
    (line,) = lines(tmp_path)
    per_device = TOKENS / line["step_time_seconds"] / 4
    assert line["tokens_per_second"] == pytest.approx(4 * per_device)
    assert line["tflops_per_device"] == pytest.approx(per_device * 2e9 / 1e12)
    assert line["mfu"] == pytest.approx(per_device * 2e9 / peak)
    assert line["mfu_palm"] == pytest.approx(per_device * 3e9 / peak)
    assert line["learning_rate"] == pytest.approx(3 / 10)  # of the third update in a warm-up of ten


def test_where_the_peak_rate_is_unknown_there_is_no_mfu(tmp_path):
    recorder = recorder_in(tmp_path)
    recorder.add(1, step_metrics(1.0), TOKENS)
    recorder.flush()
    assert not {"mfu", "mfu_palm"} & set(lines(tmp_path)[0])


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, math.nan), (2.0, math.inf)])
def test_stop_names_the_step_that_was_not_finite_and_leaves_it_out(tmp_path, loss, grad_norm):
    recorder = recorder_in(tmp_path, done=5)
    recorder.add(6, step_metrics(2.5), TOKENS)
    recorder.add(7, step_metrics(loss, grad_norm), TOKENS)
    with pytest.raises(UserError, match="step 7: loss") as error:
        recorder.add(8, step_metrics(2.0), TOKENS)
    assert "on_nonfinite=skip" in str(error.value)
    assert [line["step"] for line in lines(tmp_path)] == [6]


def test_skip_says_so_and_goes_on(tmp_path, capsys):
    recorder = recorder_in(tmp_path, done=6, on_nonfinite="skip")
    recorder.add(7, step_metrics(math.nan, math.nan), TOKENS)
    recorder.add(8, step_metrics(2.0), TOKENS)
    recorder.flush()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(7, None), (8, 2.0)]
    out = capsys.readouterr().out
    assert "step 7: the update is skipped" in out
    assert "step 8: the update is skipped" not in out


@pytest.mark.parametrize(("loss", "key"), [(math.nan, "abort_on_nan_loss"), (math.inf, "abort_on_inf_loss")])
def test_a_loss_that_shall_not_abort_is_skipped_and_the_other_kind_stops(tmp_path, capsys, loss, key):
    recorder = recorder_in(tmp_path, **{key: False})
    recorder.add(1, step_metrics(2.0), TOKENS)
    recorder.add(2, step_metrics(loss, math.nan), TOKENS)
    recorder.add(3, step_metrics(math.nan if math.isinf(loss) else math.inf), TOKENS)
    with pytest.raises(NonFiniteError, match="step 3: loss"):
        recorder.flush()
    assert "step 2: the update is skipped" in capsys.readouterr().out
    recorder = recorder_in(tmp_path, **{key: False})
    recorder.add(1, step_metrics(2.0, math.inf), TOKENS)  # a gradient that is not finite is no such loss
    with pytest.raises(NonFiniteError, match="step 1: loss"):
        recorder.flush()


def test_a_spike_is_named_and_is_no_reason_to_stop(tmp_path, capsys):
    recorder = recorder_in(tmp_path)
    recorder.add(1, {**step_metrics(9.0), "spike": jnp.bool_(True), "updates_skipped": jnp.int32(3)}, TOKENS)
    recorder.flush()
    assert "step 1: the update is skipped because of a spike in loss or gradient norm" in capsys.readouterr().out
    assert lines(tmp_path)[0]["updates_skipped"] == 3
    assert (recorder.skipped, recorder.last_finite) == (0, 1)


@pytest.mark.parametrize("good_first", [True, False])
def test_skipping_ends_after_ten_in_a_row(tmp_path, good_first):
    """A finite update in between begins the count anew; so many at the end are an end of their own."""
    recorder = recorder_in(tmp_path, on_nonfinite="skip", steps=100)
    for step in range(1, 10):
        recorder.add(step, step_metrics(math.nan, math.nan), TOKENS)
    recorder.add(10, step_metrics(2.0 if good_first else math.nan), TOKENS)
    for step in range(11, 20):
        if good_first:
            recorder.add(step, step_metrics(math.nan, math.nan), TOKENS)
    if good_first:
        recorder.flush()
        assert (recorder.last_finite, recorder.skipped) == (10, 9)
        recorder.add(20, step_metrics(math.nan), TOKENS)
    with pytest.raises(NonFiniteError, match="the last 10 updates were skipped because none was finite"):
        recorder.flush()


def test_a_run_does_not_end_with_updates_that_were_skipped(tmp_path):
    recorder = recorder_in(tmp_path, on_nonfinite="skip", steps=3)
    for step, loss in ((1, 2.0), (2, math.inf), (3, math.inf)):
        recorder.add(step, step_metrics(loss), TOKENS)
    with pytest.raises(NonFiniteError, match="step 3: the last 2 updates were skipped"):
        recorder.flush()


def test_a_first_loss_that_is_not_finite_is_not_blamed_on_the_learning_rate(tmp_path):
    recorder = recorder_in(tmp_path)
    recorder.add(1, step_metrics(math.nan, math.nan), TOKENS)
    with pytest.raises(NonFiniteError, match="so the learning rate cannot be the cause: check the loss, the data"):
        recorder.flush()
    recorder = recorder_in(tmp_path)
    recorder.add(1, step_metrics(2.0), TOKENS)
    recorder.add(2, step_metrics(math.nan, math.nan), TOKENS)
    with pytest.raises(NonFiniteError, match="Try a smaller learning_rate"):
        recorder.flush()


@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_weights_that_nothing_can_be_computed_with_end_the_run(tmp_path, answer):
    recorder = recorder_in(tmp_path, on_nonfinite=answer)
    recorder.add(1, step_metrics(2.0, usable=False), TOKENS)
    with pytest.raises(NonFiniteError, match="step 1: the update made weights so large"):
        recorder.flush()


def test_processes_without_log_and_printer_see_what_is_not_finite_too():
    config = load()
    recorder = Recorder(config.step, config.run.steps, None, None, FLOPS, mesh_of("cpu", "cpu"))
    recorder.add(1, step_metrics(3.0), TOKENS)
    recorder.add_evaluation(1, {"eval_loss": 1.0, "eval_perplexity": math.e})
    recorder.add(2, step_metrics(math.inf), TOKENS)
    assert recorder.last["loss"] == 3.0
    with pytest.raises(UserError, match="step 2: loss"):
        recorder.flush()


def test_the_page_of_a_run_that_goes_on_is_written_again_only_after_fifty_times_as_long(tmp_path, monkeypatch):
    now, written = [100.0], []
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])

    def page(folder, history):
        written.append(history.last_train.get("step", 0))
        now[0] += 2
        return "page"

    monkeypatch.setattr(live, "page", page)
    report = LiveReport(RunFolder(str(tmp_path), "a"))
    (tmp_path / "a").mkdir()
    metrics = tmp_path / "a" / "metrics.jsonl"

    def step(number, seconds):
        with metrics.open("a") as file:
            file.write(json.dumps({"step": number, "loss": 1.0}) + "\n")
        now[0] = seconds
        report.update()
        report._thread.submit(int).result()  # what was asked for before is done

    for number, seconds in ((1, 100.0), (2, 103.0), (3, 201.0), (4, 202.0), (5, 203.0)):
        step(number, seconds)
    assert written == [1, 4]
    assert report.finish() == str(tmp_path / "a" / "report.html")
    assert written == [1, 4, 5]
    report.close()
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["metrics.jsonl", "report.html"]


def test_internals_are_recorded_at_their_interval_and_a_losss_metrics_by_their_names(tmp_path):
    recorder = recorder_in(tmp_path, log_internals=2)
    norms = {"activation_rms": jnp.ones(3), "weight_norm/segments.0.0.attention.query": jnp.array([1.0, math.nan, 3.0])}
    for step, accuracy in ((1, 0.5), (2, math.nan), (3, 0.5)):  # in the second step nothing counted
        own = {"accuracy": jnp.float32(accuracy)}
        recorder.add(step, {**step_metrics(2.0), "internals": norms, "user_metrics": own}, TOKENS)
    recorder.flush()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 2, 3]
    assert written[2] == {
        "step": 2,
        "activation_rms": [1, 1, 1],
        "weight_norm/segments.0.0.attention.query": [1, None, 3],
    }
    assert [line["accuracy"] for line in written if "loss" in line] == [0.5, None, 0.5]
    history = History()
    history.read(tmp_path / "metrics.jsonl")
    assert history.invalid_lines == 0
    assert history.train["accuracy"].points() == [(1, 0.5), (2, None), (3, 0.5)]
    taken = ("activation_rms", "eval_accuracy", "eval_loss", "grad_norm", "weight_norm/mine")
    recorder.add(4, {**step_metrics(2.0), "user_metrics": dict.fromkeys((*taken, "own"), jnp.float32(0.5))}, TOKENS)
    with pytest.raises(UserError, match=f"metrics cannot be named {', '.join(taken)}: "):
        recorder.flush()
