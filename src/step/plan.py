"""What is compiled into a step: the model's structure, where its weights lie, and how it is computed."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from src.errors import UserError, first_few
from src.model import lora, params
from src.model.attention_kernels.choose import choose_kernel
from src.model.decoder import Decoder, attention_scores
from src.model.layers import Execution
from src.model.lora import LoraSpec
from src.model.moe import layer as moe
from src.model.pipeline import make_schedule
from src.model.spec import ModelSpec
from src.parallel.mesh import Layout, mesh_axes_of, spread, weight_shardings
from src.step.matrices import matrices
from src.user_code import load_function

Batch = dict[str, jax.Array]

WEIGHTS = ("trainable", "frozen", "stats")  # the parts of a state that make up the model


@dataclass(frozen=True)
class StepPlan:
    """What is compiled into the step: the model's structure and how it is computed."""

    spec: ModelSpec
    lora: LoraSpec | None
    graphdef: nnx.GraphDef
    parts: Any  # of each weight: trainable, frozen or stats; this and the next four are nested as all weights are
    shapes: Any
    axes: Any  # the logical axis of each dim
    shardings: Any
    decays: Any
    layout: Layout
    execution: Execution
    kernel: str
    packed: bool
    vocab_tiles: int
    z_loss: float
    load_balance: float  # weight of the experts' load-balance loss
    router_z_loss: float  # weight of the routers' z-loss
    bias_update_rate: float  # of the experts' correction biases
    further_loss: float  # weight of the mean loss of the extra prediction layers
    eval_metrics: Callable[[jax.Array, Batch], dict[str, tuple[jax.Array, jax.Array]]] | None
    micro_batches: int
    opt_type: str
    mu_dtype: str
    matrices: Any  # of each weight, a src/step/matrices.py Matrix; nested as all weights are
    shard_optimizer: bool  # over the axes that copy weights too
    offload_optimizer: bool  # its state lies in host memory between updates
    seed: int

    def copied_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard rows and no weight: along them devices have copies of the weights."""
        used = {name for at in jax.tree.leaves(self.shardings) for name in mesh_axes_of(at.spec)}
        return tuple(name for name in self.layout.axes("batch") if name not in used)

    def summed_by_hand(self) -> tuple[str, ...]:
        """Those of `copied_axes` along which devices add up gradients of their own rows (src/parallel/accumulate.py).

        In one round there is one gradient of each weight for the compiler to reduce; in a loop it would reduce each
        part.
        """
        return self.copied_axes() if self.micro_batches > 1 or self.execution.schedule else ()

    def update_shardings(self) -> Any:
        """Where the update of each trainable weight is made, and the optimizer's state of it lies."""
        shapes, placed = (self.by_part(tree)["trainable"] for tree in (self.shapes, self.shardings))
        if not self.shard_optimizer:
            return placed
        return jax.tree.map(lambda shape, at: spread(at, shape.shape, self.copied_axes()), shapes, placed)

    def init_weights(self) -> dict[str, Any]:
        """The model's initial weights by part of the state: trainable, frozen and stats."""
        tree = params.initial(functools.partial(Decoder, self.spec), self.seed)
        return self.by_part({**tree, "lora": self.init_adapters()} if self.lora else tree)

    def init_adapters(self) -> params.Tree:
        """The initial adapters, which change nothing."""
        _, declarations = params.abstract(functools.partial(Decoder, self.spec))
        rngs = nnx.Rngs(params=jax.random.fold_in(jax.random.key(self.seed), 1))
        return params.values(lora.declare(self.lora, declarations)(rngs))

    def by_part(self, tree: Any) -> dict[str, Any]:
        """A tree nested as all weights are, as one tree for each part of the state."""
        return {part: params.select(tree, self.parts, part) for part in WEIGHTS}

    def decoder(self, *parts: Any) -> Decoder:
        """The model with the weights of these parts of the state, which make up all of them."""
        tree = params.join(*parts)
        if self.lora:
            tree = lora.attach(tree, tree.pop("lora"), self.lora)
        return nnx.merge(self.graphdef, tree)


