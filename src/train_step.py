"""The training step and its state: pure functions of pytrees, compiled alike by train.py and train_compile.py."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from src.accumulation import accumulate
from src.checkpoint import WEIGHTS
from src.errors import UserError
from src.matrices import matrices
from src.mesh import Layout, mesh_axes_of, spread, weight_shardings
from src.model import lora, moe, router, weights
from src.model.context import Context, even_order, in_even_order, in_text_order
from src.model.decoder import Decoder
from src.model.kernels import choose_kernel
from src.model.lora import LoraSpec
from src.model.loss import cross_entropy
from src.model.pipeline import make_schedule
from src.model.segments import Execution
from src.model.spec import ModelSpec
from src.optimizer import Hyper, clip, hyper_parameters, state_shardings, transform
from src.user_code import load_function

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run is at one step; a checkpoint holds just this."""

    step: jax.Array  # int32: updates done or skipped
    trainable: Any
    frozen: Any  # weights without gradient or optimizer state
    stats: Any  # values that the forward pass, not the gradient, updates
    opt: Any
    data_position: jax.Array  # int32 [B, sources, 2], of the rows after this step's (src/data/packing.py)


@dataclass(frozen=True)
class StepPlan:
    """What is compiled into the step: the model's structure and how it is computed."""

    spec: ModelSpec
    lora: LoraSpec | None
    graphdef: nnx.GraphDef
    parts: Any  # of each weight: trainable, frozen or stats; this and the next three are nested as all weights are
    shapes: Any
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
    matrices: Any  # of each weight, a src/matrices.py Matrix; nested as all weights are
    shard_optimizer: bool  # over the axes that copy weights too
    offload_optimizer: bool  # its state lies in host memory between updates
    seed: int

    def copied_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard rows and no weight: along them devices have copies of the weights."""
        used = {name for at in jax.tree.leaves(self.shardings) for name in mesh_axes_of(at.spec)}
        return tuple(name for name in self.layout.axes("batch") if name not in used)

    def update_shardings(self) -> Any:
        """Where the update of each trainable weight is made, and the optimizer's state of it lies."""
        shapes, placed = (self.by_part(tree)["trainable"] for tree in (self.shapes, self.shardings))
        if not self.shard_optimizer:
            return placed
        return jax.tree.map(lambda shape, at: spread(at, shape.shape, self.copied_axes()), shapes, placed)

    def init_weights(self) -> dict[str, Any]:
        """The model's initial weights by part of the state: trainable, frozen and stats."""
        tree = weights.initial(functools.partial(Decoder, self.spec), self.seed)
        return self.by_part({**tree, "lora": self.init_adapters()} if self.lora else tree)

    def init_adapters(self) -> weights.Tree:
        """The initial adapters, which change nothing."""
        _, declarations = weights.abstract(functools.partial(Decoder, self.spec))
        rngs = nnx.Rngs(params=jax.random.fold_in(jax.random.key(self.seed), 1))
        return weights.values(lora.declare(self.lora, declarations)(rngs))

    def by_part(self, tree: Any) -> dict[str, Any]:
        """A tree nested as all weights are, as one tree for each part of the state."""
        return {part: weights.select(tree, self.parts, part) for part in WEIGHTS}

    def decoder(self, *parts: Any) -> Decoder:
        """The model with the weights of these parts of the state, which make up all of them."""
        tree = weights.join(*parts)
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
    graphdef, declarations = weights.abstract(functools.partial(Decoder, spec))
    lora_spec = lora_of(config)
    parts = trained_parts(declarations, config["trainable_parameters"], lora_spec is not None)
    if lora_spec:
        adapters = jax.eval_shape(lambda: lora.declare(lora_spec, declarations)(nnx.Rngs(params=0)))
        declarations = {**declarations, "lora": adapters}
        parts["lora"] = weights.parts(adapters)
    shapes = weights.values(declarations)
    platform = layout.mesh.devices.flat[0].platform
    return StepPlan(
        spec=spec,
        lora=lora_spec,
        graphdef=graphdef,
        parts=parts,
        shapes=shapes,
        shardings=weight_shardings(layout, shapes, weights.field(declarations, "out_sharding")),
        decays=weights.field(declarations, "decays"),
        layout=layout,
        execution=Execution(config["scan_layers"], config["remat_policy"], dict(config["remat_custom"]), schedule),
        kernel=choose_kernel(config["attention"], platform, spec, config["max_target_length"], layout.shards("length")),
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
        matrices=matrices(declarations),
        shard_optimizer=config["shard_optimizer_over_data"],
        offload_optimizer=config["optimizer_memory_host_offload"],
        seed=config["init_weights_seed"],
    )


