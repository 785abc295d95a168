"""Prints the manifest of a run on GKE, for scripts/gke.sh: `python -m scripts.jobset NAME TYPE SLICES IMAGE COMMAND`.

The templates are scripts/jobset_tpu.yml and scripts/jobset_gpu.yml. Needs no packages.
"""

import json
import math
import re
import string
from collections.abc import Sequence
from pathlib import Path

from src.extras.aot.topology import parse_topology
from src.system.errors import UserError
from src.system.exit_codes import run_command

# Values of the node labels cloud.google.com/gke-tpu-accelerator and gke-accelerator (docs.cloud.google.com/
# kubernetes-engine/docs/concepts/plan-tpus and concepts/gpus), by the names in src/extras/aot/topology.py.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5litepod": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
    "a100": "nvidia-a100-80gb",
    "a3": "nvidia-h100-80gb",
    "a3-ultra": "nvidia-h200-141gb",
    "a4": "nvidia-b200",
}


def manifest(name: str, kind: str, slices: int, image: str, command: Sequence[str]) -> str:
    """Fills in the JobSet, as YAML.

    Args:
        name: The JobSet's name.
        kind: A TPU slice (v5e-256) or GPU host (a3), as in the key `compile_topology`.
        slices: Number of slices or hosts.
        image: Container image with the trainer and its requirements (scripts/Dockerfile).
        command: The command of each pod; on GPUs it must accept MinText's keys.

    Raises:
        UserError: GKE has no such slice or host, or does not accept the name.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(f"NAME {name}: Kubernetes takes lower-case letters, digits and '-', 40 characters at most")
    try:
        topology = parse_topology(kind, slices)
    except UserError as error:
        message = (
            str(error).replace("compile_topology_num_slices=", "--slices ").replace("compile_topology=", "--type ")
        )
        raise UserError(message) from None
    if topology.platform == "cpu":
        raise UserError(f"--type {kind}: expected a TPU slice or a GPU host, such as v5e-256 or a3")
    family = topology.name if topology.platform == "gpu" else re.split("[-:]", topology.name)[0]
    values = {"NAME": name, "IMAGE": image, "ACCELERATOR": ACCELERATORS[family]}
    if topology.platform == "tpu":
        chips_per_host = math.prod(topology.host_shape)
        values |= {
            "SLICES": slices,
            "HOSTS": math.prod(topology.shape) // chips_per_host,
            "CHIPS_PER_HOST": chips_per_host,
            "TOPOLOGY": "x".join(map(str, topology.shape)),
        }
    else:
        values |= {"HOSTS": slices, "GPUS_PER_HOST": math.prod(topology.shape)}
        command = [
            *command,
            f"coordinator_address={name}-node-0-0.{name}:1234",
            f"num_processes={slices}",
            "process_id=$(JOB_COMPLETION_INDEX)",
        ]
    template = Path(__file__).with_name(f"jobset_{topology.platform}.yml").read_text(encoding="utf-8")
    return string.Template(template).substitute(values, COMMAND=json.dumps(command))


def main(argv: Sequence[str]) -> None:
    """Prints the manifest for these arguments."""
    name, kind, slices, image, *command = argv
    print(manifest(name, kind, int(slices), image, command), end="")


if __name__ == "__main__":
    run_command(main)
