"""Fits to steps of known constants, and what finished runs tell."""

import importlib.util
import json
from pathlib import Path

import pytest

from src.config.yaml import dump
from src.extras.aot.roofline import Constants, constants_of
from src.extras.aot.topology import parse_topology
from src.extras.plan import calibrate as calibration
from src.extras.plan.calibrate import FEW, Row, calibrate, error, fitted, read_calibration
from src.extras.plan.estimate import absent_step, step_costs
from src.extras.plan.traffic import collectives as closed_form
from src.run import resolve_config
from src.system.errors import UserError
from tests import runs
from tests.tiny import BASE

SMALL = {"model_name": "gpt3-1.3b", "dataset_type": "synthetic", "attention": "cudnn_flash", "packing": "false"}
# Steps that spend their time on different resources.
STEPS = [
    {"per_device_batch_size": 8},
    {"per_device_batch_size": 1},
    {"per_device_batch_size": 8, "remat_policy": "minimal"},
    {"per_device_batch_size": 1, "ici_tensor_parallelism": 8},
    {"per_device_batch_size": 4, "model_name": "llama2-7b", "max_target_length": 8192},
]


def costs_of(topology="a3", slices=4, **keys):
    words = [f"{key}={value}" for key, value in {**SMALL, **keys}.items()]
    return step_costs(resolve_config.load([BASE, *words]), parse_topology(topology, slices))


@pytest.fixture(scope="module")
def costed():
    return [costs_of(**keys) for keys in STEPS]


def test_a_fit_recovers_the_constants_that_made_the_durations(costed):
    start = constants_of("NVIDIA H100 80GB HBM3")
    true = start._replace(matmul=start.matmul * 0.8, memory=start.memory * 1.3, exposed=start.exposed * 0.7)
    rows = [Row(str(number), costs, costs.predict(true).step_seconds) for number, costs in enumerate(costed)]
    found = fitted(rows * 6, start)  # so many rows that they outweigh what is assumed a priori
    assert max(abs(error(row, start)) for row in rows) > 0.1
    assert max(abs(error(row, found)) for row in rows) < 0.01
    assert found.matmul == pytest.approx(true.matmul, rel=0.02)
    assert found.memory == pytest.approx(true.memory, rel=0.1)
    assert found.exposed == pytest.approx(true.exposed, rel=0.2)


def test_one_odd_run_does_not_move_the_fit(costed):
    start = constants_of("NVIDIA H100 80GB HBM3")
    rows = [Row(str(number), costs, costs.predict(start).step_seconds) for number, costs in enumerate(costed)]
    odd = rows[0]._replace(seconds=rows[0].seconds * 3)
    assert abs(error(rows[0], fitted([*rows * 4, odd], start))) < 0.05


@pytest.fixture
def finished(tmp_path):
    """Makes the folder of a run that took `seconds` a step on four hosts of H100s."""

    def make(name="run", seconds=1.0, config=True, **entry):
        folder = tmp_path / name
        folder.mkdir()
        if config:  # all keys, as a run writes them
            words = [f"{key}={value}" for key, value in {**SMALL, "per_device_batch_size": 8}.items()]
            keys = resolve_config.load([BASE, *words]).items()
            (folder / "config.yml").write_text("".join(f"{key}: {dump(value)}\n" for key, value in keys))
        tokens = 8 * 32 * 2048
        line = {"loss": 2.0, "step_time_seconds": seconds, "tokens_per_second": tokens / seconds, **entry}
        lines = [{"step": step, **line, **({"step_time_seconds": 60.0} if step == 1 else {})} for step in range(1, 9)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder)

    return make


HARDWARE = ["compile_topology=a3", "compile_topology_num_slices=4"]


def test_runs_are_fitted_and_written(finished, tmp_path, capsys):
    costs, start = costs_of(per_device_batch_size=8), constants_of("NVIDIA H100 80GB HBM3")
    slower = costs.predict(start).step_seconds * 1.2
    file = tmp_path / "h100.json"
    folders = [finished(str(number), slower) for number in range(3)]
    found = calibrate([*folders, *HARDWARE, f"calibration={file}"])
    assert found.before == pytest.approx(1 - 1 / 1.2, abs=0.001)
    assert found.after < found.before / 2  # each by the other two
    assert read_calibration(str(file), "NVIDIA H100 80GB HBM3") == found.constants
    assert f"mean error  {found.before:.1%} before, {found.after:.1%} after" in capsys.readouterr().out
    with pytest.raises(UserError, match="of a NVIDIA H100"):
        read_calibration(str(file), "TPU v4")


@pytest.mark.parametrize("value", ["0", "-1", ".nan", "[1]", "many", "2"])
def test_a_constant_that_no_fit_writes_is_refused(value, tmp_path):
    file, kind = tmp_path / "mine.json", "NVIDIA H100 80GB HBM3"
    entries = {"kind": kind, **constants_of(kind)._asdict(), "matmul": value}
    file.write_text("".join(f"{key}: {entry}\n" for key, entry in entries.items()))
    with pytest.raises(UserError, match=r"matmul: expected a number above 0 and at most 0\.95"):
        read_calibration(str(file), kind)


def test_a_single_run_cannot_be_left_out(finished, capsys):
    assert calibrate([finished(), *HARDWARE]).after is None
    assert "one run cannot tell" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compile_topology=a3"], "name the folders"),
        (["{run}"], "do not name its devices"),
        (["{run}", "compile_topology=a3"], "another number of devices"),
        (["{run}", "compile_topology=a3-ultra", "compile_topology_num_slices=4", "speed=9"], "speed=9 is unknown"),
        (["{bare}", *HARDWARE], "has no config.yml"),
        (["{run}", "compile_topology=a4", "compile_topology_num_slices=4"], "peak"),
        (["{nowhere}", *HARDWARE], "config.yml"),
    ],
)
def test_runs_that_tell_nothing_are_refused(finished, argv, message):
    places = {
        "run": finished(mfu=0.4, tflops_per_device=0.4 * 989.4),
        "bare": finished("bare", config=False),
        "nowhere": "/nowhere",
    }
    with pytest.raises(UserError, match=message):
        calibrate([word.format(**places) for word in argv])


