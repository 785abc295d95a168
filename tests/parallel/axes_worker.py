"""One process of a job: its first gradients and losses on each mesh, against one device's, for test_axes_processes.py.

Usage: python -m tests.parallel.axes_worker ADDRESS DEVICES PROCESSES PROCESS_ID EXPECTED RESULT MODEL KEYS...
KEYS are JSON, one a mesh.
"""

import json
import pickle
import sys
from pathlib import Path

import jax

from tests.parallel.axes import Job, assert_same


def main(address, devices, processes, process_id, expected, result, model, *meshes):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices) // int(processes))
    jax.distributed.initialize(address, num_processes=int(processes), process_id=int(process_id))
    said = {}
    for keys in meshes:
        job = Job(model, **json.loads(keys))
        found = job.first_gradients(), job.losses()
        try:
            assert_same(found, pickle.loads(Path(expected).read_bytes()))
            said[keys] = ""
        except AssertionError as error:
            said[keys] = str(error)
    Path(f"{result}.{process_id}").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
