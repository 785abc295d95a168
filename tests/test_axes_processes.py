"""Each axis of the mesh between real processes gives one device's losses and gradients."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.axes import MODELS, Job

HERE = Path(__file__).parent


def sizes(**given):
    """The keys of a mesh: each size 1 but those given."""
    words = ("data", "pipeline", "fsdp", "context", "expert", "tensor")
    ones = {f"{kind}_{word}_parallelism": 1 for kind in ("ici", "dcn") for word in words}
    return {**ones, **{f"{name}_parallelism": size for name, size in given.items()}}


# Eight devices: by the number of processes, meshes whose axes cross from one process to another.
MESHES = {
    2: [
        sizes(dcn_data=2, ici_fsdp=4),
        sizes(dcn_fsdp=2, ici_tensor=2, ici_data=2),
        sizes(dcn_pipeline=2, ici_fsdp=2, ici_data=2),
        sizes(dcn_context=2, ici_fsdp=2, ici_tensor=2),
        sizes(dcn_tensor=2, ici_fsdp=4),
    ],
    4: [
        sizes(dcn_data=2, dcn_pipeline=2, ici_fsdp=2),
        sizes(dcn_data=4, ici_tensor=2),
        sizes(dcn_fsdp=2, dcn_context=2, ici_fsdp=2),
    ],
}
WITH_EXPERTS = {
    2: [sizes(dcn_expert=2, ici_fsdp=2, ici_tensor=2), sizes(dcn_data=2, ici_expert=4)],
    4: [sizes(dcn_expert=4, ici_fsdp=2), sizes(dcn_expert=2, dcn_context=2, ici_expert=2)],
}
CASES = [
    pytest.param("dense", 2, MESHES[2]),
    pytest.param("latent experts", 4, WITH_EXPERTS[4], marks=pytest.mark.long),
    *(
        pytest.param(model, processes, meshes, marks=pytest.mark.long)
        for processes, meshes in MESHES.items()
        for model in MODELS
        if (model, processes) != ("dense", 2)
    ),
    pytest.param("latent experts", 2, WITH_EXPERTS[2], marks=pytest.mark.long),
]


@pytest.mark.parametrize(("model", "processes", "meshes"), CASES)
def test_axes_between_processes_give_what_one_device_does(model, processes, meshes, tmp_path):
    job = Job(model, devices=1)
    (tmp_path / "expected").write_bytes(pickle.dumps((job.first_gradients(), job.losses())))
    address, keys = runs.free_address(), list(map(json.dumps, meshes))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "PJRT_NPROC": "32"}
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, HERE / "axes_worker.py", address, str(processes), str(index)),
                *(tmp_path / "expected", tmp_path / "said", model, *keys),
            ],
            env=environment,
            stdout=(tmp_path / f"log.{index}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for index in range(processes)
    ]
    with runs.ended(*workers):
        for index, worker in enumerate(workers):
            assert worker.wait(timeout=900) == 0, (tmp_path / f"log.{index}").read_text()
    said = json.loads((tmp_path / "said.0").read_text())
    assert said == dict.fromkeys(keys, "")
