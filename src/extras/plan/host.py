"""The time of copies to host memory and back, which the roofline does not count."""

from src.extras.aot.topology import Topology

# Bytes per second in each direction, by the start of a device's kind: PCIe 4.0 or 5.0 x16, half of what NVIDIA's data
# sheets of A100, L40S and H100 state for both directions together. Blackwell is assumed to have the H100's.
BANDWIDTH = {"NVIDIA A100": 32e9, "NVIDIA L40S": 32e9, "NVIDIA H": 64e9, "NVIDIA B": 64e9}
# For all other devices: TPU v4's, the only one in "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus).
UNKNOWN_BANDWIDTH = 16e9
EXPOSED = 0.5  # fraction of the copies of activations that a step waits for; it waits for all of the optimizer's


def seconds(topology: Topology, optimizer: float, activations: float) -> float:
    """Returns the seconds that a step waits for copies to host memory and back.

    `optimizer` and `activations` are the bytes per device that are copied, of the optimizer's state and of arrays kept
    for the backward pass.
    """
    kind = topology.chip.kind if topology.chip else ""
    bandwidth = next((each for start, each in BANDWIDTH.items() if kind.startswith(start)), UNKNOWN_BANDWIDTH)
    return 2 * (optimizer + EXPOSED * activations) / bandwidth
