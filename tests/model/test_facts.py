"""Every fact of a layer does something to each kind of attention, or is refused by it."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from src.config.model_keys import AttentionSettings, LayerSize
from src.config.schema import KEYS, keys_of
from src.model.params import Weights
from src.model.parts import MIXERS
from src.model.spec import layer_models
from src.step.loss import next_token_loss
from src.system.errors import UserError
from tests.tiny import load, make, spec_of

LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 12}
KINDS = {
    "global": {},
    "local_sliding": {"sliding_window_size": 4},
    "chunk": {"chunk_attn_window_size": 4},
    "mla": LATENT,
    "gated_delta": {
        **{"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 6, "gdn_value_head_dim": 8},
        "gdn_conv_kernel_dim": 3,
    },
}
ATTENTION_FACTS = [field.name for field in dataclasses.fields(AttentionSettings)]
LAYER_FACTS = {key.name for key in KEYS.values() if key.per_layer}
FACTS = ("base_num_query_heads", "base_num_kv_heads", *ATTENTION_FACTS[1:])


def other_value(key, value):
    """Another value of a key than the one given, of its type."""
    if isinstance(value, str):
        return next(choice for choice in KEYS[key].allowed if choice != value and choice != "none")
    if key in ("dropout_rate", "partial_rotary_factor"):
        return 0.5
    if isinstance(value, tuple):
        return tuple(2 * factor for factor in value) or (2.0,)
    return not value if isinstance(value, bool) else 2 * abs(value) or 2


def program(**facts):
    """The loss of a model of one layer as JAX traces it, and the shapes of its weights."""
    _, plan = make(base_num_decoder_layers=1, **facts)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), jax.ShapeDtypeStruct((2, 16), jnp.int32))
    batch["loss_mask"] = jax.ShapeDtypeStruct((2, 16), jnp.float32)

    def loss(weights, batch):
        return next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss

    traced = jax.make_jaxpr(loss)(plan.shapes, batch)
    return str(traced), str(plan.shapes)


def test_each_kind_of_attention_has_its_module_and_is_tested_here():
    assert KEYS["attention_type"].allowed == tuple(MIXERS) == tuple(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fact_of_attention_changes_the_model_or_is_refused(kind):
    facts = {"attention_type": kind, **KINDS[kind]}
    as_it_is, config = program(**facts), load(**facts)
    changed, refused = [], []
    for key in FACTS:
        try:
            assert program(**facts | {key: other_value(key, config[key])}) != as_it_is, key
            changed.append(key)
        except UserError:
            refused.append(key)
    assert set(KINDS[kind]) <= set(changed)
    assert len(refused) >= 4  # what belongs to other kinds, at least


LATENT_LAYER = "attention_type: mla, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8"
REFUSED_BY_LATENT = {
    "attention_bias": "true",
    "attention_gate": "true",
    "attention_sink": "true",
    "attn_logits_soft_cap": 30,
    "attn_temperature_scale": 0.1,
    "qk_norm": "head",
    "query_dim_scale": "true",
    "share_kv_projections": "true",
    "value_norm": "true",
}


@pytest.mark.parametrize(
    ("of_others", "of_its_own"),
    [
        ({"attention_bias": "true", "attention_out_bias": "false"}, "attention_bias: false"),
        ({"attn_temperature_scale": 0.1, "attn_temperature_floor": 4096}, "attn_temperature_scale: 0"),
    ],
)
def test_latent_attention_ignores_settings_of_settings_that_its_layers_do_not_have(of_others, of_its_own):
    pattern = f"[{{repeats: -1, pattern: [{{}}, {{{LATENT_LAYER}, {of_its_own}}}]}}]"
    layers = spec_of(load(decoder_segments=pattern, **of_others)).layers
    assert {layer.attention_type for layer in layers} == {"global", "mla"}


@pytest.mark.parametrize(("key", "value"), REFUSED_BY_LATENT.items())
def test_latent_attention_refuses_what_it_does_not_have(key, value):
    with pytest.raises(UserError, match=f"attention_type=mla has no {key}="):
        load(attention_type="mla", **KINDS["mla"], **{key: value})


OF_THE_MODEL = {
    *("global_parameter_scale", "base_emb_dim", "base_num_decoder_layers", "decoder_segments", "vocab_size"),
    *("trainable_position_size", "logits_via_embedding", "scale_embedding", "final_logits_soft_cap"),
    *("mtp_num_layers", "embedding_multiplier", "logits_scaling", "logits_bias"),
}


def test_every_key_about_layers_may_differ_by_layer():
    assert set(keys_of("model")) - OF_THE_MODEL == LAYER_FACTS


def test_a_model_has_no_setting_that_its_layers_may_contradict():
    """What layers and the model both need is under its own name in the model: `final_norm`, `embedding_dropout`."""
    pattern = "{base_mlp_dim: 48, attention_bias: true, normalization: layer, dropout_rate: 0.5}"
    spec = spec_of(load(decoder_segments=f"[{{pattern: [{pattern}, {{}}]}}]"))
    for key in sorted(LAYER_FACTS | {key.removeprefix("base_") for key in LAYER_FACTS}):
        with pytest.raises(AttributeError, match=key):
            getattr(spec, key)
    first, second = spec.layers
    assert (first.mlp_dim, first.attention_bias, first.normalization, first.dropout_rate) == (48, True, "layer", 0.5)
    assert (second.normalization, second.dropout_rate) == (spec.final_norm.normalization, spec.embedding_dropout)
    assert (spec.final_norm.normalization, spec.embedding_dropout) == ("rms", 0.0)


@pytest.mark.parametrize("scale", [1, 8])
def test_a_layer_has_its_sizes_and_no_key_that_they_are_computed_from(scale):
    config = load(global_parameter_scale=scale, base_num_decoder_layers=1)
    (layer,) = set(spec_of(config).layers)
    keys = {field.name for field in dataclasses.fields(LayerSize)} | OF_THE_MODEL
    assert not [key for key in keys if hasattr(layer, key)]
    sizes = (config.model.emb_dim, config.model.mlp_dim, config.model.num_query_heads, config.model.num_kv_heads)
    assert (layer.emb_dim, layer.mlp_dim, layer.num_query_heads, layer.num_kv_heads) == sizes


# A fact has effect in one of these models.
MODELS = [
    {},
    {"num_experts": 8, "num_experts_per_tok": 2, "n_routing_groups": 2, "shared_experts": 1},
    *({"attention_type": kind, **facts} for kind, facts in KINDS.items()),
    {"attention_bias": "true"},
    {"attn_temperature_scale": 0.1},
    {"rope_type": "yarn", "rope_factor": 4},
    {"rope_type": "llama3.1", "rope_factor": 4},
    {"rope_type": "longrope", "rope_short_factor": "[1, 1, 1, 1]", "rope_long_factor": "[1, 2, 3, 4]"},
]


@pytest.mark.parametrize("key", sorted(LAYER_FACTS - {"attention_type", "position_type", "mlp_activations"}))
def test_a_layer_has_its_own_value_of_a_fact(key):
    for model in MODELS:
        value = other_value(key, load(**model)[key])
        with contextlib.suppress(UserError):
            written = str(list(value) if isinstance(value, tuple) else value).lower()
            pattern = f"[{{}}, {{{key}: {written}}}]"
            config = load(decoder_segments=f"[{{pattern: {pattern}}}]", **model)
            assert [getattr(layer, key) for layer, _ in layer_models(config.model)] == [config[key], value]
            return
    raise AssertionError(f"no model takes {key}={value}")


def test_a_bias_can_be_on_queries_keys_and_values_alone():
    _, weights = program(attention_bias="true", attention_out_bias="false")
    assert "value_bias" in weights
    assert "out_bias" not in weights
