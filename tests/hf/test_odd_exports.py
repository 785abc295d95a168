"""Models that differ from a family's in one key: what is exported transformers computes the same, all else is refused.

Each family's tiny model is varied by every key that describes a model. What is exported is compared: variations of
different keys together, in as few models as go.
"""

import json
import re

import jax
import numpy as np
import pytest
import torch
import transformers

from src.config.schema import keys_of
from src.config.yaml import dump
from src.extras.evaluation.scoring import compute_logits
from src.extras.generation.loaded_model import inference_plan
from src.extras.hf.families import FAMILIES
from src.extras.hf.model_keys import find_family
from src.extras.hf.save import save_folder
from src.model import params
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.system.errors import UserError
from tests.hf import saved
from tests.tiny import BASE, spec_of

LENGTH = 16
ROPE = {"original_max_position_embeddings": 8, "rope_max_timescale": 50.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 12}
LATENT = {"attention_type": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DELTA = {"attention_type": "gated_delta", "gdn_num_key_heads": 2, "gdn_num_value_heads": 6}
DELTA |= {"gdn_key_head_dim": 5, "gdn_value_head_dim": 7}
# Several odd values of one key, or of keys that go together.
VARIATIONS = (
    *({"base_emb_dim": 40}, {"base_mlp_dim": 28}, {"base_num_query_heads": 8}, {"base_num_query_heads": 5}),
    *({"base_num_kv_heads": 1}, {"head_dim": 6}, {"vocab_size": 101}, {"global_parameter_scale": 4}),
    *({"base_num_decoder_layers": 2, "decoder_segments": [{"repeats": 2, "shared": True, "pattern": [{}]}]},),
    *({"normalization": "layer"}, {"normalization_layer_epsilon": 0.01}, {"normalization_scale_offset": 0.5}),
    *({"normalization_scale_offset": 1.0}, {"normalization_placement": "after"}, {"normalization_placement": "both"}),
    *({"normalization_placement": "before"}, {"logits_via_embedding": True}, {"logits_via_embedding": False}),
    *({"scale_embedding": True}, {"scale_embedding": False}, {"final_logits_soft_cap": 2.0}, {"mtp_num_layers": 1}),
    *({"final_logits_soft_cap": 0.0}, {"attn_logits_soft_cap": 0.0}, {"attn_logits_soft_cap": 1.5}),
    *({"attention_type": "local_sliding", "sliding_window_size": 3}, {"sliding_window_size": 4}, LATENT),
    *({"attention_type": "chunk", "chunk_attn_window_size": 4}, {"chunk_attn_window_size": 5}),
    *({"attention_bias": True}, {"attention_bias": False}, {"attention_sink": True}, {"attention_sink": False}),
    *({"attention_bias": True, "attention_out_bias": False}, {"attention_out_bias": False}),
    *({"query_pre_attn_scalar": 3.0}, {"query_pre_attn_scalar": 3.5}, {"query_pre_attn_scalar": 0.0}),
    *({"qk_norm": kind} for kind in ("none", "head", "all_heads", "l2")),
    *({"attn_temperature_scale": 0.0}, {"attn_temperature_scale": 0.5}, {"attn_temperature_floor": 3}),
    *({"q_lora_rank": 0}, {"q_lora_rank": 20}, {"kv_lora_rank": 20}, {"qk_nope_head_dim": 6}),
    *({"qk_rope_head_dim": 6}, {"v_head_dim": 10}, {"latent_norm_epsilon": 0.01}),
    *({"position_type": "learned", "trainable_position_size": 40}, {"trainable_position_size": 50}),
    *({"position_type": "sinusoidal"}, {"position_type": "none"}, {"position_type": "rope"}),
    *({"rope_max_timescale": 300.0}, {"rope_interleave": True}, {"rope_interleave": False}),
    *({"partial_rotary_factor": 0.5}, {"rope_type": "default"}, {"rope_type": "linear", "rope_factor": 3.0}),
    {**ROPE, "rope_type": "llama3.1", "rope_factor": 6.0, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0},
    *(
        {**ROPE, "rope_type": "yarn", "rope_factor": 2.5, **more}
        for more in ({"rope_truncate": False}, {"mscale": 1.0}, {"rope_attention_factor": 0.8})
    ),
    {**ROPE, "rope_type": "dynamic", "rope_factor": 2.5},
    *(
        {
            **ROPE,
            "rope_type": "longrope",
            "rope_short_factor": [1.0] * pairs,
            "rope_long_factor": [1, 3, 4, 5, 5][:pairs],
        }
        for pairs in (3, 5)
    ),
    *({"embedding_multiplier": 3.0}, {"residual_multiplier": 0.4}, {"logits_scaling": 2.5}),
    *({"query_dim_scale": True}, {"logits_bias": True}),
    *({key: on} for key in ("share_kv_projections", "value_norm", "layer_scalar") for on in (True, False)),
    *({"rope_type": "proportional", **share} for share in ({"partial_rotary_factor": 0.5}, {"rope_factor": 3.0})),
    *(DELTA, {"gdn_num_key_heads": 3}, {"gdn_num_value_heads": 4}, {"gdn_key_head_dim": 8}, {"gdn_value_head_dim": 6}),
    *({"gdn_conv_kernel_dim": 2}, {"attention_gate": True}, {"attention_gate": False}),
    *({"shared_expert_gate": True}, {"shared_expert_gate": False}),
    *({"mlp_activations": kind} for kind in (["gelu", "linear"], ["relu", "linear"], ["linear", "silu"], ["relu"])),
    *(
        {"mlp_activations": kind}
        for kind in (["squared_relu"], ["quick_gelu", "plus_one"], ["silu", "linear", "linear"])
    ),
    *({"mlp_activations_limit": 0.5}, {"mlp_bias": True}, {"mlp_bias": False}, EXPERTS),
    *({**EXPERTS, "norm_topk_prob": True}, {"num_experts": 1}, {"num_experts": 8}, {"num_experts_per_tok": 1}),
    *({"num_experts_per_tok": 3}, {"base_moe_mlp_dim": 16}, {"shared_experts": 0}, {"shared_experts": 3}),
    *(
        {"routed_score_func": "sigmoid"},
        {"routed_score_func": "softmax"},
        {"router_bias": True},
        {"router_bias": False},
    ),
    *({"routed_bias": True}, {"routed_bias": False}, {"n_routing_groups": 2, "topk_routing_group": 2}),
    *(
        {"n_routing_groups": 1, "topk_routing_group": 1},
        {"routing_group_score": "top2"},
        {"routing_group_score": "max"},
    ),
    *({"norm_topk_prob": True}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.7}),
    *({"scale_expert_inputs": True}, {"scale_expert_inputs": False}, {"capacity_factor": 1.0}),
)
# What one layer alone may have otherwise.
OF_A_LAYER = (
    *({"attention_type": "local_sliding", "sliding_window_size": 3}, {"attention_type": "global"}),
    *(
        {"attention_type": "chunk", "chunk_attn_window_size": 4},
        {"sliding_window_size": 4},
        {"num_experts": 1},
        EXPERTS,
    ),
    *({"base_mlp_dim": 28}, {"rope_max_timescale": 300.0}, {"position_type": "none"}, {"qk_norm": "none"}),
    *({"rope_type": "linear", "rope_factor": 3.0}, {"normalization_layer_epsilon": 0.01}, {"num_experts_per_tok": 1}),
    *({"residual_multiplier": 0.4}, DELTA, {"attention_gate": True}, {"head_dim": 6}, {"share_kv_projections": True}),
)