def lora_of(config: Mapping[str, Any]) -> LoraSpec | None:
    """The adapters that the config asks for; None where it asks for none."""
    if not config["lora_rank"]:
        return None
    return LoraSpec(config["lora_rank"], float(config["lora_alpha"]), tuple(map(str, config["lora_parameters"])))


def trained_parts(declarations: weights.Tree, patterns: Sequence[str], adapted: bool) -> weights.Tree:
    """The part of the state of each weight: without patterns all are trained, or none where adapters are.

    What is not trained is frozen, a router's correction bias too: it moves where it is among the trained alone.

    Raises:
        UserError: a pattern fits no weight.
    """
    parts = weights.parts(declarations)
    flat = weights.by_path(parts)
    patterns = list(map(str, patterns)) or ([] if adapted else ["*"])
    for pattern in patterns:
        if not any(weights.matches(path, [pattern]) for path in flat):
            names = sorted({weights.dotted(path[3:] if path[0] == "segments" else path) for path in flat})
            raise UserError(f"trainable_parameters: {pattern} fits no weight of {', '.join(names)}")

    def part_of(path: Any, part: str) -> str:
        return part if weights.matches(tuple(entry.key for entry in path), patterns) else "frozen"

    return jax.tree.map_with_path(part_of, parts)


def init_state(
    plan: StepPlan, hyper: Hyper, position_shape: tuple[int, ...], parts: dict[str, Any] | None = None
) -> TrainState:
    """The state before the first step, with the weights `parts`; None: the initial ones."""
    parts = parts or plan.init_weights()
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        opt=_optimizer(plan, hyper).init(parts["trainable"]),
        data_position=jnp.zeros(position_shape, jnp.int32),
        **parts,
    )


def _optimizer(plan: StepPlan, hyper: Hyper) -> optax.GradientTransformation:
    decays, matrix = (plan.by_part(tree)["trainable"] for tree in (plan.decays, plan.matrices))
    return transform(plan.opt_type, plan.mu_dtype, decays, matrix, plan.update_shardings(), hyper)


def abstract_state(plan: StepPlan, config: Mapping[str, Any], position_shape: tuple[int, ...]) -> TrainState:
    """The state's shapes and shardings, without an array: `jax.ShapeDtypeStruct`s."""
    hyper = hyper_parameters(config, 0)
    shapes = jax.eval_shape(functools.partial(init_state, plan, hyper, position_shape))
    copy = plan.layout.sharding(())
    shardings = TrainState(
        step=copy,
        opt=optimizer_shardings(plan, shapes.opt),
        data_position=plan.layout.sharding(("batch", None, None)),
        **plan.by_part(plan.shardings),
    )
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def optimizer_shardings(plan: StepPlan, opt: Any) -> Any:
    """Where the optimizer's state lies between updates: as the weights' updates are cut, or copied."""
    weights = plan.update_shardings()
    if plan.offload_optimizer:
        weights = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), weights)
    return state_shardings(opt, weights, plan.layout.sharding(()))


