"""Parameters and operations against published counts and closed forms."""

import functools

import jax
import jax.numpy as jnp
import pytest

from src.extras.aot.roofline import recomputed_flops
from src.extras.verify.counts import matmuls, traced_step
from src.extras.verify.subject import ROWS
from src.model.attention import Attention
from src.model.execution import Execution
from src.model.flops import FlopsPerToken, block_weights, count_active_params, count_params, flops_per_token
from src.model.params import Weights, matmul, weight
from src.model.parts import MIXERS
from src.run import resolve_config
from src.run.summary import step_flops
from src.step.loss import next_token_loss
from src.step.state import abstract_state
from tests.tiny import BASE, load, make, spec_of


def published(name):
    return spec_of(resolve_config.load([BASE, f"model_name={name}"]))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),  # meta-llama/Llama-2-7b-hf
        ("gpt3-125m", 124_439_808 + 1024 * 768),  # openai-community/gpt2, with 2,048 positions in place of 1,024
        # 4096 wide and 32 deep: two tables, then 12 D^2 weights, 9 D biases and 4 D of LayerNorm a layer, the last norm
        ("gpt3-6.7b", (50_257 + 2048) * 4096 + 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096),
    ],
)
def test_published_parameter_counts(name, parameters):
    assert count_params(published(name)) == parameters


def test_the_smallest_gpt3_of_maxtext():
    """Its gpt3-52k by keys: two tables of 16, then 12 D^2 weights and 13 D biases and norms, and the last norm."""
    keys = "base_emb_dim=16 base_mlp_dim=64 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2"
    config = resolve_config.load([BASE, "model_name=gpt3-125m", *keys.split(), "head_dim=8", "vocab_size=1024"])
    assert count_params(spec_of(config)) == (1024 + 2048) * 16 + 12 * 16**2 + 13 * 16 + 2 * 16


def test_base_yml_is_a_model_of_about_1b_at_scale_1_and_of_about_its_scale_above():
    for scale in (1, 2, 4, 8, 16):
        parameters = count_params(spec_of(resolve_config.load([BASE, f"global_parameter_scale={scale}"])))
        assert 0.8 < parameters / scale / 1.1e9 < 1.25


def test_shared_layers_are_parameters_once_and_operations_each_time():
    once = load(base_num_decoder_layers=1)
    shared = load(base_num_decoder_layers=3, decoder_segments="[{repeats: 3, shared: true, pattern: [{}]}]")
    apart = load(base_num_decoder_layers=3)
    assert count_params(spec_of(shared)) == count_params(spec_of(once))
    assert flops_per_token(spec_of(shared), 16) == flops_per_token(spec_of(apart), 16)


def test_experts_of_shared_layers_are_inactive_once():
    """A token goes through one of eight experts; the prediction layer has experts of its own, like the last layer."""
    experts = "{num_experts: 8, base_moe_mlp_dim: 64}"
    shared = f"[{{repeats: 3, shared: true, pattern: [{experts}]}}]"
    spec = spec_of(load(base_num_decoder_layers=3, decoder_segments=shared, mtp_num_layers=1))
    assert count_params(spec) - count_active_params(spec) == 2 * 7 * 3 * 64 * spec.emb_dim


def test_operations_of_llama_2_7b():
    """6 N + 12 L H Q T of PaLM's appendix B, N without the embedding, which is looked up."""
    spec = published("llama2-7b")
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008) + 4096 * 32_000
    flops = flops_per_token(spec, 4096)
    assert flops.palm == 6 * weights + 12 * 32 * 32 * 128 * 4096
    # A causal query sees 1, 2, ... 4096 keys.
    seen = sum(range(1, 4097)) / 4096
    assert flops.causal == 6 * weights + 12 * 32 * 32 * 128 * seen


def test_parameters_and_operations_of_gemma_4_31b():
    """Full layers have 512 numbers a head and 4 heads of keys, and no projection to values."""
    spec, D = published("gemma4-31b"), 5376
    windowed, full = D * 256 * (2 * 32 + 2 * 16), D * 512 * (2 * 32 + 4)
    products = 50 * windowed + 10 * full + 60 * 3 * D * 21_504
    # Four norms of a layer and the last one, those of query and key heads, a scalar a layer.
    vectors = (60 * 4 + 1) * D + 50 * 2 * 256 + 10 * 2 * 512 + 60
    assert count_params(spec) == products + 262_144 * D + vectors == 30_697_345_340
    flops = flops_per_token(spec, 4096)
    assert flops.palm == 6 * (products + 262_144 * D) + 12 * 32 * 4096 * (50 * 256 + 10 * 512)
    # A window's first 1,024 queries see 1, 2, ... 1024 keys, the others 1,024; all see 1, 2, ... 4096.
    seen = 1024 - 1024 * 1023 / 2 / 4096, sum(range(1, 4097)) / 4096
    assert flops.causal == 6 * (products + 262_144 * D) + 12 * 32 * (50 * seen[0] * 256 + 10 * seen[1] * 512)