def test_every_key_that_describes_a_model_is_varied():
    varied = {key for variation in VARIATIONS for key in variation}
    # A rate of the run's own; and the second of two lengths that yarn's and llama3.1's variations have together.
    assert set(keys_of("model")) - varied == {"dropout_rate", "beta_fast", "beta_slow", "mscale_all_dim"}


def family_keys(name):
    """The keys of a tiny model of a family, each layer's own in a segment of its own."""
    kind, entries = saved.CONFIGS[name]
    hf = json.loads(getattr(transformers, kind)(**entries).to_json_string(use_diff=False))
    family = next(family for family in FAMILIES if family.model_type == hf["model_type"])
    return family.read_config({**hf, "num_nextn_predict_layers": 0})


def loaded(folder, keys):
    """The config of a model of these keys; None where there can be no such model."""
    if "decoder_segments" in keys:
        plain = [
            {**entry, "pattern": [dict(facts) for facts in entry["pattern"]]} for entry in keys["decoder_segments"]
        ]
        keys = {**keys, "decoder_segments": plain}
    (folder / "m.yml").write_text("".join(f"{key}: {dump(value)}\n" for key, value in keys.items()))
    settings = ("dataset_type=synthetic", "dtype=float32", "matmul_precision=highest", "remat_policy=none")
    try:
        return resolve_config.load([BASE, f"model_name={folder}/m.yml", f"max_target_length={LENGTH}", *settings])
    except UserError:
        return None