def batch_sharding(layout: Layout) -> dict[str, jax.sharding.NamedSharding]:
    """The placement of each array of a batch."""
    rows = layout.sharding(("batch", None))  # whole, as the sequence's order over a context axis is the step's own
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    return {**dict.fromkeys(names, rows), "data_position": layout.sharding(("batch", None, None))}


def abstract_batch(plan: StepPlan, position_shape: tuple[int, int, int], length: int) -> Batch:
    """The shapes and shardings of a batch of rows of `length` tokens, without an array: `jax.ShapeDtypeStruct`s.

    `position_shape` is `data_position`'s: rows, sources and 2.

    Raises:
        UserError: they do not divide over the mesh.
    """
    rows = position_shape[0]
    plan.layout.check((rows, length), ("batch", "length"))
    plan.layout.check((rows, length), ("batch", "norm_length"))
    even_order(length, plan.layout)
    if length % (plan.vocab_tiles * plan.layout.shards("norm_length")):
        raise UserError(
            f"max_target_length={length} does not divide into num_vocab_tiling={plan.vocab_tiles} tiles on each of the "
            f"devices that share a row ({plan.layout.sharded_by('norm_length')})"
        )
    place = batch_sharding(plan.layout)
    shapes = {name: position_shape if name == "data_position" else (rows, length) for name in place}
    dtypes = {name: jnp.float32 if name == "loss_mask" else jnp.int32 for name in place}
    return {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name], sharding=place[name]) for name in place}


