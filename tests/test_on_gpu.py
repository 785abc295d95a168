"""scripts/on_gpu.sh where there is no GPU: the same path in tiny sizes, and what needs a GPU says so."""

import json
import subprocess

import pytest

from tests import runs


def checked(tmp_path, *only):
    """The JSON of some checks on this machine's CPU."""
    out = tmp_path / "out.json"
    command = ["bash", "scripts/on_gpu.sh", out, "--platform", "cpu", *(["--only", *only] if only else [])]
    subprocess.run(command, cwd=runs.ROOT, check=True, capture_output=True)
    return json.loads(out.read_text())["checks"]


@pytest.mark.long
def test_kernels_are_held_to_plain_ones(tmp_path):
    found = checked(tmp_path, "kernels")["kernels"]
    assert 0 < found["greatest_difference"] < 0.02
    assert found["greatest_difference"] == max(
        found[name] for name in ("attention_packed", "attention_unpacked", "attention_window", "grouped_products")
    )


@pytest.mark.long
def test_all_checks_run_or_say_that_they_need_a_gpu(tmp_path):
    found = checked(tmp_path)
    assert found["bfloat16"]["tokens_per_second"] > 0
    assert found["saved_step"]["loss_differs_by"] == 0
    assert min(found["decoding"]["tokens_per_second"].values()) > 0
    assert "pgle=auto is for NVIDIA GPUs, and this is cpu" in found["pgle"]["error"]
