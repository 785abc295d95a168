import io
import json
import math
import shutil
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from src.run import metrics
from src.run.metrics import EVAL_KEYS, TRAIN_KEYS, MetricsLog, StepPrinter, duration, eval_line, perplexity, train_line


def train_entry(step, loss=2.0):
    return {
        "step": step,
        "loss": loss,
        "perplexity": perplexity(loss),
        "grad_norm": 0.5,
        "learning_rate": 3e-4,
        "step_time_seconds": 0.25,
        "data_wait_seconds": 0.001,
        "tokens_per_second": 4096.0,
        "tflops_per_device": 0.1,
    }


def eval_entry(step):
    return {"step": step, "eval_loss": 2.5, "eval_perplexity": math.exp(2.5)}


def write_steps(folder, steps, resume_step=None, eval_every=2):
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", resume_step)
    for step in steps:
        log.write(train_entry(step, loss=10 / step))
        if step % eval_every == 0:
            log.write(eval_entry(step))
    log.close()


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensorboard_events(folder):
    """Events in the order written: TFRecord is length (8 bytes), its CRC (4), data, its CRC (4)."""
    events = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_the_page_of_metrics_has_every_field():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [key for key in TRAIN_KEYS + EVAL_KEYS if f"`{key}`" not in page] == []


def test_a_line_a_step_with_keys_in_order_whatever_order_they_came_in(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    experts = {
        "load_balance_loss": 1.0,
        "router_z_loss": 0.5,
        "expert_load_max": [1.5, 2.0],
        "tokens_dropped": [0, 0.1],
        "updates_skipped": 1,
    }
    entry = {
        **train_entry(1),
        "mfu_palm": 0.5,
        "mfu": 0.4,
        "mtp_loss": 3.0,
        "conversations_cut": 2,
        "updates_skipped": 1,
        **experts,
    }
    log.write(dict(reversed(entry.items())))
    log.write({"eval_own": 3.0, "eval_perplexity": 2.0, "eval_loss": 1.0, "step": 1})
    log.close()
    train, evaluation = read_lines(tmp_path)
    assert tuple(train) == TRAIN_KEYS
    assert tuple(evaluation) == ("step", *EVAL_KEYS, "eval_own")
    assert train == entry


def test_each_line_is_on_file_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    for step in (1, 2, 3):
        log.write(train_entry(step))
        assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, step + 1))
    log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(tmp_path, bad):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    log.write(train_entry(1, loss=bad))
    log.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    assert line["learning_rate"] == 3e-4


@given(loss=st.floats(allow_nan=False, allow_infinity=False))
def test_losses_are_read_back_to_the_last_bit(tmp_path_factory, loss):
    folder = tmp_path_factory.mktemp("run")
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", None)
    log.write({"step": 1, "loss": loss})
    log.close()
    assert read_lines(folder)[0]["loss"] == loss


