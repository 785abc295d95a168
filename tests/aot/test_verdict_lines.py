"""The verdict on a step, from what compilers say, and the lines that say it."""

from types import SimpleNamespace

import jax
import pytest

from src.extras.aot.report import change_lines, device_capacity, lines, make_report, verdict
from src.extras.aot.topology import parse_topology
from src.run.summary import step_flops
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.tiny import load

GIB = 2**30
SECONDS = {"tracing": 1.0, "lowering": 0.5, "compiling": 61.0}

# As libtpu 0.0.42.1 prints them.
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (37.30G) exceeds "
    "available HBM (15.75G)."
)
LATE = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.10G of 15.75G hbm.
Exceeded hbm capacity by 2.35G.

Total hbm usage >= 18.35G:
    reserved        258.00M
    program          16.10G
    arguments         2.00G
"""


@pytest.fixture(scope="module")
def step():
    return trace_train_step(
        load(base_num_query_heads=8, base_num_kv_heads=8, head_dim=4, dtype="bfloat16"), jax.devices()
    )


def report(step, compiled=None, refusal="", topology="v5e-8"):
    return make_report(parse_topology(topology, 1), step, compiled, refusal, SECONDS)


def program(arguments, temporaries, outputs=0, donated=0, peak=0):
    """What a compiled program says of its memory, for one that has no collectives; `peak` is the most at once."""
    stats = SimpleNamespace(
        argument_size_in_bytes=arguments,
        temp_size_in_bytes=temporaries,
        output_size_in_bytes=outputs,
        alias_size_in_bytes=donated,
        generated_code_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        peak_memory_in_bytes=peak or arguments + temporaries,
    )
    text = "HloModule empty\n\nENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
    return SimpleNamespace(memory_analysis=lambda: stats, as_text=lambda: text)


def test_a_refusal_before_memory_is_assigned_names_all_as_temporaries(step):
    """The 16B at batch 14 is refused for 16.54G of them: 15.85 in its buffer assignment, and 0.69 of arguments."""
    memory = report(step, refusal=EARLY)["memory"]
    assert not memory["fits"]
    assert memory["needed"] == round(37.30 * GIB)


def test_a_refusal_after_it_names_all(step):
    memory = report(step, refusal=LATE)["memory"]
    assert not memory["fits"]
    assert memory["needed"] == round(18.35 * GIB)


def test_a_tpu_program_that_compiles_fits_though_loops_count_twice_in_its_temporaries(step):
    """libtpu refuses what it finds no place for; of what it takes, the most at once is what a device needs."""
    stats = program(*(round(size * GIB) for size in (0.69, 15.13, 0.69, 0.69)), peak=round(12.1 * GIB))
    found = report(step, stats)
    assert found["memory"]["needed"] == round(12.1 * GIB)
    assert verdict(found).startswith("fits: 12.10 GiB of 15.75 GiB")
    assert found["memory"]["left"] == found["memory"]["capacity"] - found["memory"]["needed"]


@pytest.mark.parametrize(("outputs", "donated", "fits"), [(1, 1, True), (1, 0, False), (2, 1, False)])
def test_elsewhere_outputs_that_take_no_arguments_place_are_needed_too(step, monkeypatch, outputs, donated, fits):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    found = report(step, program(40 * GIB, 31 * GIB, outputs * GIB, donated * GIB), topology="a3")
    assert found["memory"]["fits"] == fits
    assert verdict(found).startswith("fits" if fits else "does not fit")


def test_a_gpu_has_a_verdict_though_its_compiler_gives_none(step, monkeypatch):
    # Of an H100's 79.1 GiB a run takes 71.2.
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    assert report(step, program(40 * GIB, 31 * GIB), topology="a3")["memory"]["fits"]
    assert not report(step, program(40 * GIB, 32 * GIB), topology="a3")["memory"]["fits"]
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.95")
    assert report(step, program(40 * GIB, 35 * GIB), topology="a3")["memory"]["fits"]


def test_the_lines_name_what_a_user_asks_for(step):
    found = report(step, refusal=LATE)
    said = dict(lines(found))
    assert said["topology"] == "v5e-8: 8 x TPU v5 lite"
    assert said["verdict"] == "does not fit: at least 18.35 GiB of 15.75 GiB per device"
    found = report(step, program(3 * GIB, 7 * GIB))
    said = dict(lines(found))
    assert said["verdict"] == "fits: 10.00 GiB of 15.75 GiB per device, 5.75 GiB left"
    assert "not measured" in said["prediction"]


def test_what_would_help_is_said_as_it_was_compiled():
    change = {"keys": {"per_device_batch_size": 0.5}, "cost": "half of it", "estimated": 12 * GIB}
    rule = {"logical_axis_rules.norm_length": ["context", "tensor"]}
    fits = change | {"compiled": 13 * GIB, "fits": True, "keys": rule}
    too_large = change | {"compiled": 16 * GIB, "fits": False}
    assert list(change_lines({"changes": [fits, too_large]})) == [
        "'logical_axis_rules.norm_length=[context, tensor]'\n    compiled: 13.00 GiB, fits; half of it",
        "per_device_batch_size=0.5\n    compiled: 16.00 GiB, still too much; half of it",
    ]
    first, second = change_lines({"changes": [too_large]})
    assert first.startswith("no compiled change fits")
    assert "16.00 GiB, still too much" in second
    assert len(list(change_lines({"changes": []}))) == 1


@pytest.mark.parametrize(
    ("keys", "topology", "why"),
    [
        ({}, "v5e-8", "no published peak rate of a TPU v5 lite for dtype=float32"),
        ({}, "cpu-8", "no published rates for CPUs"),
    ],
)
def test_why_there_is_no_prediction(keys, topology, why):
    float32 = trace_train_step(load(base_num_query_heads=8, base_num_kv_heads=8, head_dim=4), jax.devices())
    said = dict(lines(report(float32, program(GIB, GIB), topology=topology)))
    assert said["prediction"].startswith("none: ")
    assert why in said["prediction"]


@pytest.mark.parametrize("keys", [{"trainable_parameters": "[attention.query]"}, {"lora_rank": 2}])
def test_frozen_weights_are_counted_as_in_a_runs_header(step, keys):
    """And the prediction, which counts the gradients of all weights, says so."""
    sizes = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 4, "dtype": "bfloat16"}
    frozen = trace_train_step(load(**sizes, load_parameters_path="a", **keys), jax.devices())
    found, of_all = (report(each, program(3 * GIB, 7 * GIB)) for each in (frozen, step))
    flops = step_flops(frozen.plan, frozen.batch["tokens"].shape[1])
    assert found["flops"]["model"] == flops.causal * frozen.tokens / 8
    assert found["flops"]["model"] < 0.9 * of_all["flops"]["model"]
    assert "gradients of frozen weights" in dict(lines(found))["prediction"]
    assert "frozen" not in dict(lines(of_all))["prediction"]


@pytest.mark.parametrize("value", ["abc", "nan", "0", "-1", "inf"])
def test_a_fraction_of_a_gpus_memory_that_is_none_is_named(monkeypatch, value):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", value)
    with pytest.raises(UserError, match=f"XLA_CLIENT_MEM_FRACTION={value} in the environment: expected"):
        device_capacity(parse_topology("a3", 1))
    assert device_capacity(parse_topology("v5e-8", 1))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(UserError, match="are both set"):
        device_capacity(parse_topology("a3", 1))
