"""Finds changes of keys by which a step needs less memory, each with its estimated effect."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from src.aot.devices import abstract_devices
from src.aot.memory import memory
from src.config.command_keys import Aot
from src.config.schema import BatchKeys, Config, Step
from src.data.batch_schedule import size_keys
from src.errors import UserError
from src.parallel.topology import parse_topology
from src.step.build import TracedStep, build


class Change(NamedTuple):
    """Keys to type, what they cost, the step they make, and the bytes that a device should need for it."""

    keys: dict[str, Any]
    cost: str
    built: TracedStep
    estimated: int


def changes(config: Config, devices: list[jax.Device], built: TracedStep, needed: int, capacity: int) -> list[Change]:
    """Returns changes that should lower a step's `needed` bytes per device, the cheapest first, then all at once.

    The estimate of a changed step is its parts' (`memory`), corrected by how the compiled step differs from its own:
    what that needs beyond its parts is added; if it needs less, the changed step's temporaries are scaled down alike.
    So a change of what is not there when memory is fullest is none, and no estimate is below the arguments.
    """
    parts = memory(built)
    unexplained = max(needed - parts.total, 0)
    arguments = sum(parts.arguments.values())
    scale = min((needed - arguments) / (parts.total - arguments), 1.0)

    def change(keys: Mapping[str, Any], cost: str) -> Change | None:
        keys = {key: value for key, value in keys.items() if value != getattr(config, key)}
        if not keys:
            return None
        changed, on = config.replace(**keys), devices
        try:
            if "compile_topology_num_slices" in keys:
                on = abstract_devices(parse_topology(changed.compile_topology, changed.compile_topology_num_slices))
            step = build(changed, on, built.compiler_options)
        except UserError:  # such as rows that can't be halved
            return None
        after = memory(step)
        held = sum(after.arguments.values())
        estimated = held + round((after.total - held) * scale) + unexplained
        return Change(keys, cost, step, estimated) if estimated < needed else None

    result: list[Change] = []
    # The optimizer's precision and sharding are offered where much of the memory is the state's.
    state_decides = arguments > capacity / 2
    for cost, *alternatives in _candidates(built.plan.step, config.batch, config.aot, state_decides):
        best = None
        for keys in alternatives:
            best = change(keys, cost) or best
            if best and best.estimated <= capacity:
                break
        result += [best] if best else []
    together: dict[str, Any] = {}
    for one in result:
        if not together.keys() & one.keys.keys():
            together |= one.keys
    every = change(together, "all of these")
    if every and every.estimated < min(one.estimated for one in result):
        result.append(every)
    return result


def _candidates(step: Step, batch: BatchKeys, aot: Aot, state_decides: bool) -> Iterator[tuple[Any, ...]]:
    """Yields what a change costs, and alternative keys for it, of which the first that is enough is taken."""
    tiles = math.gcd(step.num_vocab_tiling * 8, batch.max_target_length)  # tiles have to divide a row
    yield "logits are computed twice", {"num_vocab_tiling": tiles}
    no_arrays = {"remat_custom": {}} if step.remat_policy == "custom" else {}
    yield "blocks are computed twice", {"remat_policy": "full", **no_arrays}
    passes = step.gradient_accumulation_steps
    sizes = size_keys(batch.enable_rampup_batch_size)
    smaller = [
        {**{key: getattr(batch, key) / n for key in sizes}, "gradient_accumulation_steps": passes * n}
        for n in (2, 4, 8, 16)
    ]
    yield "the same global batch in more passes, each gathering the weights", *smaller
    offloaded = {"remat_policy": "custom", "remat_custom": {"decoder_layer_input": "offload"}}
    yield "blocks are computed twice, and their inputs go to host memory and back", offloaded
    if not state_decides:
        return
    if step.opt_type == "adamw":
        yield "Adam's first moment is rounded", {"mu_dtype": "bfloat16"}
    keys: dict[str, Any] = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": -1}
    yield "weights are gathered over all devices of a slice or host", keys
    keys = {**keys, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1}
    yield "weights are gathered between slices or hosts too", keys
    keys = {**keys, "compile_topology_num_slices": aot.compile_topology_num_slices * 2}
    yield "twice the devices, and weights are gathered between slices or hosts", keys
