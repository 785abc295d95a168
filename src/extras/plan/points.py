"""The points of a search: configurations that differ from the user's in mesh, remat policy, batch and the like."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from src.config.schema import MESH_AXES, Config, size_key
from src.config.step_keys import REMAT_POLICIES
from src.extras.aot.roofline import Constants, constants_of
from src.extras.aot.topology import Topology
from src.model.spec import layer_models
from src.parallel.slices import any_of, describe_mesh, divisors
from src.system.errors import UserError, counted

Keys = Mapping[str, Any]
NOT_BETWEEN = ("tensor",)  # axes not tried between slices: every matmul would wait for the network
ROWS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # sequences of a batch shard to try if the global batch is free
SIZES = frozenset(size_key(kind, axis) for kind in ("ici", "dcn") for axis in MESH_AXES)
OFFLOADED = ("qkv_proj_offloaded", "minimal_offloaded")


class Point(NamedTuple):
    """One configuration, as the keys that the search sets. Its parts are chosen in this order."""

    mesh: Keys
    variant: Keys  # choices that may make a step faster or slower: optimizer shards, 8 bits, pipeline micro-batches
    policy: Keys
    batch: Keys
    placement: Keys  # choices that only save memory: loss tiles, the optimizer in host memory

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of all parts, for `Config.replace`."""
        return {**self.mesh, **self.variant, **self.policy, **self.batch, **self.placement}

    @property
    def kind(self) -> frozenset[str]:
        """The keys of the mesh's sizes that are above 1; errors of estimates are alike for points of one kind."""
        return frozenset(key for key, size in self.mesh.items() if size > 1)

    @property
    def mesh_words(self) -> str:
        """The mesh's sizes within slices, then between them, such as `fsdp 8 | data 4`."""
        kinds = [{axis: self.mesh[size_key(kind, axis)] for axis in MESH_AXES} for kind in ("ici", "dcn")]
        within, between = map(describe_mesh, kinds)
        return within if between == describe_mesh({}) else f"{within} | {between}"

    @property
    def policy_name(self) -> str:
        """The remat policy, with the arrays of a custom one."""
        arrays = ", ".join(f"{array} {place}" for array, place in self.policy["remat_custom"].items())
        return f"custom: {arrays}" if arrays else self.policy["remat_policy"]

    @property
    def batch_words(self) -> str:
        """The sequences per device and micro-batch, and the number of micro-batches, such as `4 x 3`."""
        return f"{self.batch['per_device_batch_size']:g} x {self.batch['gradient_accumulation_steps']}"

    @property
    def words(self) -> str:
        """The point in a line: mesh, remat policy, batch, and `also_words`."""
        parts = (self.mesh_words, self.policy_name, f"batch {self.batch_words}", self.also_words)
        return ", ".join(part for part in parts if part)

    @property
    def also_words(self) -> str:
        """The variant and the placement, such as `optimizer sharded, 8 loss tiles`; empty if nothing is switched on."""
        keys = {**self.variant, **self.placement}
        parts = {
            keys.get("quantization"): True,
            "optimizer sharded": keys.get("shard_optimizer_over_data"),
            "optimizer on host": keys.get("optimizer_memory_host_offload"),
            f"{keys.get('num_vocab_tiling')} loss tiles": keys.get("num_vocab_tiling", 0) > 1,
            f"{keys.get('num_pipeline_microbatches')} pipeline parts": keys.get("num_pipeline_microbatches", 0) > 1,
        }
        return ", ".join(words for words, holds in parts.items() if words and holds)


