"""Declares each `attention_type`: the module that mixes a layer's tokens, and the config keys that it reads."""

from typing import NamedTuple


class AttentionType(NamedTuple):
    """Declares an `attention_type`: its module, and the keys that it reads. Keys that only others read are ignored."""

    # module:class, imported when a layer is made. The class needs `__call__`, `costs`, `cache_arrays`, and an
    # `__init__(spec, out_scale, dtype, rngs)`, in which `out_scale` multiplies the standard deviation of the output
    # projection's initial values.
    module: str
    note: str  # its line in base.yml
    needs: tuple[str, ...] = ()  # keys that only it reads, and that must not be 0
    own: tuple[str, ...] = ()  # further keys that only it reads
    # Keys of the numbers of heads; the first number is a multiple of the others.
    heads: tuple[str, ...] = ("base_num_query_heads", "base_num_kv_heads")
    head_dim: str = "head_dim"  # key of the size of the heads that RoPE rotates; "": no RoPE, no attention scores
    # The keys in `requirements.OF_SCORES` that it reads; for the others it accepts only the defaults. None: it reads
    # all, or ignores all if `head_dim` is "".
    scores: tuple[str, ...] | None = None


_ATTENTION = "src.model.attention:Attention"
ATTENTION_TYPES = {
    "global": AttentionType(_ATTENTION, "attention to all earlier tokens"),
    "local_sliding": AttentionType(_ATTENTION, "attention within a window", needs=("sliding_window_size",)),
    "chunk": AttentionType(_ATTENTION, "attention within blocks of positions", needs=("chunk_attn_window_size",)),
    "mla": AttentionType(
        "src.model.latent_attention:LatentAttention",
        "multi-head latent attention (DeepSeek V2)",
        needs=("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        own=("q_lora_rank", "latent_norm_epsilon"),
        heads=("base_num_query_heads",),
        head_dim="qk_rope_head_dim",
        scores=("query_pre_attn_scalar", "attention_out_bias", "attn_temperature_floor"),
    ),
    "gated_delta": AttentionType(
        "src.model.gated_delta:GatedDelta",
        "linear attention by the gated delta rule (Qwen3-Next)",
        own=("gdn_key_head_dim", "gdn_value_head_dim", "gdn_conv_kernel_dim"),
        heads=("gdn_num_value_heads", "gdn_num_key_heads"),
        head_dim="",
    ),
}


def keys_of_type(declared: AttentionType) -> set[str]:
    """Returns the keys in a type's `needs`, `own`, `heads` and `head_dim`, which may be "", but not in `scores`."""
    return {*declared.needs, *declared.own, *declared.heads, declared.head_dim}