def test_a_run_that_took_no_step_is_refused(finished):
    folder = finished()
    Path(folder, "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step after the first"):
        calibrate([folder, *HARDWARE])


GPU = {"max_target_length": 4096, "remat_policy": "minimal"}
# GB that a device sends in programs that XLA's compilers for TPUs (jax 0.10.2) and GPUs (jax 0.11.2) made, read by
# `hlo.collectives`.
COMPILED = [
    # Between slices it sums gradients on every device, for each to keep its part of them, which sends twice what a
    # reduce-scatter does.
    (
        {"global_parameter_scale": 16, "per_device_batch_size": 6, "remat_policy": "full"},
        ("v5e-256", 2),
        {("all-gather", "fsdp"): 62.69, ("all-reduce", "fsdp"): 63.08, ("all-reduce", "data"): 0.1248},
    ),
    # Gathers and scatters of weights that are fused with products send 17 parts for 15: left out.
    (
        {
            **{"global_parameter_scale": 32, "per_device_batch_size": 1, "remat_policy": "minimal"},
            "ici_tensor_parallelism": 4,
        },
        ("v5p-128", 1),
        {("all-reduce", "tensor"): 26.17},
    ),
    # GPUs sum replicas in float32; without norm_length over tensor, each projection's input gradient by itself.
    (
        {**GPU, "model_name": "llama2-7b", "per_device_batch_size": 2, "remat_policy": "full"},
        ("a3", 2),
        {("all-gather", "fsdp"): 23.125, ("all-reduce", "fsdp"): 2 * 11.79, ("all-reduce", "data"): 3.308},
    ),
    (
        {**GPU, "model_name": "llama2-7b", "per_device_batch_size": 2, "ici_tensor_parallelism": 4},
        ("a3", 2),
        {("all-gather", "fsdp"): 3.304, ("all-reduce", "data"): 3.369, ("all-reduce", "tensor"): 91.81},
    ),
    (
        {
            **{**GPU, "model_name": "llama2-7b", "per_device_batch_size": 2, "ici_tensor_parallelism": 4},
            "logical_axis_rules.norm_length": "[context,tensor]",
        },
        ("a3", 2),
        {("all-gather", "tensor"): 13.0, ("all-reduce", "tensor"): 52.3},  # of 39.06 gathered and 26.17 scattered
    ),
    (
        {
            **{**GPU, "model_name": "mixtral-8x7b", "per_device_batch_size": 1, "remat_policy": "full"},
            **{"ici_expert_parallelism": 8, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": 2},
        },
        ("a3", 2),
        {("all-to-all", "expert"): 9.397, ("all-gather", "fsdp"): 11.274 + 4.626 + 0.661},
    ),
]


@pytest.mark.parametrize(("keys", "hardware", "compiled"), COMPILED)
def test_the_closed_form_is_what_compiled_programs_move(keys, hardware, compiled):
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in keys.items())])
    sums = dict.fromkeys(compiled, 0.0)
    for each in closed_form(absent_step(config, parse_topology(*hardware))):
        kind, times = (each.kind, 1) if each.kind != "reduce-scatter" else ("all-reduce", 2)
        if (kind, each.axes[0]) in sums:
            sums[kind, each.axes[0]] += times * each.times * each.sent_bytes / 1e9
    assert sums == pytest.approx(compiled, rel=0.03)


@pytest.fixture(scope="module")
def published():
    """scripts/evidence/predict_published.py"""
    path = runs.ROOT / "scripts" / "evidence" / "predict_published.py"
    spec = importlib.util.spec_from_file_location("predict_published", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_default_constants_are_those_fitted_to_all_published_rows(published):
    rows = list(published.published())
    assert len(rows) >= 130
    found = published.fit(rows)
    for kind in {row.costs.chip.kind for row in rows}:
        assert constants_of(kind)._asdict() == pytest.approx(found.of(kind)._asdict(), rel=0.05), kind


def test_a_fit_to_publications_recovers_each_chips_constants(published, costed):
    """Made-up rows of two chips, one faster than its platform."""
    true = Constants(**{**published.START._asdict(), "matmul": 0.6})
    rows = [
        published.Row(f"source {source}", str(number), costs, costs.predict(true).step_seconds, False)
        for source in range(6)
        for number, costs in enumerate(costed)
    ]
    found = published.fit(rows).of("NVIDIA H100 80GB HBM3")
    assert found.matmul == pytest.approx(0.6, rel=0.05)
    assert max(abs(error(row, found)) for row in rows) < 0.03
    assert published.rank_correlation([(row, found) for row in rows]) > 0.99


def test_what_a_few_runs_fit_are_constants():
    assert set(FEW) < set(Constants._fields)
    assert all(getattr(calibration.LARGEST, name) >= getattr(constants_of("TPU v5 lite"), name) for name in FEW)


def test_given_constants_replace_a_chips_own():
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in SMALL.items())])
    topology = parse_topology("a3", 1)
    costs, own = step_costs(config, topology), constants_of(topology.chip.kind)
    usual, slower = costs.predict(own), costs.predict(own._replace(matmul=0.1))
    assert slower.compute_seconds == pytest.approx(usual.compute_seconds * own.matmul / 0.1)
