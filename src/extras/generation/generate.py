"""Generates tokens on devices: prefills caches with the prompts, then adds one token per sequence in each step."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from src.config.command_keys import Decoding
from src.model.cache import Cache, CacheArray
from src.model.forward_context import ForwardContext
from src.model.params import Weights
from src.model.parts import kernel_for, mixer
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import MeshLayout
from src.step.plan import StepPlan

_Next = tuple[Any, jax.Array, jax.Array, jax.Array]  # caches; tokens [B], their positions and log-probabilities
MAX_DOUBLED = 1024  # length of the longest padded prompts that get a second row on a GPU (`padded`)
MIN_PREFILL = 16  # minimum length that prompts are padded to, so that short ones share one program


# ---- Sampling


class Sampling(NamedTuple):
    """How tokens are sampled. If both limits are set, `top_k` is applied first."""

    temperature: float  # divides the logits; 0: greedy
    top_k: int  # number of most likely tokens to sample from; 0: all
    nucleus_p: float  # sample from the fewest, likeliest tokens with at least this total probability; 1: all


def sampling(decoding: Decoding) -> Sampling:
    """Converts the keys decode_sampling_* to sampling settings; a strategy ignores the other strategies' keys."""
    strategy = decoding.decode_sampling_strategy
    return Sampling(
        temperature=0.0 if strategy == "greedy" else float(decoding.decode_sampling_temperature),
        top_k=decoding.decode_sampling_top_k if strategy in ("topk", "composite") else 0,
        nucleus_p=float(decoding.decode_sampling_nucleus_p) if strategy in ("nucleus", "composite") else 1.0,
    )


def sample_tokens(
    logits_BV: jax.Array, sampling: Sampling, seed: int, indices_B: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Samples one token per row of logits, int32 [B]; at temperature 0, takes the most likely one.

    A row's random key depends only on the seed and on the row's index and position, so other rows do not affect it.
    """
    if sampling.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def sample_row(logits_V: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), position)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(sample_row)(filter_logits(logits_BV, sampling), indices_B, positions_B).astype(jnp.int32)


def log_probs(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Returns the log-probability of each row's token, in nats [B], before temperature and limits."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BV), tokens_B[:, None], axis=-1)[:, 0]


def filter_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Divides logits by the temperature, and sets tokens outside the limits to minus infinity: [B, V]."""
    V = logits_BV.shape[-1]
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < V:
        logits_BV = _likeliest(logits_BV, jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:], sampling.top_k)
    if sampling.nucleus_p < 1.0:  # of the remaining probabilities (Holtzman et al. 2019, section 3.1)
        rising_BV = jnp.sort(logits_BV, axis=-1)
        # The probability of each token and all less likely ones; the most likely token is never left out.
        below_BV = jnp.cumsum(jax.nn.softmax(rising_BV, axis=-1), axis=-1)
        left_out_B1 = jnp.sum(below_BV[:, :-1] <= 1.0 - sampling.nucleus_p, axis=-1, keepdims=True)
        logits_BV = _likeliest(logits_BV, jnp.take_along_axis(rising_BV, left_out_B1, axis=-1), V - left_out_B1)
    return logits_BV


def _likeliest(logits_BV: jax.Array, least_B1: jax.Array, count: jax.Array | int) -> jax.Array:
    """Sets all but the `count` largest logits, the last of which is `least_B1`, to minus infinity.

    Rounded logits are often equal; among equal ones, the first are kept.
    """
    larger_BV, equal_BV = logits_BV > least_B1, logits_BV == least_B1
    room_B1 = count - jnp.sum(larger_BV, axis=-1, keepdims=True)
    return jnp.where(larger_BV | (equal_BV & (jnp.cumsum(equal_BV, axis=-1) <= room_B1)), logits_BV, -jnp.inf)


# ---- Plans and weights, as generation uses them


def in_training(plan: StepPlan, weights: Weights) -> tuple[StepPlan, Weights]:
    """Adapts a plan and weights to generation: sequences, and layers over pipeline stages, are no longer sharded."""
    if plan.execution.schedule:
        from src.extras.generation.unstaged import unstaged_weights

        weights = unstaged_weights(plan, weights)
    return dataclasses.replace(plan, layout=unsplit_rows(plan.layout)), weights


