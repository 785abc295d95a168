"""Qwen 2 and 2.5, a Llama with biases on queries, keys and values; Qwen 3, with norms of each head, and its MoE.

Qwen3-Next has gated delta nets in three of four layers, and gated attention in the others; all layers have experts.
"""

from dataclasses import replace

from src.extras.hf import fields, tensors
from src.extras.hf.family import Family, Field, FieldGroup, Json, Keys, Layers, count_entry, entry, layer_with, require
from src.system.errors import UserError

LINEAR, SHARED_SIZE = "linear_attention", "shared_expert_intermediate_size"
WINDOWS = "use_sliding_window sliding_window"


def _check_windows(hf: Json, keys: Keys) -> None:
    first = entry(hf, "max_window_layers", 28)
    fields.check_no_windows(hf, [i >= first for i in range(keys["base_num_decoder_layers"])])


NO_WINDOWS = FieldGroup(f"{WINDOWS} max_window_layers layer_types", _check_windows)
QWEN3 = Family(
    model_type="qwen3",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS, NO_WINDOWS),
    tensors=(*tensors.DECODER, *tensors.HEAD_NORMS, *tensors.FEED_FORWARD),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    keys={"qk_norm": "head"},
)
QWEN2 = replace(
    QWEN3,
    model_type="qwen2",
    fields=(*fields.DECODER, fields.rope(), NO_WINDOWS),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    keys={"attention_bias": True, "attention_out_bias": False},
)


def _read_layers(hf: Json, keys: Keys) -> Keys:
    require(hf, head_dim=keys["head_dim"])  # transformers has no default for null
    dense, step = entry(hf, "mlp_only_layers", []), count_entry(hf, "decoder_sparse_step", 1)
    layers = range(keys["base_num_decoder_layers"])
    return fields.layer_pattern([{"num_experts": 1} if i in dense or (i + 1) % step else {} for i in layers])


def _read_next_layers(hf: Json, keys: Keys) -> Keys:
    every, count = count_entry(hf, "full_attention_interval", 4), keys["base_num_decoder_layers"]
    default = [LINEAR if (i + 1) % every else fields.GLOBAL for i in range(count)]
    mixers = [
        {"attention_type": "gated_delta"} if kind == LINEAR else {}
        for kind in fields.read_layer_types(hf, default, LINEAR, fields.GLOBAL)
    ]
    segments = _read_layers(hf, keys).get("decoder_segments") or [{"pattern": [{}]}] * count
    return fields.layer_pattern([mixer | entry["pattern"][0] for mixer, entry in zip(mixers, segments, strict=True)])


def _read_shared_expert(hf: Json, keys: Keys) -> Keys:
    size, expert = count_entry(hf, SHARED_SIZE, 512), keys["base_moe_mlp_dim"]
    if size % expert:
        raise UserError(f"config.json has {SHARED_SIZE} {size}: expected a multiple of moe_intermediate_size {expert}")
    return {"shared_experts": size // expert}


def _write_shared_expert(layers: Layers) -> Json:
    layer = layer_with(layers, "shared_experts")
    return {SHARED_SIZE: layer.shared_experts * layer.base_moe_mlp_dim}


def _write_layers(layers: Layers) -> Json:
    dense = [i for i, layer in enumerate(layers) if layer.num_experts == 1]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERTS = (
    *fields.rows(
        """
        num_experts_per_tok
        moe_intermediate_size  base_moe_mlp_dim
        num_experts
        """
    ),
    Field("norm_topk_prob", "norm_topk_prob", absent=False),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    fields=(
        *(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS, *EXPERTS),
        FieldGroup(WINDOWS, lambda hf, keys: fields.check_no_windows(hf, [True] * keys["base_num_decoder_layers"])),
        FieldGroup("decoder_sparse_step mlp_only_layers", _read_layers, _write_layers),
    ),
    tensors=(*QWEN3.tensors, *tensors.EXPERTS),
    defaults={
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 4096},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 128},
    },
    keys=QWEN3.keys,
    inert="max_window_layers",  # with windows, every layer would have one
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes this name
)

DELTA_SIZES = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
DELTA_SIZES |= {"conv_kernel_dim": 4}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    fields=(
        *(*fields.DECODER, fields.rope(partial=0.25), *EXPERTS),
        *(Field(f"linear_{name}", f"gdn_{name}") for name in DELTA_SIZES),
        FieldGroup(SHARED_SIZE, _read_shared_expert, _write_shared_expert),
        FieldGroup(
            "decoder_sparse_step mlp_only_layers layer_types full_attention_interval",
            _read_next_layers,
            lambda layers: {**_write_layers(layers), **fields.write_layer_types(layers, "gated_delta", LINEAR)},
        ),
    ),
    tensors=(
        *tensors.rows(
            """
            attention.qkv             linear_attn.in_proj_qkvz.weight                 (K X*|Z) D -> D K X
            attention.gate            linear_attn.in_proj_qkvz.weight                 (K X|Z*) D -> D K Z if qkv
            attention.write_gate      linear_attn.in_proj_ba.weight                   (K B*|A) D -> D K B
            attention.decay_gate      linear_attn.in_proj_ba.weight                   (K B|A*) D -> D K A
            attention.conv            linear_attn.conv1d.weight                       Y I C -> Y I C
            attention.log_rate        linear_attn.A_log                               (K A) -> K A
            attention.decay_bias      linear_attn.dt_bias                             (K A) -> K A
            attention.out_norm        linear_attn.norm.weight                         H -> H
            attention.out             linear_attn.out_proj.weight                     D (K Z) -> K Z D if qkv
            attention.query           self_attn.q_proj.weight                         (N H*|G) D -> D N H
            attention.gate            self_attn.q_proj.weight                         (N H|G*) D -> D N G
            feed_forward.shared.wi    mlp.shared_expert.{A:gate_proj,up_proj}.weight  F D -> D A F
            feed_forward.shared.wo    mlp.shared_expert.down_proj.weight              D F -> F D
            feed_forward.shared_gate  mlp.shared_expert_gate.weight                   O D -> D O
            """
        ),
        *(*tensors.DECODER, *tensors.HEAD_NORMS, *tensors.FEED_FORWARD, *tensors.EXPERTS),
    ),
    defaults={
        **{"num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6, "norm_topk_prob": True},
        **{"num_experts_per_tok": 10, "moe_intermediate_size": 512, "num_experts": 512},
        **{f"linear_{name}": size for name, size in DELTA_SIZES.items()},
    },
    keys={"qk_norm": "head", "attention_gate": True, "shared_expert_gate": True, "normalization_scale_offset": 1.0},
    only={"attention_bias": False, "hidden_act": "silu"},
    aliases=QWEN3_MOE.aliases,
    mtp_prefix="mtp.",
)
