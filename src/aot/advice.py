"""Changes that would make a step need less memory, each with the effect it is estimated to have."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from src.aot.memory import Memory, memory
from src.build import Built, build
from src.errors import UserError


class Change(NamedTuple):
    """Keys to type, what they cost beside, and the bytes a device is then estimated to need."""

    keys: dict[str, Any]
    cost: str
    needed: int


def changes(config: Mapping[str, Any], devices: Sequence[jax.Device], built: Built, needed: int) -> list[Change]:
    """What would lower the `needed` bytes a device of a step, the least costly first; then all of it together.

    A part of the memory that can be told from shapes changes as those say. What remains, which is what one block
    computes, is taken to grow with a device's rows.
    """
    now = memory(built)
    rest = needed - now.total
    rows = built.rows / built.plan.micro_batches

    def estimate(keys: Mapping[str, Any]) -> int | None:
        try:
            changed = build({**config, **keys}, devices)
        except UserError:  # such as rows that can't be halved
            return None
        return round(memory(changed).total + rest * changed.rows / changed.plan.micro_batches / rows)

    found: list[Change] = []
    for keys, cost in _candidates(config):
        keys = {key: value for key, value in keys.items() if value != config[key]}
        then = estimate(keys) if keys else None
        if then and then < needed:
            found.append(Change(keys, cost, then))
    together: dict[str, Any] = {}
    for change in found:
        if not together.keys() & change.keys.keys():
            together |= change.keys
    if len(found) > 1 and (then := estimate(together)) and then < min(change.needed for change in found):
        found.append(Change(together, "all of these", then))
    return [*found, _with_more_devices(config, built, now, needed)]


def _candidates(config: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    tiles = math.gcd(config["num_vocab_tiling"] * 8, config["max_target_length"])  # tiles have to divide a row
    yield {"num_vocab_tiling": tiles}, "logits are computed twice"
    full = {"remat_policy": "full"} | ({"remat_custom": {}} if config["remat_policy"] == "custom" else {})
    yield full, "blocks are computed twice"
    halved = {
        "per_device_batch_size": config["per_device_batch_size"] / 2,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"] * 2,
    }
    yield halved, "the same global batch in twice the passes, each gathering the weights"
    offloaded = {"remat_policy": "custom", "remat_custom": {"decoder_layer_input": "offload"}}
    yield offloaded, "blocks are computed twice, and their inputs go to host memory and back"
    if config["opt_type"] == "adamw":
        yield {"mu_dtype": "bfloat16"}, "Adam's first moment is rounded"
    wide = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": -1}
    yield wide, "weights are gathered over all devices of a slice or host"
    wider = {"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1}
    yield {**wide, **wider}, "weights are gathered between slices or hosts too"


def _with_more_devices(config: Mapping[str, Any], built: Built, now: Memory, needed: int) -> Change:
    """Twice the slices or hosts, with weights sharded over all of them."""
    mesh = built.plan.layout.mesh
    sharded = now.arguments["weights"] + now.arguments["optimizer"] + now.temporaries["gradients"]
    fsdp = 2 * mesh.size // mesh.shape["tensor"]
    keys = {
        "compile_topology_num_slices": config["compile_topology_num_slices"] * 2,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": -1,
        "dcn_data_parallelism": 1,
        "dcn_fsdp_parallelism": -1,
    }
    then = round(needed - sharded * (1 - mesh.shape["fsdp"] / fsdp))
    changed = {key: value for key, value in keys.items() if value != config[key]}
    return Change(changed, "twice the devices, and weights are gathered between slices or hosts", then)
