"""Finds changes to the config of a step that needs too much memory, with which the step fits its devices.

Changes are first chosen by estimates of memory, then compiled.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from src.config.schema import LOGICAL_AXES, Config, size_key
from src.data.batch_schedule import size_keys
from src.extras.aot.report import Report, host_capacity, readable, typed
from src.extras.aot.topology import Topology, parse_topology
from src.extras.plan.estimate import absent_step, estimate_memory
from src.extras.plan.traffic import Step
from src.system.errors import UserError, show

MAX_SECONDS_TO_TRY = 600  # no further change is compiled after this
FACTORS = (2, 4, 8, 16, 32)
SHORTEST = 128  # shortest sequence length to suggest


class Change(NamedTuple):
    """A suggested change: its keys, its cost in words, the changed config, and the estimated bytes per device."""

    keys: dict[str, Any]  # a logical axis rule by its dotted name
    cost: str
    config: Config
    estimated: int


def advise(
    config: Config,
    topology: Topology,
    needed: int,
    capacity: int,
    compiled: Callable[[Config, Mapping[str, Any]], Report | None],
) -> list[Report]:
    """Compiles `changes` until one fits or MAX_SECONDS_TO_TRY pass; returns those that need less memory, last first.

    Each is a dict: `keys` and `cost` of the Change, `estimated` and `compiled` bytes per device, and whether it `fits`.
    `compiled` takes a changed config and its changed keys, and returns the part `memory` of the step's report, None if
    the compiler failed. `needed`, by the step as it is, and `capacity` are bytes per device. Prints a line before each
    compilation. Raises as `changes` and `compiled` do.
    """
    begun, listed = time.monotonic(), list[Report]()
    for change in changes(config, topology, needed, capacity):
        show(f"compiling with {typed(change.keys)}, estimated at {readable(change.estimated)}")
        memory = compiled(change.config, change.keys) or {"needed": needed, "fits": False}
        if memory["needed"] < needed:
            entry = {"keys": change.keys, "cost": change.cost, "estimated": change.estimated}
            listed.insert(0, entry | {"compiled": memory["needed"], "fits": memory["fits"]})
        if memory["fits"] or time.monotonic() - begun > MAX_SECONDS_TO_TRY:
            break
    return listed


def changes(config: Config, topology: Topology, needed: int, capacity: int) -> Iterator[Change]:
    """Yields changes that may bring a step's `needed` bytes per device down to `capacity`; the caller compiles each.

    Single changes that should suffice come first, cheapest first. Next come combinations of the largest savings that
    should suffice, from few changes to all, or all of them if none should. Last come all, with shorter sequences.

    The estimate for a changed step is its arguments plus its temporaries, both as src/extras/plan/estimate.py counts
    them, the temporaries scaled by the ratio of compiled to estimated ones of the original step. A change to something
    that is not live at peak memory therefore has no effect and is dropped. Raises UserError as `absent_step` does for
    the original step; a changed step for which it does is left out.
    """
    step = absent_step(config, topology)
    parts = estimate_memory(step)
    arguments = sum(parts.arguments.values())
    scale = max(needed - arguments, 0) / (parts.total - arguments)
    now = {**config, **{_rule(axis): list(axes) for axis, axes in config.mesh.logical_axis_rules.items()}}

    def change(keys: Mapping[str, Any], cost: str) -> Change | None:
        keys = {key: value for key, value in keys.items() if value != now[key]}
        if not keys:
            return None
        rules = {axis: keys.get(_rule(axis), axes) for axis, axes in config.mesh.logical_axis_rules.items()}
        plain = {key: value for key, value in keys.items() if "." not in key}
        changed, on = config.replace(**plain, logical_axis_rules=rules), topology
        try:
            if "compile_topology_num_slices" in keys:
                on = parse_topology(topology.name, keys["compile_topology_num_slices"])
            after = estimate_memory(absent_step(changed, on))
        except UserError:  # such as a batch that can't be halved
            return None
        if after.all_on_host > host_capacity(on):
            return None
        held = sum(after.arguments.values())
        estimated = held + round((after.total - held) * scale)
        return Change(keys, cost, changed, estimated) if estimated < needed else None

    found: list[Change] = []
    # Change the optimizer's precision and sharding only if the state takes much of the memory.
    for cost, *alternatives in _candidates(config, step, arguments > capacity / 2):
        best = None
        for keys in alternatives:
            best = change(keys, cost) or best
            if best and best.estimated <= capacity:
                yield best
                break
        found += [best] if best else []
    keys: dict[str, Any] = {}
    every = None
    for one in sorted(found, key=lambda one: one.estimated):
        if not keys.keys() & one.keys.keys() and (more := change(keys | one.keys, "all of these")):
            keys, every = more.keys, more
            if every.estimated <= capacity and keys != one.keys:
                yield every
    if every and every.estimated > capacity:  # may need less than estimated
        yield every
    for length in (config.batch.max_target_length // n for n in FACTORS):
        shorter = {"max_target_length": length, "num_vocab_tiling": 0}  # as many tiles as this length needs
        fewer = change(keys | shorter, "shorter sequences") if length >= SHORTEST else None
        if fewer and fewer.estimated <= capacity:
            yield fewer


def _rule(axis: str) -> str:
    return f"logical_axis_rules.{axis}"


def _candidates(config: Config, planned: Step, state_decides: bool) -> Iterator[tuple[Any, ...]]:
    """Yields kinds of changes, cheapest first: the cost in words, then alternatives, each a dict of keys.

    The first alternative that suffices is used. With `state_decides`, they include changes to the optimizer's precision
    and to how weights and optimizer are sharded.
    """
    step, batch, spec, layout = config.step, config.batch, planned.placed.spec, planned.placed.layout
    yield "nothing: it is the kernel for these devices", {"attention": "autoselected"}
    between_blocks = {_rule("norm_length"): ["context", "tensor"]}
    if layout.mesh.shape["tensor"] > 1:
        yield "devices that share heads gather tokens between blocks", between_blocks
    if any(layer.attention_type == "mla" for layer in spec.layers):
        yield "latent attention's weights are gathered", {_rule("latent"): list(LOGICAL_AXES["latent"][0])}
    tiles = math.gcd(planned.tiles * 8, batch.max_target_length)  # tiles have to divide the sequence length
    yield "logits are computed twice", {"num_vocab_tiling": tiles}
    no_arrays = {"remat_custom": {}} if step.remat_policy == "custom" else {}
    yield "blocks are computed twice", {"remat_policy": "full", **no_arrays}
    passes = step.gradient_accumulation_steps

    def in_passes(n: int) -> dict[str, Any]:
        sizes = {key: config[key] / n for key in size_keys(batch.enable_rampup_batch_size)}
        return {**sizes, "gradient_accumulation_steps": passes * n}

    yield "the same global batch in more passes, each gathering the weights", *map(in_passes, FACTORS[:4])

    # Other sizes than -1 are typed or follow from -1, "the rest", which one axis may be.
    sizes = dict(zip(layout.mesh.axis_names, layout.within, strict=True))
    takes_rest = [axis for axis in sizes if config[size_key("ici", axis)] == -1]

    def over(axis: str, n: int) -> dict[str, Any]:
        rest = {} if {*takes_rest} - {axis} else {"ici_fsdp_parallelism": -1}
        return {size_key("ici", axis): sizes[axis] * n, **rest}

    if spec.has_experts:
        yield "tokens travel to their experts", *(over("expert", n) for n in FACTORS)
    offloaded = {"remat_policy": "custom", "remat_custom": {"decoder_layer_input": "offload"}}
    yield "blocks are computed twice, and their inputs move to host memory and back", offloaded
    # Each batch shard has `rows` sequences. If n devices share a sequence, they process one at a time, in n times as
    # many passes.
    rows = round(batch.per_device_batch_size * layout.mesh.size / layout.shards("batch"))
    cost = "devices share each sequence, and gather its keys and values; the same global batch in more passes"
    yield cost, *(over("context", n) | in_passes(rows * n) for n in FACTORS)

    def by_heads(n: int) -> dict[str, Any]:
        keys: dict[str, Any] = over("tensor", n) | in_passes(rows * n) | between_blocks
        divide = all(layer.num_kv_heads % keys["ici_tensor_parallelism"] == 0 for layer in spec.layers)
        return keys | ({} if divide else {_rule("kv_heads"): []})

    cost = "devices share each sequence, and sum its activations; the same global batch in more passes"
    yield cost, *map(by_heads, FACTORS)
    if batch.packing:
        yield "one document per sequence: the rest is padding", {"packing": False}
    if not state_decides:
        return
    if step.opt_type == "adamw":
        yield "Adam's first moment is rounded", {"mu_dtype": "bfloat16"}
    keys: dict[str, Any] = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": -1}
    yield "weights are gathered over all devices of a slice or host", keys
    keys = {**keys, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1}
    yield "weights are gathered between slices or hosts too", keys
    more = ({**keys, "compile_topology_num_slices": config.aot.compile_topology_num_slices * n} for n in FACTORS)
    yield "more devices, and weights are gathered between slices or hosts", *more