def make_plan(config: Mapping[str, Any], spec: ModelSpec, layout: Layout) -> StepPlan:
    """The plan of the config's step on this layout.

    Raises:
        UserError: there is no function `eval_metrics`, sizes do not divide over the mesh or its pipeline stages, the
            attention kernel does not run on its devices, or a pattern of `trainable_parameters` or `lora_parameters`
            fits no weight.
    """
    moe.check_mesh(spec, layout)
    schedule = make_schedule(config, spec, layout)
    graphdef, declarations = params.abstract(functools.partial(Decoder, spec))
    lora_spec = lora_of(config)
    parts = trained_parts(declarations, config["trainable_parameters"], lora_spec is not None)
    if lora_spec:
        adapters = jax.eval_shape(lambda: lora.declare(lora_spec, declarations)(nnx.Rngs(params=0)))
        declarations = {**declarations, "lora": adapters}
        parts["lora"] = params.parts(adapters)
    shapes, axes = params.values(declarations), params.field(declarations, "out_sharding")
    platform = layout.mesh.devices.flat[0].platform
    return StepPlan(
        spec=spec,
        lora=lora_spec,
        graphdef=graphdef,
        parts=parts,
        shapes=shapes,
        axes=axes,
        shardings=weight_shardings(layout, shapes, axes),
        decays=params.field(declarations, "decays"),
        layout=layout,
        execution=Execution(config["scan_layers"], config["remat_policy"], dict(config["remat_custom"]), schedule),
        kernel=choose_kernel(
            config["attention"], platform, attention_scores(spec), spec.dtype, config["max_target_length"], layout
        ),
        packed=config["packing"],
        vocab_tiles=config["num_vocab_tiling"],
        z_loss=config["z_loss_multiplier"],
        load_balance=config["load_balance_loss_weight"],
        router_z_loss=config["router_z_loss_weight"],
        bias_update_rate=config["routed_bias_update_rate"],
        further_loss=config["mtp_loss_scaling_factor"],
        eval_metrics=load_function(config["eval_metrics"], "eval_metrics") if config["eval_metrics"] else None,
        micro_batches=config["gradient_accumulation_steps"],
        opt_type=config["opt_type"],
        mu_dtype=config["mu_dtype"] or config["weight_dtype"],
        matrices=matrices(declarations, spec.vocab_size),
        shard_optimizer=config["shard_optimizer_over_data"],
        offload_optimizer=config["optimizer_memory_host_offload"],
        seed=config["init_weights_seed"],
    )


def lora_of(config: Mapping[str, Any]) -> LoraSpec | None:
    """The adapters that the config asks for; None where it asks for none."""
    if not config["lora_rank"]:
        return None
    return LoraSpec(config["lora_rank"], float(config["lora_alpha"]), tuple(map(str, config["lora_parameters"])))


def trained_parts(declarations: params.Tree, patterns: Sequence[str], adapted: bool) -> params.Tree:
    """The part of the state of each weight: without patterns all are trained, or none where adapters are.

    What is not trained is frozen, a router's correction bias too: it moves where it is among the trained alone.

    Raises:
        UserError: a pattern fits no weight.
    """
    parts = params.parts(declarations)
    flat = params.by_path(parts)
    patterns = list(map(str, patterns)) or ([] if adapted else ["*"])
    for pattern in patterns:
        if not any(params.matches(path, [pattern]) for path in flat):
            names = sorted({params.dotted(path[3:] if path[0] == "segments" else path) for path in flat})
            raise UserError(f"trainable_parameters: {pattern} fits no weight of {first_few(names, near=pattern)}")

    def part_of(path: Any, part: str) -> str:
        return part if params.matches(tuple(entry.key for entry in path), patterns) else "frozen"

    return jax.tree.map_with_path(part_of, parts)