def unsplit_rows(layout: MeshLayout) -> MeshLayout:
    """Removes sequence sharding from a layout: prompts have any length, and a decoding step has one token."""
    return dataclasses.replace(layout, rules={**layout.rules, "length": (), "norm_length": ()})


# ---- Caches: nested as a decoder's layers are

_map = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, CacheArray))


def cache_arrays(spec: ModelSpec, rows: int, length: int) -> list[list[dict[str, CacheArray]]]:
    """Declares caches for `rows` texts of up to `length` tokens, by group and pattern position; dim 0: repeats."""

    def declare(layer: LayerSpec, repeats: int) -> dict[str, CacheArray]:
        arrays = mixer(layer).cache_arrays(layer, rows, length)
        return {name: x._replace(shape=(repeats, *x.shape), axes=(None, *x.axes)) for name, x in arrays.items()}

    return [[declare(layer, group.repeats) for layer in group.pattern] for group in spec.layer_groups]


def empty_caches(spec: ModelSpec, rows: int, length: int) -> list[list[Cache]]:
    """Creates the caches that `cache_arrays` declares, filled with zeros."""
    return _map(lambda x: jnp.zeros(x.shape, x.dtype or spec.dtype), cache_arrays(spec, rows, length))


# ---- Generation


@dataclass
class Speed:
    """Counts seconds and the tokens processed in them."""

    compile_seconds: float = 0.0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0  # without each row's first token, which the prefill gives
    decode_seconds: float = 0.0

    def lines(self) -> list[str]:
        """Formats speeds for the user; empty if no prompt was processed."""
        if not self.prompt_tokens:
            return []
        lines, decoded = [f"compiled in {self.compile_seconds:.1f} s"], (self.decoded_tokens, self.decode_seconds)
        for name, (count, seconds) in (("prefill", (self.prompt_tokens, self.prefill_seconds)), ("decode", decoded)):
            lines += [f"{name}: {count} tokens in {seconds:.3f} s, {count / seconds:,.1f} tokens/s"] if count else []
        return lines


