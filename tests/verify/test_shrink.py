"""src/extras/verify/shrink.py: the same kinds of layers in small, of every configuration that the repository has."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from src.config.checks import check_config
from src.extras.verify.shrink import shrink
from src.extras.verify.subject import mesh_keys
from src.model.params import Weights
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.loss import next_token_loss
from src.step.trace import plan_step
from src.system.errors import Unsupported, UserError
from tests import tiny

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [path for folder in (".", "models", "recipes") for path in sorted((CONFIGS / folder).glob("*.yml"))]
NAMES = [path.stem for path in FILES]
# Latent attention and groups of experts; two mixers; three kinds, by blocks; heads of two sizes; longrope; capacity.
KINDS = ("deepseek3-671b", "qwen3-next-80b-a3b", "llama4-17b-128e", "gemma4-31b", "phi4-mini", "mixtral-8x7b-v6e-256")
LENGTH = 48
# Fields of a layer that are sizes, or follow from sizes.
SIZES = {
    *("emb_dim", "mlp_dim", "moe_mlp_dim", "num_query_heads", "num_kv_heads", "head_dim", "max_length"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "query_pre_attn_scalar"),
    *("gdn_num_key_heads", "gdn_num_value_heads", "gdn_key_head_dim", "gdn_value_head_dim", "gdn_conv_kernel_dim"),
    *("num_experts", "num_experts_per_tok", "shared_experts", "n_routing_groups", "topk_routing_group"),
    *("sliding_window_size", "chunk_attn_window_size", "attn_temperature_floor"),
    *("original_max_position_embeddings", "rope_short_factor", "rope_long_factor"),
}
SHARDED = ("emb_dim", "mlp_dim", "moe_mlp_dim", "num_query_heads", "num_kv_heads", "num_experts", "q_lora_rank")
SHARDED += ("kv_lora_rank", "gdn_num_key_heads", "gdn_num_value_heads")


@functools.cache
def config_of(name):
    path = FILES[NAMES.index(name)]
    argv = [str(CONFIGS / "base.yml"), f"model_name={name}"] if path.parent.name == "models" else [str(path)]
    return resolve_config.load(argv)


def kinds(config):
    return list(dict.fromkeys(tiny.spec_of(config).layers))


def settings(layer):
    facts = {name: value for name, value in dataclasses.asdict(layer).items() if name not in SIZES}
    return facts | {
        "shared_weights": bool(layer.shared_weights),
        "experts": layer.num_experts > 1,
        "compressed query": layer.q_lora_rank > 0,
        "grouped heads": layer.num_query_heads > layer.num_kv_heads,
        "groups of experts": layer.n_routing_groups > layer.topk_routing_group,
    }


def check(config, length=LENGTH):
    """Shrinks a configuration, checks it in every respect, and returns it."""
    small = shrink(config, length).config
    assert check_config(dict(small), set()) == []
    big_kinds, small_kinds = kinds(config), kinds(small)
    assert list(map(settings, small_kinds)) == list(map(settings, big_kinds))
    for big, layer in zip(big_kinds, small_kinds, strict=True):
        check_layer(big, layer, length)
    plan = plan_step(small, make_layout(small.mesh, jax.devices()[:1]))
    assert sum(shape.size for shape in jax.tree.leaves(plan.shapes)) < 3e6
    assert small.model.vocab_size % 128
    if all(getattr(layer, name) % 2 == 0 for layer in big_kinds for name in SHARDED if name != "num_experts"):
        sharded = small.replace(ici_tensor_parallelism=2)
        plan_step(sharded, make_layout(sharded.mesh, jax.devices()[:2]))
    return small


def check_layer(big, layer, length):
    for name in SHARDED:
        size, small = getattr(big, name), getattr(layer, name)
        assert np.gcd(small, 4) == np.gcd(size, 4), name
        assert small <= size, name
        assert min(small, 2) == min(size, 2), name
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, states = ("gdn_num_key_heads", "gdn_num_value_heads"), ("gdn_key_head_dim", "gdn_value_head_dim")
    for names in (("emb_dim", "mlp_dim", "moe_mlp_dim"), latent, heads, states):
        sizes, small = ([getattr(each, name) for name in names] for each in (big, layer))
        assert np.array_equal(np.greater.outer(sizes, sizes), np.greater.outer(small, small)), names
    if big.attention_type == "local_sliding":
        assert 1 < layer.sliding_window_size < length
        assert length % layer.sliding_window_size
    if big.attention_type == "chunk":
        assert 1 < layer.chunk_attn_window_size < length
        assert length % layer.chunk_attn_window_size
    if big.attn_temperature_scale:
        assert layer.attn_temperature_floor < length / 3
    if big.rope_type in ("llama3.1", "yarn", "dynamic", "longrope"):
        assert layer.original_max_position_embeddings < length
    if big.num_experts > 1:
        shares = [it.topk_routing_group / it.n_routing_groups for it in (layer, big)]
        left = [it.num_experts * share - it.num_experts_per_tok for it, share in zip((layer, big), shares, strict=True)]
        assert (left[0] > 0) == (left[1] > 0)
        assert min(layer.num_experts_per_tok, 2) == min(big.num_experts_per_tok, 2)
    head, big_head = (each.qk_nope_head_dim + each.qk_rope_head_dim or each.head_dim for each in (layer, big))
    if big.query_pre_attn_scalar != 1:
        assert layer.query_pre_attn_scalar / head == pytest.approx(big.query_pre_attn_scalar / big_head)


@pytest.mark.parametrize("name", [*KINDS, "base", "quickstart", "gemma-2b", "qwen2.5-0.5b", "maxtext-1024b-v5p-4096"])
def test_a_shipped_configuration_shrinks(name):
    groups, small_groups = (tiny.spec_of(each).layer_groups for each in (config_of(name), check(config_of(name))))
    assert [group.repeats for group in small_groups] == [min(group.repeats, 2) for group in groups]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_shrinks(name):
    check(config_of(name))
    check(config_of(name), 96)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("llama3.1-8b", {axis: size}) for axis, size in [("tensor", 8), ("fsdp", 8), ("stage", 4), ("context", 8)]),
        *(("mixtral-8x7b", mesh) for mesh in [{"expert": 8}]),
        ("deepseek3-671b", {"fsdp": 8}),
    ],
    ids=str,
)
def test_sizes_grow_until_a_mesh_divides_them(name, mesh):
    small = shrink(config_of(name), meshes=[mesh])
    config = small.config.replace(**mesh_keys(mesh))
    plan_step(config, make_layout(config.mesh, jax.devices()[: np.prod([*mesh.values()])]))
    assert small.kept[-1].startswith("grown until the mesh divides them: ")


def test_sizes_do_not_grow_for_a_mesh_that_the_model_cannot_have():
    config = config_of("gemma3-1b")  # one head of keys, and 26 layers in two groups
    assert shrink(config, meshes=[{"tensor": 8}]).config.model.base_num_kv_heads == 1
    staged = shrink(config, meshes=[{"stage": 8}]).config.replace(**mesh_keys({"stage": 8}))
    with pytest.raises(Unsupported, match="do not divide into 8 pipeline stages"):
        plan_step(staged, make_layout(staged.mesh, jax.devices()[:8]))


@pytest.mark.parametrize(
    "name", ["gpt3-125m", "llama3.1-8b", "qwen2.5-0.5b", "deepseek2-16b", "qwen3-30b-a3b", "gemma3-1b"]
)
def test_heads_make_up_the_width_if_they_do_in_the_model(name):
    (big, *_), (small, *_) = kinds(config_of(name)), kinds(check(config_of(name)))
    is_sum = [each.num_query_heads * (each.v_head_dim or each.head_dim) == each.emb_dim for each in (big, small)]
    assert is_sum[0] == is_sum[1]


def loss_of(config):
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:1]))
    batch = tiny.packed_rows(0, rows=2, length=LENGTH, vocab=config.model.vocab_size)
    weights = Weights(tiny.random_weights(plan))
    return float(jax.jit(lambda weights: next_token_loss(plan.decoder(weights), batch, plan).loss)(weights))


@pytest.mark.parametrize("name", KINDS)
def test_the_small_model_has_a_loss(name):
    assert 0 < loss_of(shrink(config_of(name)).config) < 1e5  # NaN is neither


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("phi4-mini", {"rope_type": "default"}),
        ("phi4-mini", {"sliding_window_size": LENGTH}),
        ("llama3.1-8b", {"rope_factor": 1.0}),
        ("kimi-k2", {"rope_type": "default", "mscale": 0.0, "mscale_all_dim": 0.0}),
        ("kimi-k2", {"num_experts_per_tok": 1}),
    ],
)
def test_a_setting_has_an_effect_in_small(name, without):
    small = shrink(config_of(name)).config
    assert loss_of(small) != pytest.approx(loss_of(small.replace(**without)), rel=1e-6)


SEGMENTS = "[{repeats: 6, shared: true, pattern: [{base_mlp_dim: 48}]}, {repeats: 2, pattern: [{}]}]"
FOUR_SEGMENTS = """[{repeats: 4, pattern: [{}]}, {pattern: [{attention_bias: true}]}, {repeats: 3, pattern: [{}]},
    {pattern: [{attention_bias: true}]}]"""

ODD_HEADS = "[{pattern: [{attention_type: gated_delta, gdn_num_key_heads: 3, gdn_num_value_heads: 12}, {}]}]"


@pytest.mark.parametrize(
    "keys",
    [
        {"decoder_segments": SEGMENTS, "base_num_decoder_layers": 8},
        {"decoder_segments": FOUR_SEGMENTS, "base_num_decoder_layers": 9},
        {"position_type": "learned", "trainable_position_size": 4096},
        {"position_type": "learned", "trainable_position_size": 16},
        {"global_parameter_scale": 8},
        {"decoder_segments": ODD_HEADS},
        {"num_experts": 12, "num_experts_per_tok": 12},
        {"num_experts": 48, "n_routing_groups": 6, "topk_routing_group": 3, "num_experts_per_tok": 5},
        {"num_experts": 16, "n_routing_groups": 4, "num_experts_per_tok": 4, "routing_group_score": "top2"},
        {"partial_rotary_factor": 0.4, "head_dim": 80},
        {"base_num_query_heads": 15, "base_num_kv_heads": 5, "base_emb_dim": 30},
        {"quantization": "fp8", "mtp_num_layers": 3, "gradient_accumulation_steps": 8},
        {"mup_base_emb_dim": 256, "base_emb_dim": 2048},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_other_models_shrink(keys):
    sizes = {"base_emb_dim": 256, "base_mlp_dim": 512, "head_dim": 32, "base_num_query_heads": 8, "vocab_size": 1000}
    config = tiny.load(**sizes | {"base_num_kv_heads": 4} | keys)
    small = check(config)
    assert small.model.emb_dim < config.model.emb_dim


def test_of_a_model_what_is_not_a_size_stays():
    config = tiny.load(lora_rank=8, lora_alpha=4.0, load_parameters_path="runs/a", base_emb_dim=256, ema_decay=0.9)
    config = config.replace(loss="src.step.loss:next_token_loss", z_loss_multiplier=0.1, opt_type="muon")
    small = shrink(config).config
    assert (small.step.lora_rank, small.step.lora_alpha) == (2, 1.0)
    assert (small.step.loss, small.step.z_loss_multiplier) == (config.step.loss, 0.1)
    assert (small.step.opt_type, small.step.ema_decay) == ("muon", 0.9)
    mup = shrink(tiny.load(mup_base_emb_dim=256, base_emb_dim=2048)).config
    assert mup.step.mup_base_emb_dim == mup.model.emb_dim // 8


def test_segments_keep_the_names_that_patterns_use():
    config = config_of("gemma3-1b")
    assert [len(group.pattern) for group in tiny.spec_of(shrink(config).config).layer_groups] == [2, 1]
    named = shrink(config.replace(trainable_parameters=("segments.0.5.*", "segments.1.*"))).config
    assert [len(group.pattern) for group in tiny.spec_of(named).layer_groups] == [6, 1]
    plan_step(named, make_layout(named.mesh, jax.devices()[:1]))  # fails if a pattern matches no weight
    four = shrink(tiny.load(decoder_segments=FOUR_SEGMENTS, base_num_decoder_layers=9)).config
    assert len(tiny.spec_of(four).layer_groups) == 4


def test_it_says_what_it_kept_and_what_it_hides():
    config, kept, hidden = shrink(
        config_of("deepseek3-671b").replace(quantization="fp8", attention="flash", use_sft=True)
    )
    assert kept[0] == "4 of 61 layers, every kind kept: mla attention, mla attention with experts"
    assert "experts: n_routing_groups 4 of 8, num_experts 12 of 256" in kept
    assert f"base_emb_dim {config.model.base_emb_dim} of 7168" in " ".join(kept)
    assert "vocab_size 97 of 129280; the vocabulary is padded to 128" in kept[-1]
    assert {"quantization=fp8: off here", "use_sft=true: off here", "attention=flash: autoselected here"} <= {*hidden}
    assert "rounding of bfloat16: float32 here" in hidden


def test_a_configuration_that_cannot_shrink():
    windows = [{"attention_type": "local_sliding", "sliding_window_size": 1000 + size} for size in range(40)]
    many = tiny.load(base_num_decoder_layers=40).replace(decoder_segments=({"repeats": 1, "pattern": windows},))
    with pytest.raises(UserError, match="too many windows for 48 tokens"):
        shrink(many)
