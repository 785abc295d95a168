"""Tiny random models of every family as transformers makes them, and the same models here, through their saved files.

Sizes are awkward on purpose: head sizes that are not width over heads, hardly two sizes of a model alike, vocabularies
of odd size. Windows, chunks, the length before rotary positions were stretched, and the floor of Llama 4's temperature
are all shorter than LENGTH, so texts go past them.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from src.extras.generation.generate import empty_caches
from src.extras.hf.load import load_weights
from src.model.forward_context import ForwardContext
from src.model.params import Weights
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.trace import plan_step
from tests.tiny import BASE

torch.set_num_threads(1)  # more only wait for each other in models as small as these
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH = 27

SIZES = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 3e-4,
    "max_position_embeddings": 64,
}
LLAMA3_POSITIONS = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    # Half of the pairs of a head are between those that are stretched and those that are not.
    "rope_theta": 50.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}
LLAMA4 = {
    **SIZES,
    "model_type": "llama4_text",
    "num_hidden_layers": 5,
    "intermediate_size_mlp": 44,
    "num_local_experts": 5,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "attn_scale": 0.3,
}
LATENT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 3e-4,  # the latents' norms have 1e-6 in transformers, whatever config.json says
    "max_position_embeddings": 64,
    "q_lora_rank": 22,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
}

# Name -> config.json, in transformers' names.
CONFIGS = {
    "llama2": {**SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "llama-biases": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3.1": {**SIZES, "model_type": "llama", "rope_parameters": LLAMA3_POSITIONS, "tie_word_embeddings": True},
    "llama4-scout": {
        **LLAMA4,
        # The published one's factors are equal, too.
        "rope_parameters": {**LLAMA3_POSITIONS, "high_freq_factor": 1.0, "factor": 16.0},
    },
    "llama4-maverick": {
        **LLAMA4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "attention_bias": True,
    },
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 7},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma": {**SIZES, "model_type": "gemma", "num_key_value_heads": 1},
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "query_pre_attn_scalar": 17,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
    },
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "sliding_window": 7,
        "query_pre_attn_scalar": 17,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
        },
    },
    "gemma4": {
        **SIZES,
        "model_type": "gemma4_text",
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 3,
        "global_head_dim": 28,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 2.5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.3},
        },
    },
    # As saved without `attention_k_eq_v`, with positions that are stretched too, and biases.
    "gemma4-values": {
        **SIZES,
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "global_head_dim": 16,
        "attention_bias": True,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "proportional", "rope_theta": 30.0, "factor": 3.0},
            "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "deepseek2-lite": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
    },
    "deepseek3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "qwen3": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3-next": {
        **SIZES,
        "model_type": "qwen3_next",
        "num_hidden_layers": 5,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        "linear_key_head_dim": 9,
        "linear_value_head_dim": 7,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
    },
    "olmo2": {**{name: size for name, size in SIZES.items() if name != "head_dim"}, "model_type": "olmo2"},
    "gpt-oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 0.6,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "gpt3": {
        "model_type": "gpt2",
        "vocab_size": 101,
        "n_positions": 64,
        "n_embd": 40,
        "n_inner": 58,
        "n_layer": 3,
        "n_head": 5,
        "layer_norm_epsilon": 3e-4,
        "activation_function": "gelu_new",
        "bos_token_id": None,
        "eos_token_id": None,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


CONFIGS |= {
    "qwen2": {**{name: size for name, size in SIZES.items() if name != "head_dim"}, "model_type": "qwen2"},
    "mistral-small3": {**SIZES, "model_type": "mistral", "sliding_window": None, "rope_theta": 1e8},
    "olmo3": {
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {**YARN, "attention_factor": 0.8},
        },
    },
    "phi3": {**SIZES, "model_type": "phi3", "sliding_window": 7},
    "phi4-mini": {
        **SIZES,
        "model_type": "phi3",
        "tie_word_embeddings": True,
        "hidden_size": 60,
        "original_max_position_embeddings": 9,  # of which all texts have more
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.8,
            "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1, 2.5, 4.0, 4.5],
        },
    },
    "smollm3": {**SIZES, "model_type": "smollm3", "num_hidden_layers": 5},
    "granite": {
        **SIZES,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
    "glm": {**SIZES, "model_type": "glm", "head_dim": 12},
    "glm4": {**SIZES, "model_type": "glm4", "head_dim": 12},
    "glm4.5": {
        **SIZES,
        "model_type": "glm4_moe",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
        "routed_scaling_factor": 1.7,
    },
    "kimi-k2": {
        **LATENT,
        "model_type": "deepseek_v3",
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}

# Seeds with which the tests' texts leave no expert's or group's choice to rounding; 0 for the others.
SEEDS = {"deepseek2": 4, "qwen3-next": 4}
BUFFERS = ("e_score_correction_bias", "layer_scalar")  # that are a part of the model
ROUTERS = {"qwen3-next": 0.2}  # deviation of a router's weights: norms whose scales are about 1 hand it larger inputs


def reference(name):
    """transformers' model of a config, in float32, all its weights drawn: no scale is one and no bias zero."""
    config = transformers.AutoConfig.for_model(**{"pad_token_id": None, **CONFIGS[name]})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(SEEDS.get(name, 0))
    biases = [(path, buffer) for path, buffer in model.named_buffers() if path.endswith(BUFFERS)]
    with torch.no_grad():
        for path, weight in [*model.named_parameters(), *biases]:
            # Routers wider than the rest, so that their choices are clear.
            wide = ROUTERS.get(name, 0.8)
            std = wide if path.endswith((".gate.weight", ".router.weight")) else 0.3
            # What multiplies the stream layer by layer is near one: of the first layers little would be left.
            weight.normal_(float(path.endswith("layer_scalar")), std, generator=generator)
    return model.eval()


