"""Rows that devices share, along the axis context and, between blocks, the axis tensor: against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.extras.evaluation.scoring import compute_logits
from src.extras.generation.generate import Generator, Sampling, in_training
from src.extras.verify.comparison import compared
from src.extras.verify.rows import PASS
from src.extras.verify.subject import PLAIN_DESCENT, Subject
from src.parallel.mesh import make_layout
from src.parallel.sequence import from_zigzag, zigzag_order
from src.step.state import abstract_batch
from src.step.trace import plan_step
from src.system.errors import UserError
from tests.tiny import GPT3, LENGTH, Trainer, assert_close, load, make, packed_rows, random_weights

LOCAL = "{attention_type: local_sliding, sliding_window_size: 5}"
MODELS = {
    "llama": {},
    "gpt3": {**GPT3, "base_num_kv_heads": 4},
    "windows and sinks": {
        "base_num_decoder_layers": 4,
        "attention_sink": "true",
        "attn_logits_soft_cap": 2.0,
        "normalization_placement": "both",
        "decoder_segments": f"[{{repeats: 2, pattern: [{LOCAL}, {{}}]}}]",
    },
    "chunks": {"attention_type": "chunk", "chunk_attn_window_size": 6, "remat_policy": "full"},
    "latent": {
        "attention_type": "mla",
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1, "base_moe_mlp_dim": 16},
    "one more token": {"mtp_num_layers": 2, "num_vocab_tiling": 2, "z_loss_multiplier": 1e-3, "dropout_rate": 0.1},
}


def sizes(**axes):
    return {"ici_fsdp_parallelism": 1, **{f"ici_{axis}_parallelism": size for axis, size in axes.items()}}


SEQUENCE = {"logical_axis_rules__norm_length": "[context,tensor]"}
MESHES = {
    "context 2": sizes(context=2),
    "context 4": sizes(context=4),
    "context 8": sizes(context=8),
    "context 4 x fsdp 2": sizes(context=4, fsdp=2),
    "context 4 x tensor 2": sizes(context=4, tensor=2),
    "context 4 x tensor 2, sequence": {**sizes(context=4, tensor=2), **SEQUENCE},
    "fsdp 4 x tensor 2, sequence": {**sizes(fsdp=4, tensor=2), **SEQUENCE},
    "data 2 x context 2 x tensor 2": sizes(data=2, context=2, tensor=2),
    "data 2 x context 2 x tensor 2, sequence": {**sizes(data=2, context=2, tensor=2), **SEQUENCE},
}
# Each model on the mesh that has all axes, but those that other tests have on theirs (tests/step/test_train_step.py,
# test_expert_axis.py, chunks in test_kernels.py, one more token in tests/step/test_vocab_tiles.py) and the plain one,
# which is on further meshes.
ALL_AXES = "data 2 x context 2 x tensor 2, sequence"
ELSEWHERE = ("llama", "gpt3", "experts", "chunks", "one more token")
CASES = [(model, ALL_AXES) for model in MODELS if model not in ELSEWHERE] + [
    ("llama", mesh) for mesh in ("context 4 x fsdp 2", "fsdp 4 x tensor 2, sequence")
]
FURTHER = [("llama", mesh) for mesh in MESHES if ("llama", mesh) not in CASES] + [
    *((model, "context 4") for model in list(MODELS)[1:]),
    *((model, ALL_AXES) for model in ELSEWHERE[1:]),
]


def devices_of(mesh):
    return int(np.prod([size for key, size in mesh.items() if key.endswith("_parallelism")]))


@functools.cache
def on_one_device(model):
    return computed(model, {})


def computed(model, mesh):
    """The losses and gradients of a step."""
    plan = Subject(load(**MODELS[model], **mesh)).plan(devices_of(mesh), **PLAIN_DESCENT)
    return Subject(load(**MODELS[model])).result(plan)


@pytest.mark.parametrize(
    ("model", "mesh"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)]
)
def test_devices_that_share_rows_train_as_one_does(model, mesh, capfd):
    """Losses, dropout among them, and gradients."""
    found, expected = computed(model, MESHES[mesh]), on_one_device(model)
    row = compared(mesh, found, expected, 1e-4)
    assert row.status == PASS, row
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("model", ["llama", pytest.param("latent", marks=pytest.mark.long)])
def test_bfloat16_runs_on_cpus(model):
    """XLA for CPUs aborts on a sum in bfloat16 that is made within a map over some of the axes."""
    mesh = MESHES["context 4 x tensor 2"]
    trainer = Trainer(devices=devices_of(mesh), initial=False, dtype="bfloat16", **MODELS[model], **mesh)
    in_float32 = Trainer(initial=False, **MODELS[model]).step(packed_rows(0), 0)["loss"]
    assert trainer.step(packed_rows(0), 0)["loss"] == pytest.approx(in_float32, rel=1e-2)


def test_each_device_has_as_many_keys_to_see_as_any_other():
    layout = make_layout(load(**MESHES["context 8"]).mesh, jax.devices())
    order = zigzag_order(64, layout)
    assert sorted(order) == list(range(64))
    assert len(set((order + 1).reshape(8, -1).sum(axis=1))) == 1  # of token i the keys are i + 1
    np.testing.assert_array_equal(from_zigzag(order[None], 8)[0], np.arange(64))


def by_index(logits, batch):
    """A user's metric that needs to know which token a logit follows."""
    target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return {"by_index": (jnp.sum(jnp.abs(target) * np.arange(LENGTH)), batch["loss_mask"].sum())}


