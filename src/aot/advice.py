"""Changes that would make a step need less memory, each with the effect it is estimated to have."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from src.aot.devices import abstract_devices
from src.aot.memory import memory
from src.errors import UserError
from src.parallel.topology import parse_topology
from src.step.build import TracedStep, build


class Change(NamedTuple):
    """Keys to type, what they cost beside, the step they make, and the bytes a device is estimated to need for it."""

    keys: dict[str, Any]
    cost: str
    built: TracedStep
    estimated: int


def changes(
    config: Mapping[str, Any], devices: Sequence[jax.Device], built: TracedStep, needed: int, capacity: int
) -> list[Change]:
    """Returns what is estimated to lower a step's `needed` bytes per device, the least costly first; then all at once.

    Of a changed step the parts that can be told are told again. What the step as it is needs beside its parts is taken
    to stay; where it needs less than its parts, the temporaries of the changed one are taken to be as much fewer. So
    what is not there when memory is fullest is no change, and no estimate is below the arguments.
    """
    now = memory(built)
    beside = max(needed - now.total, 0)
    arguments = sum(now.arguments.values())
    reached = min((needed - arguments) / (now.total - arguments), 1.0)  # of the temporaries that were told
    # The optimizer's precision, and who holds which part of it, are offered where there is much of it.
    state_decides = sum(now.arguments.values()) > capacity / 2

    def change(keys: Mapping[str, Any], cost: str) -> Change | None:
        keys = {key: value for key, value in keys.items() if value != config[key]}
        changed = config.replace(**keys)
        try:
            slices = changed["compile_topology_num_slices"]
            if more := slices != config["compile_topology_num_slices"]:
                topology = parse_topology(config["compile_topology"], slices)
            then = build(changed, abstract_devices(topology) if more else devices, built.compiler_options)
        except UserError:  # such as rows that can't be halved
            return None
        parts = memory(then)
        held = sum(parts.arguments.values())
        estimated = held + round((parts.total - held) * reached) + beside
        return Change(keys, cost, then, estimated) if keys and estimated < needed else None

    found: list[Change] = []
    for alternatives, cost in _candidates(config, state_decides):
        best = None
        for keys in alternatives:
            best = change(keys, cost) or best
            if best and best.estimated <= capacity:
                break
        found += [best] if best else []
    together: dict[str, Any] = {}
    for one in found:
        if not together.keys() & one.keys.keys():
            together |= one.keys
    every = change(together, "all of these")
    if every and every.estimated < min(one.estimated for one in found):
        found.append(every)
    return found


def _candidates(config: Mapping[str, Any], state_decides: bool) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Keys, or several of which the first that is enough will do, and what they cost."""
    tiles = math.gcd(config["num_vocab_tiling"] * 8, config["max_target_length"])  # tiles have to divide a row
    yield [{"num_vocab_tiling": tiles}], "logits are computed twice"
    full = {"remat_policy": "full"} | ({"remat_custom": {}} if config["remat_policy"] == "custom" else {})
    yield [full], "blocks are computed twice"
    fewer_rows = [
        {
            "per_device_batch_size": config["per_device_batch_size"] / parts,
            "gradient_accumulation_steps": config["gradient_accumulation_steps"] * parts,
        }
        for parts in (2, 4, 8, 16)
    ]
    yield fewer_rows, "the same global batch in more passes, each gathering the weights"
    offloaded = {"remat_policy": "custom", "remat_custom": {"decoder_layer_input": "offload"}}
    yield [offloaded], "blocks are computed twice, and their inputs go to host memory and back"
    if not state_decides:
        return
    if config["opt_type"] == "adamw":
        yield [{"mu_dtype": "bfloat16"}], "Adam's first moment is rounded"
    wide = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": -1}
    yield [wide], "weights are gathered over all devices of a slice or host"
    wider = {**wide, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1}
    yield [wider], "weights are gathered between slices or hosts too"
    more = {**wider, "compile_topology_num_slices": config["compile_topology_num_slices"] * 2}
    yield [more], "twice the devices, and weights are gathered between slices or hosts"