def plan_of(folder, devices=1, **overrides):
    """The plan of the model in a Hugging Face folder, on the first devices."""
    settings = {"max_target_length": LENGTH, "dtype": "float32", "matmul_precision": "highest", "remat_policy": "none"}
    keys = {"model_name": folder, **settings, "dataset_type": "synthetic", **overrides}
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in keys.items())])
    return plan_step(config, make_layout(config.mesh, jax.devices()[:devices]))


def weights_of(folder, plan):
    """The folder's weights for the plan's model."""

    def placed(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return load_weights(folder, jax.tree.map(placed, plan.shapes, plan.shardings))


def logits_of(plan, weights, tokens_BT, segment_ids_BT, positions_BT):
    """The model's logits [B, T, V] of whole rows, without the vocabulary's padding."""
    context = ForwardContext(positions_BT, segment_ids_BT, plan.layout, plan.kernel, packed=True)
    decoder = plan.decoder(Weights(weights))
    hidden_BTD, _, _ = decoder(tokens_BT, context, plan.execution)
    return decoder.logits(hidden_BTD, context)[..., : plan.spec.vocab_size]


def greedy(plan, weights, prompts, steps):
    """Texts drawn from caches: of each prompt the `steps` likeliest next tokens, and the logits [steps, V] they are of.

    The prompts, arrays of different lengths, stand in one batch, padded on the right.
    """
    lengths_B = np.array([len(prompt) for prompt in prompts])
    tokens_BT = np.stack([np.pad(prompt, (0, max(lengths_B) - len(prompt))) for prompt in prompts])

    @jax.jit
    def prefill(weights):
        decoder = plan.decoder(Weights(weights))
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        segment_ids_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
        context = ForwardContext(positions_BT, segment_ids_BT, plan.layout, plan.kernel, packed=False)
        caches = empty_caches(plan.spec, len(prompts), max(lengths_B) + steps)
        hidden_BTD, caches, _ = decoder(jnp.asarray(tokens_BT), context, plan.execution, caches)
        last_B1D = jnp.take_along_axis(hidden_BTD, lengths_B[:, None, None] - 1, axis=1)
        return decoder.logits(last_B1D, context)[:, 0, : plan.spec.vocab_size], caches

    @jax.jit
    def step(weights, token_B, position_B, caches):
        decoder, position_B1 = plan.decoder(Weights(weights)), position_B[:, None]
        context = ForwardContext(
            position_B1, jnp.ones_like(position_B1), plan.layout, plan.kernel, packed=False, decoding=True
        )
        hidden_B1D, caches, _ = decoder(token_B[:, None], context, plan.execution, caches)
        return decoder.logits(hidden_B1D, context)[:, 0, : plan.spec.vocab_size], caches

    logits_BV, caches = prefill(weights)
    tokens, logits = [], []
    for count in range(steps):
        tokens.append(np.argmax(logits_BV, axis=-1))
        logits.append(np.asarray(logits_BV))
        if count < steps - 1:
            logits_BV, caches = step(weights, tokens[-1], lengths_B + count, caches)
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


@contextlib.contextmanager
def routing_gaps():
    """Collects by how much the last expert, or group, that each token chose was ahead of the first it did not."""
    gaps, topk = [], torch.topk

    def watched(scores, k, *args, **kwargs):
        if k < scores.shape[-1]:
            best = topk(scores.detach(), k + 1, dim=-1).values
            gaps.append((best[..., k - 1] - best[..., k]).min().item())
        return topk(scores, k, *args, **kwargs)

    torch.topk = watched
    try:
        yield gaps
    finally:
        torch.topk = topk
