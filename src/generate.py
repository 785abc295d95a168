"""Generation on devices: the prompts at once, then a token of every row in each step, from caches."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from src.model import cache, params
from src.model.attention_kernels.choose import choose_kernel
from src.model.decoder import Decoder, empty_caches
from src.model.forward_context import Context
from src.model.layers import Execution
from src.model.spec import ModelSpec, Segment
from src.parallel.mesh import Layout, axes_of_dim, spread
from src.sampling import Sampling, draw
from src.step.plan import StepPlan

LEAST_PREFILL = 16  # tokens that prompts are padded to, at least: short ones share one program


@dataclass(frozen=True)
class Model:
    """A model's weights, and how to make a decoder of them inside a compiled function."""

    spec: ModelSpec
    layout: Layout
    execution: Execution
    kernel: str  # of the prompts
    weights: Any
    decoder: Callable[[Any], Decoder]


def in_training(plan: StepPlan, parts: tuple[Any, ...]) -> Model:
    """The model of a training step, with its weights as they are; of pipeline stages each has a part of every layer."""
    if plan.execution.schedule:
        parts = _unstaged_parts(plan, parts)
    return Model(
        plan.spec, _whole_rows(plan.layout), plan.execution, plan.kernel, parts, lambda parts: plan.decoder(*parts)
    )


def unrolled(plan: StepPlan, parts: tuple[Any, ...]) -> Model:
    """The same model with each layer's weights in arrays of their own, for speed; `parts` is used up.

    A loop over stacked weights would copy each layer's out of the stack at every token: more than the token's own
    work, which reads every weight once.
    """
    assert plan.lora is None
    spec = dataclasses.replace(plan.spec, stacked=False)
    graphdef, _ = params.abstract(lambda rngs: Decoder(spec, rngs))
    tree = params.join(*parts)
    tree["segments"] = {
        index: tree["segments"][index] if segment.shared else _unstacked(tree["segments"][index], segment)
        for index, segment in enumerate(plan.spec.plan)
    }
    return Model(
        spec,
        _whole_rows(plan.layout),
        Execution(scan_layers=False),
        plan.kernel,
        tree,
        lambda tree: nnx.merge(graphdef, tree),
    )


def _whole_rows(layout: Layout) -> Layout:
    """The layout with which no devices share a row: prompts have lengths of their own, and a step has one token."""
    return layout.without("length", "norm_length")


def _unstacked(blocks: dict[int, params.Tree], segment: Segment) -> dict[int, params.Tree]:
    """A segment's weights, [repeats, ...] by pattern position, as [1, ...] by layer."""
    layers: dict[int, dict[tuple[Any, ...], jax.Array]] = {}
    for position, block in blocks.items():
        for path, leaf in params.by_path(block).items():
            at = _unstaged(leaf.sharding, (1, *leaf.shape[1:]))
            for repeat, layer in enumerate(_split(leaf, at)):
                layers.setdefault(repeat * len(segment.pattern) + position, {})[path] = layer
            leaf.delete()  # or the whole model would be in memory twice
    return {number: params.nested(layer) for number, layer in layers.items()}