def compile_steps(
    plan: StepPlan, state: TrainState, compiler_options: Mapping[str, str] | None = None
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """The jitted `train_step(state, batch, hyper)` and `eval_step(parts, batch)`; `state` gives the shardings.

    `compiler_options` are XLA's, for the first.
    """
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch, copy = batch_sharding(plan.layout), plan.layout.sharding(())
    train = jax.jit(
        functools.partial(train_step, plan=plan),
        in_shardings=(state_shardings, batch, copy),
        out_shardings=(state_shardings, copy),
        donate_argnums=0,
        compiler_options=dict(compiler_options or {}),
    )
    return train, compile_eval_step(plan, state_weights(state_shardings))


def compile_eval_step(plan: StepPlan, shardings: tuple[Any, ...]) -> jax.stages.Wrapped:
    """The jitted `eval_step(parts, batch)`, for weights of these shardings."""
    batch = {name: at for name, at in batch_sharding(plan.layout).items() if name != "data_position"}
    return jax.jit(
        functools.partial(eval_step, plan=plan),
        in_shardings=(shardings, batch),
        out_shardings=plan.layout.sharding(()),
    )


def state_weights(state: TrainState) -> tuple[Any, ...]:
    """The parts of a state that make up the model, as `StepPlan.decoder` takes them."""
    return tuple(getattr(state, part) for part in WEIGHTS)


def train_step(state: TrainState, batch: Batch, hyper: Hyper, plan: StepPlan) -> tuple[TrainState, Metrics]:
    """One update on one batch of [B, T].

    The loss is a mean over the whole batch's tokens, however they fall into micro-batches and shards. An update whose
    loss or gradient is not finite leaves weights and optimizer as they were; step and data position go on.

    Returns:
        The next state, and scalars: `loss` (nats a token), `grad_norm` (before clipping), `tokens` (that count),
        `finite` (whether the update was made), and where the model has them `load_balance_loss` and `router_z_loss`
        (sums over layers) and `mtp_loss` (of the extra prediction layers, their mean, in nats a token). With experts
        also, of each layer that has some, `expert_load_max` (the busiest one's load over the mean) and
        `tokens_dropped` (the fraction of choices).
    """
    tokens = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
    uses_dropout = plan.spec.dropout_rate > 0 or any(layer.dropout_rate > 0 for layer in plan.spec.layers)
    step_key = jax.random.fold_in(jax.random.key(plan.seed), state.step) if uses_dropout else None

    apart = plan.copied_axes() if plan.micro_batches > 1 else ()

    def micro_loss(trainable: Any, others: Any, rows: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """This micro-batch's share of the loss to descend, and of what is reported: sums over them are means."""
        frozen, stats, tokens, real = others
        decoder = plan.decoder(trainable, frozen, stats)
        loss_sum, square_sum, further_sum, reports = loss_sums(decoder, rows, plan, key)
        denominator = jnp.maximum(tokens, 1.0)
        shares = {"loss": loss_sum / denominator}
        objective = (loss_sum + plan.z_loss * square_sum) / denominator
        reports = router.totals(reports)
        if plan.spec.has_experts:
            # Of all tokens of the micro-batch, of which a device that adds up its own gradients has a part.
            whole, through_experts = jax.lax.psum((reports, jnp.sum(rows["segment_ids"] > 0)), apart)
            layers = router.by_layer(whole, through_experts)
            share = through_experts / jnp.maximum(real, 1) / plan.layout.size(apart)
            shares["load_balance_loss"] = share * jnp.sum(layers["load_balance_loss"])
            shares["router_z_loss"] = share * jnp.sum(layers["router_z_loss"])
            objective += plan.load_balance * shares["load_balance_loss"] + plan.router_z_loss * shares["router_z_loss"]
        if plan.spec.prediction_layers:
            shares["mtp_loss"] = further_sum / denominator / plan.spec.prediction_layers
            objective += plan.further_loss * shares["mtp_loss"]
        return objective, (shares, reports)

    def gradient(given: tuple[Any, Any], rows: Batch, key: jax.Array | None) -> tuple[Any, Any]:
        return jax.grad(micro_loss, has_aux=True)(*given, rows, key)

    real = jnp.sum(batch["segment_ids"] > 0)
    given = (state.trainable, (state.frozen, state.stats, tokens, real))
    rows = {name: x for name, x in batch.items() if name != "data_position"}
    if plan.micro_batches == 1:
        gradients, (losses, reports) = gradient(given, rows, step_key)
    else:
        gradients, (losses, reports) = accumulate(
            gradient, given, rows, step_key, plan.micro_batches, plan.layout, apart
        )

    weights = state.trainable
    if plan.shard_optimizer:
        # Of each copy of a weight a device updates a part, and XLA has it reduce no more of the gradient.
        gradients, weights = jax.lax.with_sharding_constraint((gradients, weights), (plan.update_shardings(),) * 2)
    grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(grad_norm)

    def updated(gradients: Any, weights: Any, opt: Any) -> tuple[Any, Any]:
        gradients = clip(gradients, grad_norm, hyper["clip"])
        updates, opt = _optimizer(plan, hyper).update(gradients, opt, weights)
        return optax.apply_updates(weights, updates), opt

    def updated_on_device(gradients: Any, weights: Any, opt: Any) -> tuple[Any, Any]:
        weights, new = updated(gradients, weights, jax.device_put(opt, jax.memory.Space.Device))
        return weights, jax.tree.map(lambda new, old: jax.device_put(new, jax.typeof(old).memory_space), new, opt)

    if plan.offload_optimizer:
        # In a branch, which is taken when all gradients are there: elsewhere XLA would have the state on the device
        # all through the step.
        trainable, opt = jax.lax.cond(
            finite, updated_on_device, lambda _, weights, opt: (weights, opt), gradients, weights, state.opt
        )
    else:
        trainable, opt = _where(finite, updated(gradients, weights, state.opt), (weights, state.opt))
    if plan.spec.has_experts:
        layers = router.by_layer(reports, real)
        losses |= {name: layers[name] for name in ("expert_load_max", "tokens_dropped")}
    stats = _where(finite, router.corrected(state.stats, reports, real, plan.bias_update_rate), state.stats)
    state = TrainState(state.step + 1, trainable, state.frozen, stats, opt, batch["data_position"])
    return state, {**losses, "grad_norm": grad_norm, "tokens": tokens, "finite": finite}


def _where(condition: jax.Array, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def eval_step(parts: tuple[Any, ...], batch: Batch, plan: StepPlan) -> Metrics:
    """The loss of a batch, without update: scalars `loss_sum` in nats and `tokens`, to be added up over batches.

    And `further`, where `eval_metrics` has metrics of its own: each a sum and the number to divide it by.
    """
    decoder = plan.decoder(*parts)
    rows, parts = shared_out(batch, plan.layout), plan.layout.shards("norm_length")
    hidden_BTD, context, _ = hidden_states(decoder, rows, plan, dropout_key=None)
    logits_of = functools.partial(decoder.logits, context=context)
    loss_sum, _ = cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)
    sums = {"loss_sum": loss_sum, "tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32)}
    if plan.eval_metrics:
        hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
        hidden_BTD = in_text_order(hidden_BTD, plan.layout.shards("length"))
        sums["further"] = _sums_and_counts(plan.eval_metrics(logits_of(hidden_BTD)[..., : plan.spec.vocab_size], batch))
    return sums


def _sums_and_counts(found: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What a user's `eval_metrics` returned. Raises UserError where it is no {name: (sum, count)}."""
    if not isinstance(found, dict) or not all(
        isinstance(pair, tuple | list) and [jnp.shape(each) for each in pair] == [(), ()] for pair in found.values()
    ):
        raise UserError(f"eval_metrics must return {{name: (sum, count)}}, scalars both: it returned {found}")
    if taken := {"loss", "perplexity"}.intersection(found):
        raise UserError(f"eval_metrics must name its metrics otherwise than {', '.join(sorted(taken))}")
    return found


def loss_sums(
    decoder: Decoder, batch: Batch, plan: StepPlan, dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Sums over a batch's tokens: of the loss in nats, of the squared log-normaliser, of the further predictions' loss.

    And the layers' reports.
    """
    rows, parts = shared_out(batch, plan.layout), plan.layout.shards("norm_length")
    ahead = [
        shared_out(shifted(batch, distance), plan.layout) for distance in range(1, plan.spec.prediction_layers + 1)
    ]
    hidden_BTD, context, reports = hidden_states(decoder, rows, plan, dropout_key)
    logits_of = functools.partial(decoder.logits, context=context)
    loss, squares = cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)
    further = jnp.zeros((), jnp.float32)
    predicted, more_reports = decoder.predict_ahead(
        hidden_BTD, [rows["tokens"] for rows in ahead], context, plan.execution
    )
    for hidden_BTD, rows in zip(predicted, ahead, strict=True):
        further += cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)[0]
    return loss, squares, further, {**reports, **more_reports}


def hidden_states(
    decoder: Decoder, batch: Batch, plan: StepPlan, dropout_key: jax.Array | None
) -> tuple[jax.Array, Context, Any]:
    """The hidden states [B, T, D] of a `shared_out` batch, what the blocks were told, and their reports."""
    context = Context(
        batch["positions"], batch["segment_ids"], plan.layout, plan.kernel, plan.packed, dropout_key=dropout_key
    )
    hidden_BTD, _, reports = decoder(batch["tokens"], context, plan.execution)
    return hidden_BTD, context, reports


def shared_out(batch: Batch, layout: Layout) -> Batch:
    """A batch's arrays [B, T] in the order of `even_order`: those of the step that has them in the text's."""
    return {name: in_even_order(x, layout) for name, x in batch.items() if name != "data_position"}


def shifted(batch: Batch, distance: int) -> Batch:
    """The tokens, targets and masks [B, T] of `distance` tokens on; masked where those are another segment's."""
    names = ("tokens", "targets", "loss_mask", "segment_ids")
    ahead = {name: jnp.roll(batch[name], -distance, axis=1) for name in names}
    length = batch["tokens"].shape[1]
    same_BT = (ahead.pop("segment_ids") == batch["segment_ids"]) & (jnp.arange(length) < length - distance)
    return {**ahead, "loss_mask": ahead["loss_mask"] * same_BT}
