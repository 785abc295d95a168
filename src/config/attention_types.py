"""Declares each `attention_type`: the module that mixes a layer's tokens, and the keys of the model that it reads."""

from typing import NamedTuple


class AttentionType(NamedTuple):
    """Declares a value of `attention_type`. It ignores a key that no field mentions, such as another type's."""

    # A layer imports it when it is made. Blocks, caches and counts rely on its `__call__`, `costs`, `cache_arrays` and
    # `__init__`, in which `out_scale` scales the output's initial values.
    module: str  # module:class
    note: str  # its line in base.yml
    needs: tuple[str, ...] = ()  # keys that only it reads, and that must be set
    own: tuple[str, ...] = ()  # further keys that only it reads
    heads: tuple[str, ...] = ("base_num_query_heads", "base_num_kv_heads")  # the first is a multiple of the second
    head_dim: str = "head_dim"  # size of the heads that RoPE rotates; "": it has no scores and no positions
    # Keys under "Model: attention" in base.yml, without the types' own; it refuses any other. None: it has all of them.
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
    """Names the keys that a type mentions as its own or as sizes of its heads."""
    return {*declared.needs, *declared.own, *declared.heads, declared.head_dim}