def _unstaged_parts(plan: StepPlan, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts with every weight that stages share out placed by `_unstaged`; all others are the same arrays."""
    leaves, structure = jax.tree.flatten(parts)
    axes = structure.flatten_up_to(tuple(plan.by_part(plan.axes).values()))
    staged = {index: leaves[index] for index, dims in enumerate(axes) if dims[:1] == ("layers",)}
    shardings = {index: _unstaged(leaf.sharding, leaf.shape) for index, leaf in staged.items()}
    # These alone: a compiled function copies what it hands on, and device_put between shardings goes through the host.
    moved = jax.jit(lambda staged: staged, out_shardings=shardings)(staged)
    return structure.unflatten(moved.get(index, leaf) for index, leaf in enumerate(leaves))


def _unstaged(at: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding of a weight whose layers stages share out, with another dim cut in their place.

    Each token goes through all layers: where they lie on stages, each device would gather all of them.
    """
    return spread(at.update(spec=PartitionSpec(None, *at.spec[1:])), (1, *shape[1:]), axes_of_dim(at.spec[0]))


@functools.partial(jax.jit, static_argnames="at")
def _split(stacked: jax.Array, at: jax.sharding.Sharding) -> list[jax.Array]:
    """[repeats, ...] as so many [1, ...], each placed so."""
    return [jax.lax.with_sharding_constraint(layer, at) for layer in jnp.split(stacked, len(stacked))]


class Generator:
    """Draws tokens after prompts, with a compiled prefill for each size of prompts and one step.

    Args:
        model: the weights, and how they run.
        sampling: what tokens are drawn from.
        seed: of the draws.
        length: tokens a row has at most, prompt and all: the caches' length.
        prefill_length: what prompts are padded to; -1: the power of two that holds the longest.
    """

    def __init__(self, model: Model, sampling: Sampling, seed: int, length: int, prefill_length: int = -1) -> None:
        self._model = model
        self._sampling = sampling
        self._seed = seed
        self._length = length
        self._prefill_length = prefill_length
        self._copy = model.layout.sharding(())
        self._weights_at = jax.tree.map(lambda leaf: leaf.sharding, model.weights)
        self._caches_at = [
            [{name: model.layout.sharding((None, *axes)) for name, axes in cache.axes(layer).items()} for layer in each]
            for each in (segment.pattern for segment in model.spec.plan)
        ]
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def padded(self, prompts: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as an array [B, T] padded on the right, B at least `rows`, and their lengths [B]."""
        shards = self._model.layout.shards("batch")
        B = -(-max(rows, len(prompts)) // shards) * shards
        longest = max(map(len, prompts))
        T = self._prefill_length
        if T == -1:
            T = min(max(1 << (longest - 1).bit_length(), LEAST_PREFILL), self._length)
        tokens_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            lengths_B[row] = len(prompt)
        return tokens_BT, lengths_B

    def compile(self, B: int, T: int) -> float:
        """Compiles what prompts [B, T] need; returns the seconds it took."""
        start = time.perf_counter()
        if (B, T) not in self._compiled:
            tokens_BT, one_B = jnp.zeros((B, T), jnp.int32), jnp.zeros(B, jnp.int32)
            prefill = jax.jit(
                self._prefill,
                in_shardings=(self._weights_at, *(self._copy,) * 3),
                out_shardings=(self._caches_at, self._copy, self._copy),
            )
            self._compiled[B, T] = prefill.lower(self._model.weights, tokens_BT, one_B, one_B).compile()
        if (B,) not in self._compiled:
            step = jax.jit(
                self._step,
                in_shardings=(self._weights_at, self._caches_at, *(self._copy,) * 3),
                out_shardings=(self._caches_at, self._copy, self._copy),
                donate_argnums=1,
            )
            one_B = jax.ShapeDtypeStruct((B,), jnp.int32)
            caches = jax.eval_shape(lambda: empty_caches(self._model.spec, B, self._length))
            self._compiled[B,] = step.lower(self._model.weights, caches, one_B, one_B, one_B).compile()
        return time.perf_counter() - start

    def tokens(self, tokens_BT: np.ndarray, lengths_B: np.ndarray, numbers_B: np.ndarray) -> Iterator[np.ndarray]:
        """The tokens drawn after each row's prompt, int32 [B] a step, without end; `numbers_B` are `draw`'s.

        A step runs while the caller looks at the tokens of the one before.
        """
        B, T = tokens_BT.shape
        self.compile(B, T)
        prefill, step = self._compiled[B, T], self._compiled[B,]
        tokens_BT, lengths_B, numbers_B = jax.device_put((tokens_BT, lengths_B, numbers_B), self._copy)
        caches, drawn_B, positions_B = prefill(self._model.weights, tokens_BT, lengths_B, numbers_B)
        while True:
            before_B = drawn_B
            caches, drawn_B, positions_B = step(self._model.weights, caches, drawn_B, positions_B, numbers_B)
            yield np.asarray(before_B)

    def _prefill(
        self, model_weights: Any, tokens_BT: jax.Array, lengths_B: jax.Array, numbers_B: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        """The caches with the prompts in them, the first tokens drawn [B] and their positions."""
        model = self._model
        B, T = tokens_BT.shape
        tokens_BT = model.layout.constrain(tokens_BT, "batch", "length")
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        segment_ids_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
        platform = model.layout.mesh.devices.flat[0].platform
        # A fused kernel takes rows of some lengths only, and prompts are padded to lengths of their own.
        kernel = (
            "dot_product"
            if model.kernel == "dot_product"
            else choose_kernel("autoselected", platform, model.spec, T, model.layout)
        )
        context = Context(positions_BT, segment_ids_BT, model.layout, kernel, packed=False)
        decoder = model.decoder(model_weights)
        caches = empty_caches(model.spec, B, self._length)
        hidden_BTD, caches, _ = decoder(tokens_BT, context, model.execution, caches)
        last_B1D = jnp.take_along_axis(hidden_BTD, lengths_B[:, None, None] - 1, axis=1)
        logits_BV = decoder.logits(last_B1D, context)[:, 0]
        return caches, draw(logits_BV, self._sampling, self._seed, numbers_B, lengths_B), lengths_B

    def _step(
        self, model_weights: Any, caches: Any, tokens_B: jax.Array, positions_B: jax.Array, numbers_B: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        """The caches with these tokens in them, the tokens drawn after them [B] and their positions."""
        model = self._model
        tokens_B1 = model.layout.constrain(tokens_B[:, None], "batch", "length")
        positions_B1 = positions_B[:, None]
        context = Context(
            positions_B1, jnp.ones_like(tokens_B1), model.layout, model.kernel, packed=False, decoding=True
        )
        decoder = model.decoder(model_weights)
        hidden_B1D, caches, _ = decoder(tokens_B1, context, model.execution, caches)
        logits_BV = decoder.logits(hidden_B1D, context)[:, 0]
        return caches, draw(logits_BV, self._sampling, self._seed, numbers_B, positions_B + 1), positions_B + 1
