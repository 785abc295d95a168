"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464, section 3.4), as in Qwen3-Next.

Letters in addition to those in src/model/spec.py: K key heads, each with G value heads, H size of queries and keys, P
of values, X = 2 H + Z size of a key head's query, key and values, Z = G P of its values, C tokens of the convolution.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.attention_kernels.delta_rule import in_chunks, one_token
from src.model.cache import Cache, CacheArray
from src.model.costs import Costs
from src.model.forward_context import ForwardContext
from src.model.norm import rms_normalise
from src.model.params import Rngs, matmul, weight
from src.model.spec import LayerSpec
from src.system.errors import Unsupported

HEADS = ("batch", "length", "heads", None)


class GatedDelta(nnx.Module):
    """Mixes tokens through a state [H, P] per value head, which each token decays and corrects at its key.

    The cache holds the states, and the convolution's inputs of the last C - 1 tokens; it does not grow with the
    sequence.
    """

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs) -> None:
        self.spec = spec
        emb_dim, (K, G, X, Z) = spec.emb_dim, _sizes(spec)
        C, constant = spec.gdn_conv_kernel_dim, {"dtype": dtype, "decays": False}
        self.qkv = weight(rngs, (emb_dim, K, X), ("embed", "heads", "head_dim"), dtype, fan_in=(0,))
        self.gate = weight(rngs, (emb_dim, K, Z), ("embed", "heads", "head_dim"), dtype, fan_in=(0,))
        self.write_gate = weight(rngs, (emb_dim, K, G), ("embed", "heads", "head_dim"), dtype, fan_in=(0,))
        self.decay_gate = weight(rngs, (emb_dim, K, G), ("embed", "heads", "head_dim"), dtype, fan_in=(0,))
        # One kernel for all heads: queries, then keys, then values. Not a matmul: it is not quantized or adapted.
        self.conv = weight(rngs, (K * X, 1, C), (None, None, None), dtype, scale=C**-0.5)
        # Rates are spaced evenly over (0, 16), from which the published code samples them uniformly.
        rates = np.log(16 * (np.arange(K * G) + 0.5) / (K * G)).reshape(K, G)
        self.log_rate = weight(rngs, (K, G), ("heads", None), constant=rates, **constant)
        self.decay_bias = weight(rngs, (K, G), ("heads", None), constant=1.0, **constant)
        self.out_norm = weight(rngs, (spec.gdn_value_head_dim,), (None,), constant=1.0, **constant)
        self.out = weight(rngs, (K, Z, emb_dim), ("heads", "head_dim", "embed"), dtype, fan_in=(0, 1), scale=out_scale)

    @staticmethod
    def costs(spec: LayerSpec) -> Costs:
        """Declares the layer's activations and the arrays that remat policies save; counts the rule token by token."""
        K, _, X, Z = _sizes(spec)
        saved_by = {"qkv": ("value_proj",), "gate": ("query_proj",), "out": ("out_proj",)}
        # Decay, reading, writing and output take 8 operations per element of the states; the convolution, 2 per weight.
        # Matmuls within a chunk are not counted.
        products = 8.0 * K * Z * spec.gdn_key_head_dim + 2.0 * spec.gdn_conv_kernel_dim * K * X
        width = K * (2 * X + 2 * Z)  # before and after the convolution; the gate, and the array that it multiplies
        return Costs(width, {"heads": (K,)}, saved_by, output_weight="out", other_flops=products)

    @staticmethod
    def cache_arrays(spec: LayerSpec, rows: int, length: int) -> dict[str, CacheArray]:
        """Declares the cache for `rows` sequences, of any length."""
        K, G, X, _ = _sizes(spec)
        state = (rows, K, G, spec.gdn_key_head_dim, spec.gdn_value_head_dim)
        tail = (rows, spec.gdn_conv_kernel_dim - 1, K, X)
        return {
            "state": CacheArray(state, ("batch", "heads", None, None, None), "float32"),
            "tail": CacheArray(tail, ("batch", None, "heads", None)),
        }

    def __call__(self, x_BTD: Array, context: ForwardContext, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Maps [B, T, D] to [B, T, D]; also returns the updated cache (None without a cache).

        Raises Unsupported if the mesh shards T.
        """
        layout, (B, T, _) = context.layout, x_BTD.shape
        if layout.shards("length") > 1:
            raise Unsupported(
                f"devices share sequences ({layout.sharded_by('length')}), but attention_type=gated_delta passes a "
                "state from token to token: set ici_context_parallelism=1 and dcn_context_parallelism=1"
            )
        qkv_BTKX = layout.constrain(matmul(x_BTD, self.qkv[...], "BTD,DKX->BTKX"), *HEADS)
        qkv_BTKX = checkpoint_name(qkv_BTKX, "value_proj")
        gate_BTKZ = layout.constrain(matmul(x_BTD, self.gate[...], "BTD,DKZ->BTKZ"), *HEADS)
        gate_BTKZ = checkpoint_name(gate_BTKZ, "query_proj").astype(jnp.float32)
        old = cache if cache and context.decoding else _empty(self.cache_arrays(self.spec, B, T), x_BTD, context)
        past_BtKX = jnp.concatenate([old["tail"], qkv_BTKX], axis=1)  # from C - 1 tokens before the first
        documents_BT = _documents(context.segment_ids_BT)
        q_BTKH, k_BTKH, v_BTKGP = self._convolve(past_BtKX, documents_BT)
        gates_BTKG = self._gates(x_BTD, context.segment_ids_BT > 0)
        if context.decoding:
            of_token = (x[:, 0] for x in (q_BTKH, k_BTKH, v_BTKGP, *gates_BTKG))
            out_BKGP, state = one_token(*of_token, S_BKGHP=old["state"])
            out_BTKGP = out_BKGP[:, None]
        else:
            out_BTKGP, state = in_chunks(q_BTKH, k_BTKH, v_BTKGP, *gates_BTKG, documents_BT, old["state"])
        if cache is not None:  # keep the inputs of the last C - 1 real tokens; padding is on the right
            last_Bt = jnp.sum(context.segment_ids_BT > 0, axis=1, keepdims=True) + jnp.arange(old["tail"].shape[1])
            tail = jnp.take_along_axis(past_BtKX, last_Bt[:, :, None, None], axis=1)
            cache = {"state": state, "tail": tail.astype(old["tail"].dtype)}
        out_BTKGP = rms_normalise(out_BTKGP, self.spec.normalization_layer_epsilon)
        out_BTKGP = out_BTKGP * self.out_norm[...].astype(jnp.float32)
        out_BTKZ = (out_BTKGP.reshape(gate_BTKZ.shape) * jax.nn.silu(gate_BTKZ)).astype(x_BTD.dtype)
        out_BTKZ = checkpoint_name(layout.constrain(out_BTKZ, *HEADS), "context")
        out_BTD = context.reduce_scatter_sequence(matmul(out_BTKZ, self.out[...], "BTKZ,KZD->BTD"))
        return checkpoint_name(out_BTD, "out_proj"), cache

    def _convolve(self, past_BtKX: Array, documents_BT: Array) -> tuple[Array, Array, Array]:
        """Convolves each token with the C - 1 before it in its document, and applies SiLU: q, k and v in float32.

        Keys have the norm 1, queries the norm 1 / sqrt(H).
        """
        (K, G, _, _), H, T = _sizes(self.spec), self.spec.gdn_key_head_dim, documents_BT.shape[1]
        C = self.spec.gdn_conv_kernel_dim
        queries, keys, values = jnp.split(self.conv[...].astype(jnp.float32)[:, 0], [K * H, 2 * K * H])
        kernel_KXC = jnp.concatenate([part.reshape(K, -1, C) for part in (queries, keys, values)], axis=1)
        # Tokens before the first belong to its document while decoding, and are zeros otherwise.
        documents_Bt = jnp.pad(documents_BT, ((0, 0), (C - 1, 0)), mode="edge")
        out_BTKX = jnp.zeros((), jnp.float32)
        for at in range(C):
            own_BT11 = (documents_Bt[:, at : at + T] == documents_BT)[..., None, None]
            out_BTKX += jnp.where(own_BT11, past_BtKX[:, at : at + T].astype(jnp.float32), 0.0) * kernel_KXC[..., at]
        q_BTKH, k_BTKH, v_BTKZ = jnp.split(jax.nn.silu(out_BTKX), [H, 2 * H], axis=-1)
        v_BTKGP = v_BTKZ.reshape(*v_BTKZ.shape[:3], G, -1)
        return _unit(q_BTKH) * H**-0.5, _unit(k_BTKH), v_BTKGP

    def _gates(self, x_BTD: Array, non_padding_BT: Array) -> tuple[Array, Array]:
        """Computes each token's log-decay and the strength of its correction, [B, T, K, G] each; 0 for padding."""
        write_BTKG, decay_BTKG = (
            matmul(x_BTD, kernel[...], "BTD,DKG->BTKG").astype(jnp.float32)
            for kernel in (self.write_gate, self.decay_gate)
        )
        rate_KG, bias_KG = (each[...].astype(jnp.float32) for each in (self.log_rate, self.decay_bias))
        log_decay_BTKG = -jnp.exp(rate_KG) * jax.nn.softplus(decay_BTKG + bias_KG)
        real_BT11 = non_padding_BT[..., None, None]
        return jnp.where(real_BT11, log_decay_BTKG, 0.0), jnp.where(real_BT11, jax.nn.sigmoid(write_BTKG), 0.0)


def _sizes(spec: LayerSpec) -> tuple[int, int, int, int]:
    """Sizes K, G, X and Z of a layer."""
    K, G = spec.gdn_num_key_heads, spec.gdn_num_value_heads // spec.gdn_num_key_heads
    Z = G * spec.gdn_value_head_dim
    return K, G, 2 * spec.gdn_key_head_dim + Z, Z


def _documents(segment_ids_BT: Array) -> Array:
    """Numbers a sequence's documents from 1; padding joins the document before it, and leaves its state unchanged."""
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum((segment_ids_BT != before_BT) & (segment_ids_BT > 0), axis=1)


def _empty(arrays: dict[str, CacheArray], x: Array, context: ForwardContext) -> Cache:
    zeros = {name: jnp.zeros(array.shape, array.dtype or x.dtype) for name, array in arrays.items()}
    return {name: context.layout.constrain(zeros[name], *array.axes) for name, array in arrays.items()}


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
