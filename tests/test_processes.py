"""Which job a process is of, and that all of a job would train alike."""

import jax
import numpy as np
import pytest

from src.run.distributed import job_settings
from src.run.run_setup import ClusterEnv, find_cluster
from src.step import same_program as module
from src.step.same_program import check_same_program
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.tiny import load

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_where_there_is_no_cluster_the_process_is_alone(monkeypatch):
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    assert find_cluster(1) is None


def test_a_cluster_says_which_process_this_is(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert find_cluster(1) == ClusterEnv("node007:61441", 4, 3)


def test_a_cluster_that_contradicts_itself_is_no_single_process(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "three")
    with pytest.raises(ValueError, match="three"):
        find_cluster(1)


def test_an_address_alone_makes_no_job(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    with pytest.raises(UserError, match=r"JAX_COORDINATOR_ADDRESS=10\.0\.0\.1:1234 is set, but no cluster"):
        find_cluster(1)


def test_what_processes_have_to_share_has_versions_and_each_file_of_the_code():
    found = job_settings(load())
    assert {
        "jax",
        "jaxlib",
        "Python",
        "MinText",
        "learning_rate",
        "src/step/optimizer.py",
        "src/model/moe/layer.py",
    } <= set(found)
    assert "process_id" not in found


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learning_rate": 0.02}, "its hyper-parameters differ"),
        ({"remat_policy": "full", "learning_rate": 0.02}, "the traced step and its hyper-parameters differ"),
        ({}, ""),
    ],
)
def test_another_step_in_one_process_is_refused_by_all(changed, words, monkeypatch):
    """Each process of the job is played in turn, and then told what both have."""
    configs = [load(steps=4, remat_policy="none", learning_rate=0.01), None]
    configs[1] = load(**{"steps": 4, "remat_policy": "none", "learning_rate": 0.01, **changed})
    builds = [trace_train_step(config, jax.devices()) for config in configs]
    digests = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def keep(digest):
        digests.append(digest)
        return np.stack([digest, digest])

    monkeypatch.setattr(module.multihost_utils, "process_allgather", keep)
    for traced, config in zip(builds, configs, strict=True):
        check_same_program(traced, config.run.steps)
    monkeypatch.setattr(module.multihost_utils, "process_allgather", lambda digest: np.stack(digests))
    for traced, config in zip(builds, configs, strict=True):
        if not words:
            check_same_program(traced, config.run.steps)
            continue
        with pytest.raises(UserError, match=rf"process 1 would train differently from process 0: {words}"):
            check_same_program(traced, config.run.steps)
