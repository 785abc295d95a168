"""Each axis of the mesh between real processes gives one device's losses and gradients."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from tests import quick_compilation, runs
from tests.parallel.axes import MODELS, Job


def sizes(**given):
    """The keys of a mesh: each size 1 but those given."""
    words = ("data", "pipeline", "fsdp", "context", "expert", "tensor")
    ones = {f"{kind}_{word}_parallelism": 1 for kind in ("ici", "dcn") for word in words}
    return {**ones, **{f"{name}_parallelism": size for name, size in given.items()}}


AXES = ("data", "pipeline", "fsdp", "context", "tensor")
# Eight devices: by the number of processes, meshes whose axes cross from one process to another.
MESHES = {
    2: [
        sizes(dcn_data=2, ici_fsdp=4),
        sizes(dcn_data=2, ici_tensor=4),
        sizes(dcn_data=2, ici_context=2, ici_tensor=2),
        sizes(dcn_data=2, ici_pipeline=2, ici_tensor=2),
        sizes(dcn_fsdp=2, ici_tensor=2, ici_data=2),
        sizes(dcn_fsdp=2, ici_context=4),
        sizes(dcn_pipeline=2, ici_fsdp=2, ici_data=2),
        sizes(dcn_pipeline=2, ici_context=2, ici_tensor=2),
        sizes(dcn_context=2, ici_fsdp=2, ici_tensor=2),
        sizes(dcn_context=2, ici_pipeline=2, ici_fsdp=2),
        sizes(dcn_tensor=2, ici_fsdp=4),
        sizes(dcn_tensor=2, ici_pipeline=2, ici_data=2),
    ],
    4: [
        sizes(dcn_data=4, ici_tensor=2),
        sizes(dcn_data=2, dcn_fsdp=2, ici_tensor=2),
        sizes(dcn_data=2, dcn_pipeline=2, ici_fsdp=2),
        sizes(dcn_data=2, dcn_context=2, ici_fsdp=2),
        sizes(dcn_data=2, dcn_tensor=2, ici_fsdp=2),
        sizes(dcn_pipeline=4, ici_fsdp=2),
        sizes(dcn_pipeline=2, dcn_context=2, ici_tensor=2),
        sizes(dcn_pipeline=2, dcn_tensor=2, ici_fsdp=2),
        sizes(dcn_fsdp=4, ici_context=2),
        sizes(dcn_fsdp=2, dcn_context=2, ici_fsdp=2),
        sizes(dcn_context=4, ici_tensor=2),
        sizes(dcn_tensor=4, ici_data=2),
    ],
}
WITH_EXPERTS = {
    2: [
        sizes(dcn_expert=2, ici_expert=4),
        sizes(dcn_expert=2, ici_fsdp=2, ici_tensor=2),
        sizes(dcn_expert=2, ici_pipeline=2, ici_context=2),
        sizes(dcn_data=2, ici_expert=4),
    ],
    4: [
        sizes(dcn_expert=4, ici_fsdp=2),
        sizes(dcn_expert=2, dcn_context=2, ici_expert=2),
        sizes(dcn_expert=2, dcn_pipeline=2, ici_tensor=2),
    ],
}
CASES = {
    **{
        ("each axis", model, processes): [sizes(**{f"dcn_{axis}": processes}) for axis in AXES]
        for processes in MESHES
        for model in MODELS
    },
    **{("axes together", model, processes): MESHES[processes] for processes in MESHES for model in MODELS},
    **{("experts", "latent experts", processes): meshes for processes, meshes in WITH_EXPERTS.items()},
}


@pytest.mark.long  # tests/test_multiprocess.py has the losses of two processes
@pytest.mark.parametrize(("what", "model", "processes"), CASES)
def test_axes_between_processes_give_what_one_device_does(what, model, processes, tmp_path):
    job = Job(model, devices=1)
    (tmp_path / "expected").write_bytes(pickle.dumps((job.first_gradients(), job.losses())))
    devices = processes if what == "each axis" else 8
    address, keys = runs.free_address(), list(map(json.dumps, CASES[what, model, processes]))
    environment = {**os.environ, **quick_compilation.ENVIRONMENT, "PJRT_NPROC": "32"}
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.parallel.axes_worker"),
                *(address, str(devices), str(processes), str(index)),
                *(tmp_path / "expected", tmp_path / "said", model, *keys),
            ],
            cwd=runs.ROOT,
            env=environment,
            stdout=(tmp_path / f"log.{index}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for index in range(processes)
    ]
    with runs.ended(*workers):
        for index, worker in enumerate(workers):
            assert worker.wait(timeout=3600) == 0, (tmp_path / f"log.{index}").read_text()
            assert "rematerialization" not in (tmp_path / f"log.{index}").read_text()
    said = json.loads((tmp_path / "said.0").read_text())
    assert said == dict.fromkeys(keys, "")
