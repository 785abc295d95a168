"""The time of copies to host memory and back, which the roofline does not count."""

from src.config.schema import Config
from src.config.step_keys import REMAT_POLICIES
from src.extras.aot.memory import SAVED
from src.extras.aot.topology import Topology
from src.extras.plan.estimate import Costs, step_costs
from src.extras.plan.placed import Placed

# Bytes per second each way, by the start of a device's kind. PCIe 4.0 and 5.0 x16: NVIDIA's data sheets of A100, L40S
# and H100, which add up both ways. TPU v4: "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus), which names
# no other TPU; devices that no source describes are assumed to be as slow.
BANDWIDTH = {"NVIDIA A100": 32e9, "NVIDIA L40S": 32e9, "NVIDIA H": 64e9, "NVIDIA B": 64e9}
UNKNOWN_BANDWIDTH = 16e9
EXPOSED = 0.5  # fraction of the copies of activations that a step waits for; it waits for all of the optimizer's


def seconds(topology: Topology, optimizer: float, activations: float) -> float:
    """Returns the seconds that a step waits for this many bytes per device to be copied to the host and back."""
    kind = topology.chip.kind if topology.chip else ""
    bandwidth = next((each for start, each in BANDWIDTH.items() if kind.startswith(start)), UNKNOWN_BANDWIDTH)
    return 2 * (optimizer + EXPOSED * activations) / bandwidth


def estimated_seconds(config: Config, topology: Topology, costs: Costs, placed: Placed | None = None) -> float:
    """Estimates `seconds` for a config and its costs; activations are the bytes that its policy keeps off the device.

    These are the difference to the estimate for the same policy without offloading, for all micro-batches.
    """
    step, memory = config.step, costs.memory
    if step.remat_policy == "custom":
        names, on_host = list(step.remat_custom), "offload" in step.remat_custom.values()
    else:
        saved, offloaded = REMAT_POLICIES.get(step.remat_policy, ((), ()))
        names, on_host = [*saved, *offloaded], bool(offloaded)
    activations = 0
    if on_host:
        kept = config.replace(remat_policy="custom", remat_custom=dict.fromkeys(names, "device"))
        activations = step_costs(kept, topology, placed).memory.temporaries[SAVED] - memory.temporaries[SAVED]
    return seconds(topology, memory.on_host, max(activations, 0) * step.gradient_accumulation_steps)