@pytest.mark.parametrize("restored", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo', "{", '{"step": 6, "loss": 1.0}'])
def test_resuming_leaves_the_lines_of_an_uninterrupted_run(tmp_path, restored, torn):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write_steps(whole, range(1, 9))
    write_steps(resumed, range(1, 6))
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write_steps(resumed, range(restored + 1, 9), resume_step=restored)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_resuming_reads_no_more_than_what_it_cuts_off(tmp_path, monkeypatch):
    write_steps(tmp_path, range(1, 1001))
    read, spy = [], metrics.read_entry
    monkeypatch.setattr(metrics, "read_entry", lambda line: read.append(line) or spy(line))
    write_steps(tmp_path, [996], resume_step=995)
    assert [line["step"] for line in read_lines(tmp_path)][-3:] == [995, 996, 996]
    assert len(read) < 20


@pytest.mark.parametrize("line", ["[1]", '{"step": "4"}', '{"loss": 2}', "3", "x", "[" * 100_000, "\0\0", ""])
def test_resuming_drops_lines_that_are_no_metrics_with_a_word(tmp_path, capsys, line):
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n{json.dumps(train_entry(4))}\n{line}\n{{")
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 3)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    said = capsys.readouterr().out
    assert said == "metrics.jsonl: removed 2 lines without a step's metrics from its end\n"


def test_a_torn_last_line_is_nothing_to_speak_of(tmp_path, capsys):
    write_steps(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 2)
    log.close()
    assert not capsys.readouterr().out


def test_resuming_without_a_file_starts_one(tmp_path):
    write_steps(tmp_path, [5], resume_step=4)
    assert [line["step"] for line in read_lines(tmp_path)] == [5]


def test_a_fresh_run_drops_the_lines_of_one_that_died_before_its_first_checkpoint(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    write_steps(tmp_path, [1])
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


@pytest.mark.parametrize("resume_step", [None, 2])
def test_a_file_that_was_deleted_is_written_again_whole(tmp_path, resume_step, capsys):
    folder = tmp_path / "run"
    write_steps(folder, [1, 2])
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", resume_step)
    first = 1 if resume_step is None else 3
    log.write(train_entry(first))
    shutil.rmtree(folder)
    log.write(train_entry(first + 1))
    log.write(train_entry(first + 2))
    log.close()
    assert sorted({line["step"] for line in read_lines(folder)}) == list(range(1, first + 3))
    assert capsys.readouterr().out == f"step {first + 1}: {folder / 'metrics.jsonl'} was deleted: it is written again\n"


def test_a_file_that_was_replaced_is_kept_and_gets_the_lines_that_follow(tmp_path, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    for step in (1, 2):
        log.write(train_entry(step))
    (tmp_path / "other").write_text('{"step": 1}\n')
    (tmp_path / "other").rename(tmp_path / "metrics.jsonl")
    log.write(train_entry(3))
    log.close()
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 3]
    assert "step 3: " in (said := capsys.readouterr().out)
    assert "metrics.jsonl was replaced: further lines are added to the new file" in said


def test_tensorboard_has_the_same_numbers_by_the_same_names(tmp_path):
    write_steps(tmp_path, [1, 2])
    values = {
        (value.tag, event.step): value.simple_value
        for event in tensorboard_events(tmp_path)
        for value in event.summary.value
    }
    assert {tag for tag, _ in values} == {
        *(f"train/{key}" for key in train_entry(1) if key != "step"),
        "eval/loss",
        "eval/perplexity",
    }
    assert values["train/loss", 1] == 10
    assert values["eval/loss", 2] == 2.5


def test_a_disk_that_is_full_is_an_error_and_nothing_waits_for_it(tmp_path):
    """/dev/full takes what is buffered and fails when that is written."""
    (tmp_path / "tensorboard").mkdir()
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    log._tensorboard._py_recordio_writer._writer.close()
    log._tensorboard._py_recordio_writer._writer = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        for step in range(1, 1000):
            log.write(train_entry(step))
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_tensorboard_purges_the_steps_that_a_resumed_run_does_again(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    write_steps(tmp_path, [3], resume_step=2)
    starts = [event.step for event in tensorboard_events(tmp_path) if event.HasField("session_log")]
    assert starts == [0, 3]


def test_columns_stay_in_place():
    slow = {**train_entry(9, 2.3456), "grad_norm": 12345.678, "step_time_seconds": 31.2, "tokens_per_second": 1_234_567}
    fast = {**train_entry(120, 10.5), "grad_norm": 0.812, "step_time_seconds": 0.0123, "tokens_per_second": 13_200.4}
    lines = [train_line(entry, 500, 125) for entry in (slow, fast)]
    assert lines == [
        "step   9/500  loss  2.3456  grad 1.2e+04  lr 3.00e-04   31.20 s  1,234,567 tok/s  ETA 2:05",
        "step 120/500  loss 10.5000  grad   0.812  lr 3.00e-04   12.3 ms     13,200 tok/s  ETA 2:05",
    ]
    assert eval_line(eval_entry(9), 500) == "step   9/500  eval  2.5000  perplexity 12.182"


def test_mfu_is_printed_where_there_is_one():
    assert "MFU" not in train_line(train_entry(1), 10, None)
    assert "MFU 46.2%" in train_line({**train_entry(1), "mfu": 0.462}, 10, None)


def test_the_most_loaded_layer_is_printed_and_each_has_its_number(tmp_path):
    entry = {**train_entry(1), "expert_load_max": [1.5, 2.25], "tokens_dropped": [0.0, 0.0]}
    assert "load 2.2x" in train_line(entry, 10, None)
    assert "dropped" not in train_line(entry, 10, None)
    assert "dropped 12.5%" in train_line({**entry, "tokens_dropped": [0.125, 0.0]}, 10, None)
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", None)
    log.write({**entry, "expert_load_max": [1.5, math.nan, 2.5], "tokens_dropped": [math.nan]})
    log.close()
    assert read_lines(tmp_path)[0]["expert_load_max"] == [1.5, None, 2.5]
    found = [value for event in tensorboard_events(tmp_path) for value in event.summary.value]
    scalars = {value.tag: value.simple_value for value in found if "expert" in value.tag or "dropped" in value.tag}
    assert scalars == {f"train/expert_load_max/{name}": x for name, x in (("min", 1.5), ("mean", 2.0), ("max", 2.5))}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3599.9, "1:00:00"), (86399, "23:59:59"), (357_720, "4d 03:22")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_perplexity_of_any_loss():
    assert perplexity(math.log(256)) == pytest.approx(256)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_a_log_gets_plain_lines_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock = iter([100.0, 102.0, 106.0])  # the ends of steps 41, 42, 44: 2 s per step, of which 6 are left at 44
    with StepPrinter(steps=50, done=40, log_period=2) as printer:
        printer._clock = lambda: next(clock)
        for step in (41, 42, 43, 44):
            printer.train(train_entry(step))
        printer.evaluation(eval_entry(44))
    assert capsys.readouterr().out.splitlines() == [
        train_line(train_entry(41), 50, None),
        train_line(train_entry(42), 50, 16),
        train_line(train_entry(44), 50, (106 - 100) / 3 * 6),
        eval_line(eval_entry(44), 50),
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_under_whole_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    with StepPrinter(steps=4) as printer:
        for step in (1, 2, 3, 4):
            printer.train(train_entry(step))
        shown = sys.stdout.getvalue()
    assert "4/4" in shown.split("tok/s")[-1]
    for step in (1, 2, 3, 4):
        assert train_line(train_entry(step), 4, None) in shown