class Space:
    """The points that a config allows on a topology.

    `topology` needs a chip with published rates. `typed` are the keys on the command line, whose values stay, except
    sizes of -1. `rows` is the number of sequences in the global batch, None if any will do. `quantizations` are the
    kinds of 8-bit matmuls that may be tried. Predictions use `constants`; None: those fitted to published runs.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        typed: Collection[str] = (),
        rows: int | None = None,
        quantizations: Sequence[str] = (),
        constants: Constants | None = None,
    ) -> None:
        assert topology.chip
        self.constants = constants or constants_of(topology.chip.kind)
        self.config, self.topology, self.rows, self.quantizations = config, topology, rows, quantizations
        self.has_experts = any(layer.num_experts > 1 for layer, _ in layer_models(config.model))
        self.fixed = {key for key in typed if key in config and not (key in SIZES and config[key] == -1)}

    def points(self) -> Iterator[Point]:
        """Yields all combinations of the choices in the methods below, also ones that the model or a check refuses.

        Raises UserError as `meshes` does.
        """
        for mesh in self.meshes():
            for variant in self.variants(mesh):
                for policy, batch in itertools.product(self.policies(), self.batches(mesh, variant)):
                    for placement in self.placements(mesh):
                        yield Point(mesh, variant, policy, batch, placement)

    def meshes(self) -> Iterator[Keys]:
        """Yields the sizes of all mesh axes, for every way to factor the devices that the typed sizes leave.

        Sizes that are not typed are 1 for `expert` without experts, and for NOT_BETWEEN between slices. Raises
        UserError if the typed sizes do not divide the devices. A mesh that the model does not divide over is yielded
        too: its estimate raises the error.
        """
        within = self.topology.num_devices // self.topology.slices
        for ici, dcn in itertools.product(self._sizes("ici", within), self._sizes("dcn", self.topology.slices)):
            yield {**ici, **dcn}

    def variants(self, mesh: Keys) -> Iterator[Keys]:
        """Yields a mesh's combinations of the choices that may make a step faster or slower, except typed ones.

        These are 8-bit matmuls, an optimizer sharded over replicas, and the numbers of a pipeline's micro-batches.
        """
        stages = _size(mesh, "stage")
        alternatives = {
            "quantization": ["", *self.quantizations] if self.quantizations else [],
            "shard_optimizer_over_data": [False, True] if _size(mesh, "data") > 1 else [],
            "num_pipeline_microbatches": [n * stages for n in (1, 2, 4, 8)] if stages > 1 else [-1],
            "num_pipeline_repeats": [] if stages > 1 else [1],
        }
        yield from self._choices(alternatives)

    def policies(self) -> Iterator[Keys]:
        """Yields remat policies: only the config's own if it is typed, otherwise `none`, the fastest, and then others.

        Others are the shipped ones, block inputs in host memory, and a custom one of the config. On CPUs, OFFLOADED
        and block inputs in host memory are left out.
        """
        step, on_host = self.config.step, self.topology.platform != "cpu"
        own = {"remat_policy": step.remat_policy, "remat_custom": dict(step.remat_custom)}
        if self.fixed & {"remat_policy", "remat_custom"}:
            yield own
            return
        for policy in ("none", *REMAT_POLICIES):
            if on_host or policy not in OFFLOADED:
                yield {"remat_policy": policy, "remat_custom": {}}
        offloaded = {"remat_policy": "custom", "remat_custom": {"decoder_layer_input": "offload"}}
        if on_host:
            yield offloaded
        if step.remat_policy == "custom" and own != offloaded:
            yield own

    def batches(self, mesh: Keys, variant: Keys) -> Iterator[Keys]:
        """Yields the batch per device and the micro-batches that make the global batch, the fastest first.

        Yields nothing if the shards or the typed keys do not divide the global batch (`batch_problem`).
        """
        batch, step, devices = self.config.batch, self.config.step, self.topology.num_devices
        shards = self._batch_shards(mesh, variant)
        passes = {step.gradient_accumulation_steps} if "gradient_accumulation_steps" in self.fixed else None
        for rows, count in self._rows(shards, passes or {1}):
            keys = {"per_device_batch_size": rows / devices, "gradient_accumulation_steps": count}
            size_is_fixed = "per_device_batch_size" in self.fixed or batch.enable_rampup_batch_size
            if size_is_fixed and keys["per_device_batch_size"] != batch.per_device_batch_size:
                continue
            if passes is None or count in passes:
                yield keys

    def batch_problem(self, mesh: Keys, variant: Keys) -> str:
        """Says why `batches` yields none, and which values of a key would do."""
        shards, length = self._batch_shards(mesh, variant), self.config.batch.max_target_length
        if self.rows is None:
            return f"no size from {ROWS[-1]} to {ROWS[0]} of a shard is per_device_batch_size"
        if self.rows % shards:
            of_batch = f"global_batch_tokens may be a multiple of {shards * length}"
            return f"{shards} shards of the batch do not divide {counted(self.rows, 'sequence')}: {of_batch}"
        counts = divisors(self.rows // shards)
        passes = self.config.step.gradient_accumulation_steps
        if "gradient_accumulation_steps" in self.fixed and passes not in counts:
            rest = counted(self.rows // shards, "sequence")
            return f"gradient_accumulation_steps={passes} does not divide a shard's {rest}: it may be {any_of(counts)}"
        sizes = any_of([f"{self.rows / count / self.topology.num_devices:g}" for count in counts])
        size = self.config.batch.per_device_batch_size
        return f"per_device_batch_size={size:g} does not divide {counted(self.rows, 'sequence')}: it may be {sizes}"

    def placements(self, mesh: Keys) -> Iterator[Keys]:
        """Yields combinations of the choices that only save memory, the fastest first.

        These are an optimizer in host memory, and the number of loss tiles: the config's own, or 8.
        """
        length = self.config.batch.max_target_length // self._shards(mesh, "norm_length")
        own = self.config.step.num_vocab_tiling
        tiles = dict.fromkeys([own, *([8] if own < 8 and length % 8 == 0 else [])])
        # Only on TPUs: the compiler for absent GPUs leaves a program's arguments, such as the optimizer, in GPU memory.
        offload = [False, True] if self.topology.platform == "tpu" else []
        yield from self._choices({"optimizer_memory_host_offload": offload, "num_vocab_tiling": list(tiles)})

    def _choices(self, alternatives: Mapping[str, Sequence[Any]]) -> Iterator[Keys]:
        free = {key: values for key, values in alternatives.items() if values and key not in self.fixed}
        for values in itertools.product(*free.values()):
            yield dict(zip(free, values, strict=True))

    def _rows(self, shards: int, passes: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yields (sequences of a micro-batch, number of micro-batches); `shards` divides the sequences.

        `passes` are the numbers of micro-batches to try if the global batch is free.
        """
        if self.rows is None:
            yield from ((shards * rows, count) for count in passes for rows in ROWS)
        elif self.rows % shards == 0:
            yield from ((self.rows // count, count) for count in divisors(self.rows // shards))

    def _sizes(self, kind: str, devices: int) -> Iterator[Keys]:
        """Yields the sizes of all axes, within slices (`kind` ici) or between (dcn), whose product is `devices`.

        Raises UserError if the product of the typed sizes does not divide `devices`.
        """
        fixed = {key: self.config[key] for axis in MESH_AXES if (key := size_key(kind, axis)) in self.fixed}
        known = math.prod(fixed.values())
        if devices % known:
            raise UserError(
                f"{' '.join(f'{key}={size}' for key, size in fixed.items())} {'do' if len(fixed) > 1 else 'does'} not "
                f"divide {devices} {'devices of a slice or host' if kind == 'ici' else 'slices or hosts'}: the product "
                f"may be {any_of(divisors(devices))}"
            )
        left_out = (*(() if self.has_experts else ("expert",)), *(NOT_BETWEEN if kind == "dcn" else ()))
        ones = {key: 1 for axis in MESH_AXES if (key := size_key(kind, axis)) not in fixed}
        free = [key for key in ones if key not in {size_key(kind, axis) for axis in left_out}]
        for sizes in _factorings(devices // known, len(free)):
            yield {**ones, **fixed, **dict(zip(free, sizes, strict=True))}

    def _batch_shards(self, mesh: Keys, variant: Keys) -> int:
        """The divisor of a micro-batch's sequences: the batch's shards times the pipeline's micro-batches."""
        parts = variant.get("num_pipeline_microbatches", self.config.mesh.num_pipeline_microbatches)
        return self._shards(mesh, "batch") * (_size(mesh, "stage") if parts == -1 else parts)

    def _shards(self, mesh: Keys, axis: str) -> int:
        """Number of shards of a dim of logical axis `axis`."""
        return math.prod(_size(mesh, name) for name in self.config.mesh.logical_axis_rules[axis])


def _size(mesh: Keys, axis: str) -> int:
    return mesh[size_key("ici", axis)] * mesh[size_key("dcn", axis)]


def _factorings(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write `product` as a product of `count` ordered factors."""
    if count == 0:
        yield from [()] if product == 1 else []
        return
    for first in divisors(product):
        for rest in _factorings(product // first, count - 1):
            yield (first, *rest)