@pytest.mark.parametrize("mesh", [pytest.param("context 4", marks=pytest.mark.long), "context 4 x tensor 2, sequence"])
def test_users_metrics_and_logits_are_in_the_texts_order(mesh):
    keys = {"eval_metrics": f"{__name__}:by_index", "num_vocab_tiling": 2}
    batch = packed_rows(0)
    found = []
    for overrides in ({}, MESHES[mesh]):
        trainer = Trainer(devices=devices_of(overrides), initial=False, **keys, **overrides)
        plan = trainer.plan
        weights = plan.split(jax.device_put(random_weights(plan), plan.shardings))
        logits = compute_logits(plan, weights, batch["tokens"])
        found.append((trainer.eval_step(weights, batch), logits))
    assert_close(found[1], jax.device_get(found[0]), 1e-4)


def test_generation_where_devices_share_rows_draws_the_tokens_of_one():
    """Of prompts whose lengths divide by nothing, and of one token a step."""
    prompts = [np.arange(1, 4), np.arange(5, 12)]
    drawn = []
    for overrides in ({}, MESHES["context 4 x tensor 2, sequence"]):
        _, plan = make(devices_of(overrides), **overrides)
        weights = jax.device_put(random_weights(plan), plan.shardings)
        used = in_training(plan, plan.split(weights))
        generator = Generator(
            *used, Sampling(temperature=0.0, top_k=0, nucleus_p=1.0), seed=0, length=LENGTH, prefill_length=7
        )
        tokens_BT, lengths_B = generator.padded(prompts, rows=2)
        tokens = generator.tokens(tokens_BT, lengths_B, np.arange(len(lengths_B)))
        drawn.append([next(tokens)[:2] for _ in range(5)])
    np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize("length", [20, 18])
def test_rows_that_do_not_divide_are_an_error(length):
    config = load(max_target_length=length, **MESHES["context 4"])
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:4]))
    keys = "ici_context_parallelism or dcn_context_parallelism"
    expected = rf"max_target_length={length} does not divide into 8 parts.*\(context=4\).*{keys}"
    with pytest.raises(UserError, match=expected):
        abstract_batch(plan, 8, length)


def test_rows_that_do_not_divide_between_blocks_are_an_error():
    sizes = {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 2, "ici_tensor_parallelism": 4}
    rules = {"logical_axis_rules__norm_length": "[context, tensor]", "logical_axis_rules__kv_heads": "[]"}
    _, plan = make(8, max_target_length=20, **sizes, **rules)
    keys = "ici_context_parallelism, dcn_context_parallelism, ici_tensor_parallelism or dcn_tensor_parallelism"
    with pytest.raises(UserError, match=rf"max_target_length=20 is not divisible.*context=2 x tensor=4.*{keys}"):
        abstract_batch(plan, 8, 20)


def test_tiles_of_the_loss_that_do_not_divide_a_devices_part_are_an_error():
    config = load(num_vocab_tiling=8, **MESHES["context 4"])
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:4]))
    with pytest.raises(UserError, match=r"num_vocab_tiling=8.*context=4"):
        abstract_batch(plan, 8, LENGTH)