def test_operations_with_grouped_queries():
    weights = 2 * (32 * 8 * (4 + 2 + 2 + 4) + 32 * 64 * 3) + 32 * 97
    assert flops_per_token(spec_of(load()), 16).palm == 6 * weights + 12 * 2 * 4 * 8 * 16


# Wide enough that what is no matrix product is little beside the smallest of them.
WIDE = {
    "base_emb_dim": 256,
    "base_mlp_dim": 512,
    "head_dim": 64,
    "max_target_length": 64,
    "vocab_size": 128,
    "matmul_precision": "default",
    "scan_layers": "false",
}
LATENT = {
    "attention_type": "mla",
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 256, "shared_experts": 1}


@functools.cache
def counted_by_jax(**overrides):
    """Operations a token of a loss and its gradient, as jax counts them before XLA changes them, and the plan."""
    idle = {"attention_type": "head_dim", "num_experts": "base_mlp_dim"}  # of latent attention, of experts
    wide = {key: WIDE[key] for key in WIDE.keys() - {idle[key] for key in idle.keys() & overrides.keys()}}
    config, plan = make(**wide, **overrides)
    ids = jax.ShapeDtypeStruct((2, config.batch.max_target_length), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ids)
    batch["loss_mask"] = jax.ShapeDtypeStruct(ids.shape, jnp.float32)

    def loss(weights, batch):
        sums = next_token_loss(plan.decoder(Weights(weights)), batch, plan)
        return sums.loss + sums.mtp.sum()

    lowered = jax.jit(jax.value_and_grad(loss)).lower(plan.shapes, batch)
    return lowered.cost_analysis()["flops"] / ids.size, plan


@pytest.mark.parametrize("overrides", [{}, LATENT, {"mlp_activations": "[gelu]", "qk_norm": "head"}], ids=str)
def test_operations_of_a_step_are_those_that_jax_counts(overrides):
    counted, plan = counted_by_jax(**overrides)
    assert flops_per_token(plan.spec, 64).palm == pytest.approx(counted, rel=0.02)


ADAPTERS = {"lora_rank": 8, "lora_parameters": "[attention.*, feed_forward.w*]", "load_parameters_path": "model"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        ADAPTERS,
        {**ADAPTERS, "lora_parameters": "['*']", "trainable_parameters": "[attention.out]"},
        {**ADAPTERS, **EXPERTS, "lora_parameters": "[attention.*, feed_forward.wo]", "logits_via_embedding": "true"},
        {"trainable_parameters": "[feed_forward.*]"},
        {"trainable_parameters": "['*norm.scale']", "logits_via_embedding": "true"},
    ],
    ids=str,
)
def test_gradients_of_frozen_weights_are_not_counted(overrides):
    # Scanned: without a scan, the inputs of the first layers' frozen weights need no gradient. And narrower, because
    # `weight_matmul` writes out the gradient of a large matrix, which XLA removes.
    wide = {key: value for key, value in WIDE.items() if key != "base_mlp_dim"} | {"scan_layers": "true"}
    sizes = {} if "num_experts" in overrides else {"base_mlp_dim": 256}
    plan = make(**wide, **sizes, remat_policy="none", **overrides)[1]
    jaxpr = traced_step(plan, abstract_state(plan), next_token_loss, 64).jaxpr.jaxpr
    found, whole = step_flops(plan, 64), flops_per_token(plan.spec, 64)
    assert found.palm == sum(size for _, _, size in matmuls(jaxpr)) / (64 * ROWS)
    assert whole.palm - found.palm == pytest.approx(whole.causal - found.causal)
    assert (found.palm < 0.9 * whole.palm) == bool(overrides)


class GatedAttention(Attention):
    """What a user may try: attention whose output a sigmoid gate scales."""

    def __init__(self, spec, out_scale, dtype, rngs):
        super().__init__(spec, out_scale, dtype, rngs)
        self.gate = weight(rngs, (spec.emb_dim, spec.emb_dim), ("embed", None), dtype, fan_in=(0,))

    def __call__(self, x_BTD, context, cache):
        out_BTD, cache = super().__call__(x_BTD, context, cache)
        return out_BTD * jax.nn.sigmoid(matmul(x_BTD, self.gate[...], "BTD,DE->BTE")), cache