def family_or_refusal(config):
    """(the family's model_type, "") where the model can be exported, else ("", why it can't)."""
    try:
        return find_family(config.model, LENGTH)[0].model_type, ""
    except UserError as error:
        return "", str(error)


def assert_transformers_computes_the_same(folder, config):
    family, hf = find_family(config.model, LENGTH)
    plan = inference_plan(config, make_layout(config.mesh, jax.devices()[:1]))
    rng = np.random.default_rng(0)
    arrays = {path: rng.normal(scale=0.3, size=leaf.shape) for path, leaf in params.by_path(plan.shapes).items()}
    arrays = {path: (2 * x if path[-1] == "router" else x).astype(np.float32) for path, x in arrays.items()}
    folder.mkdir()
    save_folder(folder, family, hf, arrays, config.model.vocab_size)
    tokens = (np.arange(2 * LENGTH).reshape(2, LENGTH) * 13 % saved.VOCAB).astype(np.int32)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    # No experts for all have no elements; layers that predict ahead are left out, as of published folders.
    assert not [name for name in found["missing_keys"] if model.get_parameter(name).numel()]
    ahead = f"model.layers.{len(plan.spec.layers)}."
    assert not [name for name in found["unexpected_keys"] if not name.startswith(ahead)]
    assert not found["mismatched_keys"] | set(found["error_msgs"])
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long()).logits.numpy()
    ours = compute_logits(plan, plan.split(params.nested(arrays)), tokens)
    assert np.max(np.abs(ours - theirs)) <= 2e-4 * np.std(theirs)


def variations(keys):
    """The keys that differ in each odd model."""
    layers = [{}] * keys["base_num_decoder_layers"]
    layers = [facts for entry in keys.get("decoder_segments", ()) for facts in entry["pattern"]] or layers
    yield from VARIATIONS
    for odd in OF_A_LAYER:
        changed = [layers[0], {**layers[1], **odd}, *layers[2:]]
        yield {"decoder_segments": [{"repeats": 1, "pattern": [facts]} for facts in changed]}


# The others of these are variations of these.
NAMES = [name for name in saved.CONFIGS if name not in ("llama", "deepseek_v2_lite")]
# Windows, and GPT's; experts and latents are long. The first model has as many variations together as go.
SHORT = {"gemma2": 1, "gpt2": None}


@pytest.mark.parametrize(
    ("name", "compared"),
    [*SHORT.items(), *(pytest.param(name, None, marks=pytest.mark.long) for name in NAMES if name not in SHORT)],
)
def test_an_odd_model_is_exported_as_it_is_or_refused_by_name(tmp_path, name, compared):
    keys = family_keys(name)
    config = loaded(tmp_path, keys)
    spec, own = spec_of(config), find_family(config.model, LENGTH)[0].model_type
    together, others = [{}], {}  # models of the family's own, and one for each other family
    for odd in variations(keys):
        if spec_of(config.replace(**odd)) == spec:
            continue
        kind, refusal = family_or_refusal(config.replace(**odd))
        if refusal:
            assert re.search(rf"can't express .*\b({'|'.join(keys_of('model'))})\b", refusal)
        elif loaded(tmp_path, {**keys, **odd}) is None:
            continue  # no model at all
        elif kind != own:
            others.setdefault(kind, odd)
        else:
            for group in together:
                joined = {**group, **odd}
                if group.keys() & odd.keys() or family_or_refusal(config.replace(**joined))[0] != own:
                    continue
                if loaded(tmp_path, {**keys, **joined}):
                    group.update(odd)
                    break
            else:
                together.append(dict(odd))
    for number, odd in enumerate([*together, *others.values()][:compared]):
        assert_transformers_computes_the_same(tmp_path / str(number), loaded(tmp_path, {**keys, **odd}))
