"""Plans a step before it is traced: the model's structure, its weights' shardings, and how it is computed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax import Array

from src.config.schema import BatchKeys, Mesh, Step
from src.data.batch_transform import Fields, added_fields
from src.model import params
from src.model.decoder import Decoder
from src.model.execution import Execution, make_execution, make_schedule
from src.model.params import Rngs, Weights
from src.model.parts import kernel_for
from src.model.selection import Quantization, weight_roles
from src.model.spec import ModelSpec
from src.parallel.accumulate import Accumulation, Batch
from src.parallel.mesh import MeshLayout, replica_axes, weight_shardings
from src.step import optimizer_rules
from src.step.matrices import matrices
from src.step.optimizer import HParams, make_optimizer

EvalMetrics = Callable[[Array, Batch], dict[str, tuple[Array, Array]]]


@dataclass(frozen=True)
class StepPlan:
    """Everything static about a step: the model's structure and how it is computed."""

    step: Step  # the config's keys for the step
    spec: ModelSpec
    graphdef: nnx.GraphDef
    roles: Any  # trainable, frozen or stats; this and the next five are nested as all weights are
    shapes: Any
    axes: Any  # logical axis of each dim
    shardings: Any
    decays: Any
    matrices: Any  # of src/step/matrices.py MatrixDims
    quantization: Quantization
    layout: MeshLayout
    execution: Execution
    kernel: str
    why_not_fused: str  # a reason if the platform has a fused kernel and `kernel` is not it, else ""
    packed: bool
    ramped: bool  # batches grow: shard i of n has rows i, i + n, ... of the data (src/data/batch_schedule.py)
    fields: Fields  # of a batch, in addition to BATCH_ARRAYS
    eval_metrics: EvalMetrics | None
    accumulation: Accumulation
    rules: Any  # for each trained weight a src/step/optimizer_rules.py Rule

    def init_weights(self) -> Weights:
        """Makes the initial weights, including adapters."""
        tree = params.initial(functools.partial(Decoder, self.spec), self.step.init_weights_seed)
        if self.step.mup_base_emb_dim:
            from src.step import mup

            tree = mup.scaled_initial(self.step, self.spec, tree)
        return self.split({**tree, "lora": self.init_adapters()} if self.step.lora_rank else tree)

    def init_adapters(self) -> params.Tree:
        """Makes the initial adapters; they leave the model's outputs unchanged."""
        from src.model import lora

        _, declarations = params.abstract(functools.partial(Decoder, self.spec))
        return lora.initial(self.step, declarations)

    def split(self, tree: Any) -> Weights:
        """Sorts a tree, nested as all weights are, by the weights' roles."""
        return Weights.split(tree, self.roles)

    def optimizer(self, hparams: HParams) -> optax.GradientTransformation:
        """Builds the optimizer of the trainable weights, with these hyper-parameters."""
        decays, matrices = (self.split(tree).trainable for tree in (self.decays, self.matrices))
        return make_optimizer(self.step, decays, matrices, self.accumulation.updates, hparams, self.rules)

    def decoder(self, model_weights: Weights) -> Decoder:
        """Builds the model with these weights, quantized and with adapters attached if the plan has them."""
        tree = model_weights.merged()
        if self.quantization.kind:
            from src.model.quantization import attach

            tree = attach(self.quantization, tree, self.layout)
        if self.step.lora_rank:
            from src.model import lora

            tree = lora.attach(tree, tree.pop("lora"), self.step.lora_alpha)
        return nnx.merge(self.graphdef, tree)


def make_plan(
    spec: ModelSpec, layout: MeshLayout, step: Step, mesh: Mesh, batch: BatchKeys, eval_metrics: str
) -> StepPlan:
    """Plans a step on this layout.

    Raises UserError if the function `eval_metrics` or `batch_transform` cannot be used, a size is not divisible by its
    mesh axes or pipeline stages, the devices lack the attention kernel or 8-bit matmuls, `mup_base_emb_dim` has no
    learning rate for a weight, or a pattern of `trainable_parameters`, `lora_parameters`, `optimizer_rules` or
    `quantization_exclude` matches no weight; TransientError as `load_function` does.
    """
    if spec.has_experts or layout.shards("expert") > 1:
        from src.model.moe.layer import check_mesh

        check_mesh(spec, layout)
    if any(layer.attention_type == "mla" for layer in spec.layers):
        from src.model.latent_attention import place_latents

        layout = place_latents(layout, spec)
    schedule = make_schedule(mesh, spec, layout)
    graphdef, declarations = params.abstract(functools.partial(Decoder, spec))
    quantized = Quantization()
    if step.quantization:
        from src.model import quantization

        quantized = quantization.select(step, declarations, layout)
    roles = weight_roles(declarations, step.trainable_parameters, bool(step.lora_rank))
    if step.lora_rank:
        from src.model import lora

        adapters = jax.eval_shape(lambda: lora.declare(step, declarations)(Rngs()))
        declarations = {**declarations, "lora": adapters}
        roles["lora"] = params.roles(adapters)
    shapes, axes = params.values(declarations), params.field(declarations, "out_sharding")
    shardings = weight_shardings(layout, shapes, axes)
    replicas, trainable = replica_axes(layout, shardings), Weights.split(shardings, roles).trainable
    updates, trained = trainable, Weights.split(shapes, roles).trainable
    if step.shard_optimizer_over_data:
        from src.parallel.replicas import add_mesh_axes

        updates = jax.tree.map(lambda at, shape: add_mesh_axes(at, shape.shape, replicas), trainable, trained)
    scales = {}
    if step.mup_base_emb_dim:
        from src.step import mup

        scales = mup.learning_rate_scales(step, spec, declarations)
    metrics = None
    if eval_metrics:
        from src.system.user_code import load_function

        metrics = load_function(eval_metrics, "eval_metrics")
    kernel, why_not_fused = kernel_for(step.attention, spec, batch.max_target_length, layout)
    return StepPlan(
        step=step,
        spec=spec,
        graphdef=graphdef,
        roles=roles,
        shapes=shapes,
        axes=axes,
        shardings=shardings,
        decays=params.field(declarations, "decays"),
        matrices=matrices(declarations, spec.vocab_size),
        quantization=quantized,
        layout=layout,
        execution=make_execution(step, spec, layout, schedule),
        kernel=kernel,
        why_not_fused=why_not_fused,
        packed=batch.packing,
        ramped=batch.enable_rampup_batch_size,
        fields=added_fields(batch, spec.vocab_size),
        eval_metrics=metrics,
        accumulation=Accumulation(
            layout, step.gradient_accumulation_steps, replicas, schedule is not None, trainable, updates
        ),
        rules=optimizer_rules.assign_rules(step, trained, scales),
    )