def forget_counts():
    count_params.cache_clear()
    block_weights.cache_clear()


@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_a_weight_that_a_block_declares_is_counted_wherever_operations_are(monkeypatch, policy):
    plain, plan = counted_by_jax(remat_policy=policy)
    with monkeypatch.context() as patch:
        patch.setitem(MIXERS, "global", GatedAttention)
        gated, gated_plan = counted_by_jax.__wrapped__(remat_policy=policy)
        forget_counts()
        gated_counts = [count_params(gated_plan.spec), *operations(gated_plan)]
    forget_counts()
    for count, with_gate, expected in zip(
        [count_params(plan.spec), *operations(plan)], gated_counts, [1, 6, 2 * (policy == "full")], strict=True
    ):
        assert with_gate - count == expected * 2 * 256 * 256  # two layers
    assert gated - plain == pytest.approx((6 + 2 * (policy == "full")) * 2 * 256 * 256, rel=0.05)


def operations(plan):
    """Of a token: those of a step, and those computed again beside."""
    return flops_per_token(plan.spec, 64).palm, recomputed_flops(plan.spec, 64, plan.execution, 1, "dot_product").palm


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat_policy": "full"},
        {"remat_policy": "minimal_with_context"},
        {"remat_policy": "custom", "remat_custom": "{key_proj: device, mlpwi: offload}"},
        {"remat_policy": "save_qkv_proj", "qk_norm": "head"},
        {"remat_policy": "minimal", "normalization_placement": "after"},
        {"remat_policy": "save_qkv_proj", "value_norm": "true", "layer_scalar": "true"},
        {"remat_policy": "custom", "remat_custom": "{key_proj: device}", "share_kv_projections": "true"},
        {"remat_policy": "full", **LATENT},
        {"remat_policy": "custom", "remat_custom": "{decoder_layer_input: device}", "mtp_num_layers": 1},
        *(
            pytest.param(overrides, marks=pytest.mark.long)
            for overrides in (
                *({"remat_policy": policy} for policy in ("minimal", "save_qkv_proj", "save_out_proj")),
                {"remat_policy": "minimal_offloaded"},
                {"remat_policy": "save_qkv_proj", "share_kv_projections": "true"},
                {"remat_policy": "minimal", "share_kv_projections": "true", "value_norm": "true", "qk_norm": "head"},
                {"remat_policy": "full", "normalization_placement": "both"},
                {"remat_policy": "minimal", **LATENT},
                {"remat_policy": "full", "mtp_num_layers": 1},
            )
        ),
    ],
    ids=str,
)
def test_operations_computed_again_are_those_that_jax_counts(overrides):
    without, _ = counted_by_jax(**overrides | {"remat_policy": "none", "remat_custom": "{}"})
    counted, plan = counted_by_jax(**overrides)
    expected = recomputed_flops(plan.spec, 64, plan.execution, 1, "dot_product").palm
    assert counted - without == pytest.approx(expected, abs=0.004 * without)


@pytest.mark.parametrize("policy", ["full", "minimal"])
def test_operations_of_experts_computed_again(policy):
    """On a CPU every token goes through every expert: four of four, and not two, of 2 layers' experts of 256 units."""
    without, _ = counted_by_jax(**EXPERTS)  # computes nothing again
    counted, plan = counted_by_jax(remat_policy=policy, **EXPERTS)
    products = {"full": 2, "minimal": 0}[policy]  # into two factors; no derivative needs what comes out
    rows = EXPERTS["num_experts_per_tok"]  # of each token, and each row is multiplied by the four
    more = 2 * (4 - 1) * rows * 2 * products * 256 * 256
    expected = recomputed_flops(plan.spec, 64, plan.execution, 1, "dot_product").palm + more
    assert counted - without == pytest.approx(expected, abs=0.004 * without)


def test_tiles_of_the_loss_compute_logits_again():
    one, plan = counted_by_jax()
    two, _ = counted_by_jax(num_vocab_tiling=2)
    product = 2 * 256 * 128
    assert recomputed_flops(plan.spec, 64, plan.execution, 2, "dot_product").palm == product
    # jax counts the body of the loop over tiles once, half of the tokens; there are 4 products in the place of 3.
    assert two - one == pytest.approx(4 * product / 2 - 3 * product, abs=0.1 * product)


def test_nothing_is_computed_again_where_all_is_kept():
    spec = spec_of(load())
    assert recomputed_flops(spec, 16, Execution(remat_policy="none"), 1, "dot_product") == FlopsPerToken(0.0, 0.0)