@dataclass(eq=False)
class Generator:
    """Generates tokens after prompts; compiles a prefill per prompt shape, and a decoding step per number of rows."""

    plan: StepPlan
    weights: Weights
    sampling: Sampling
    seed: int  # for sampling
    length: int  # maximum tokens per sequence, prompt included: the caches' length
    prefill_length: int = -1  # length that prompts are padded to; -1: `padded` chooses it
    log_probs_B: jax.Array | None = None  # of the tokens that `tokens` yielded last, as `log_probs` returns them
    speed: Speed = dataclasses.field(default_factory=Speed)  # so far; `compile` adds its seconds, callers the rest
    _compiled: dict[tuple[int, ...], jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def padded(self, prompts: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads prompts on the right to [B, T], with B at least `rows`; also returns their lengths [B].

        Rows past the prompts are padding, with length 1; ignore their results.
        """
        shards = self.plan.layout.shards("batch")
        longest = max(map(len, prompts))
        T = self.prefill_length
        if T == -1 and self.plan.spec.has_capacity:
            T = self.length  # experts' capacity depends on this length, so it must not depend on the longest prompt
        elif T == -1:
            T = min(max(1 << (longest - 1).bit_length(), MIN_PREFILL), self.length)
        # XLA on GPUs turns a matmul with one row into products and a sum, which takes longer than one with two rows.
        # But a second row doubles the time of the prefill and the memory of the caches.
        least = 2 if self.plan.layout.platform == "gpu" and T <= MAX_DOUBLED else 1
        B = -(-max(rows, len(prompts), least * shards) // shards) * shards
        tokens_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            lengths_B[row] = len(prompt)
        return tokens_BT, lengths_B

    def compile(self, B: int, T: int) -> None:
        """Compiles the prefill for prompts [B, T], and the decoding step for B rows, if not done; adds to `speed`."""
        start = time.perf_counter()
        layout, weights = self.plan.layout, self.weights
        weight_shardings = jax.tree.map(lambda leaf: leaf.sharding, weights)
        cache_shardings = _map(lambda x: layout.sharding(x.axes), cache_arrays(self.plan.spec, 1, self.length))
        replicated, one_B = layout.sharding(()), jax.ShapeDtypeStruct((B,), jnp.int32)
        out_shardings = (cache_shardings, *(replicated,) * 3)
        if (B, T) not in self._compiled:
            in_shardings = (weight_shardings, *(replicated,) * 3)
            prefill = jax.jit(self._prefill, in_shardings=in_shardings, out_shardings=out_shardings)
            tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
            self._compiled[B, T] = prefill.lower(weights, tokens_BT, one_B, one_B).compile()
        if (B,) not in self._compiled:
            in_shardings = (weight_shardings, cache_shardings, *(replicated,) * 3)
            step = jax.jit(self._step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=1)
            caches = jax.eval_shape(lambda: empty_caches(self.plan.spec, B, self.length))
            self._compiled[B,] = step.lower(weights, caches, one_B, one_B, one_B).compile()
        self.speed.compile_seconds += time.perf_counter() - start

    def tokens(self, tokens_BT: np.ndarray, lengths_B: np.ndarray, indices_B: np.ndarray) -> Iterator[np.ndarray]:
        """Yields each row's next token, int32 [B], endlessly; `log_probs_B` then has their log-probabilities.

        `tokens_BT` and `lengths_B` are as from `padded`, `indices_B` as in `sample_tokens`.
        """
        B, T = tokens_BT.shape
        self.compile(B, T)
        prefill, step = self._compiled[B, T], self._compiled[B,]
        arrays = (tokens_BT, lengths_B, indices_B)
        tokens_BT, lengths_B, indices_B = jax.device_put(arrays, self.plan.layout.sharding(()))
        caches, next_B, positions_B, next_log_probs_B = prefill(self.weights, tokens_BT, lengths_B, indices_B)
        while True:
            last_B, last_log_probs_B = next_B, next_log_probs_B  # the next step runs while the caller handles these
            arrays = (caches, last_B, positions_B, indices_B)
            caches, next_B, positions_B, next_log_probs_B = step(self.weights, *arrays)
            self.log_probs_B = last_log_probs_B
            yield np.asarray(last_B)

    def _prefill(self, weights: Weights, tokens_BT: jax.Array, lengths_B: jax.Array, indices_B: jax.Array) -> _Next:
        """Returns caches filled with the prompts, the first new tokens [B], their positions and log-probabilities."""
        plan = self.plan
        B, T = tokens_BT.shape
        tokens_BT = plan.layout.constrain(tokens_BT, "batch", "length")
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        segment_ids_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
        kernel = plan.kernel
        if kernel != "dot_product":  # fused kernels only support some lengths, and prompts may have others
            kernel = kernel_for("autoselected", plan.spec, T, plan.layout).name
        context = ForwardContext(positions_BT, segment_ids_BT, plan.layout, kernel, packed=False)
        decoder = plan.decoder(weights)
        caches = empty_caches(plan.spec, B, self.length)
        hidden_BTD, caches, _ = decoder(tokens_BT, context, plan.execution, caches)
        last_B1D = jnp.take_along_axis(hidden_BTD, lengths_B[:, None, None] - 1, axis=1)
        logits_BV = decoder.logits(last_B1D, context)[:, 0]
        next_B = sample_tokens(logits_BV, self.sampling, self.seed, indices_B, lengths_B)
        return caches, next_B, lengths_B, log_probs(logits_BV, next_B)

    def _step(
        self, weights: Weights, caches: Any, tokens_B: jax.Array, positions_B: jax.Array, indices_B: jax.Array
    ) -> _Next:
        """Returns caches including these tokens, the next tokens [B], their positions and log-probabilities."""
        plan = self.plan
        tokens_B1 = plan.layout.constrain(tokens_B[:, None], "batch", "length")
        positions_B1 = positions_B[:, None]
        ones_B1 = jnp.ones_like(tokens_B1)
        context = ForwardContext(positions_B1, ones_B1, plan.layout, plan.kernel, packed=False, decoding=True)
        decoder = plan.decoder(weights)
        hidden_B1D, caches, _ = decoder(tokens_B1, context, plan.execution, caches)
        logits_BV = decoder.logits(hidden_B1D, context)[:, 0]
        next_B = sample_tokens(logits_BV, self.sampling, self.seed, indices_B, positions_B + 1)
        return caches, next_B, positions_B + 1, log_probs(logits_BV, next_B)
