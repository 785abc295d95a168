"""Steps compiled for H100s that are not here: what their attention holds of rows of 8,192 tokens."""

import math
import re
from pathlib import Path

import pytest

from src.extras.aot import hlo
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.run import resolve_config
from src.step.compiler_flags import compiler_options
from src.step.trace import trace_train_step
from tests.compilers import NO_AUTOTUNING, needs_cuda
from tests.tiny import BASE

pytestmark = needs_cuda
LENGTH, HEADS = 8192, 8
MODELS = sorted(path.stem for path in (Path(BASE).parent / "models").glob("*.yml"))


def step_of(*keys, topology="a3"):
    """A step of rows of 8,192."""
    devices = abstract_devices(parse_topology(topology, 1))
    sizes = (f"max_target_length={LENGTH}", "per_device_batch_size=1", "dataset_type=synthetic")
    config = resolve_config.load([BASE, *sizes, *keys])
    return trace_train_step(config, devices, {**compiler_options("", devices[0], 1), **NO_AUTOTUNING})


# What only passes on arrays that other instructions make; a collective may have weights of several parts of a layer.
PASSES_ON = ("parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "bitcast")
PASSES_ON += tuple(f"{kind}{part}" for kind in ("all-gather", "reduce-scatter") for part in ("", "-start", "-done"))


def buffers(text, least):
    """The arrays in memory of so many elements or more, by the line of the program that makes them."""
    computations, _ = hlo.parse(text)
    fused = set(re.findall(r"fusion\(.* calls=%?([\w.\-]+)", text))
    found = {}
    for name, computation in computations.items():
        for each in () if name in fused else computation.values():
            sizes = [
                math.prod(map(int, filter(None, dims.split(","))))
                for dims in re.findall(r"(?<!s8)\[([\d,]*)\]", each.type)  # s8: cuBLAS's workspace
            ]
            if max(sizes, default=0) >= least and each.opcode not in PASSES_ON:
                found[each.name] = (each.type, each.attributes)
    return found


SMALL = (
    *("base_emb_dim=256", "base_mlp_dim=512", "base_num_decoder_layers=1", f"base_num_query_heads={HEADS}"),
    "vocab_size=512",
)
GROUPED = ("base_num_kv_heads=4",)
LATENT = ("attention_type=mla", "kv_lora_rank=64", "qk_nope_head_dim=128", "qk_rope_head_dim=64", "v_head_dim=128")
KINDS = {
    "packed": (GROUPED, "cudnn_flash"),
    "unpacked": ((*GROUPED, "packing=false"), "cudnn_flash"),
    "heads of 256": ((*GROUPED, "head_dim=256"), "cudnn_flash"),
    "heads of 512": ((*GROUPED, "head_dim=512"), "blocked"),
    "latent": (LATENT, "cudnn_flash"),
    "soft cap": ((*GROUPED, "attn_logits_soft_cap=30"), "blocked"),
    "sinks": ((*GROUPED, "attention_sink=true"), "blocked"),
    "window": ((*GROUPED, "attention_type=local_sliding", "sliding_window_size=4096"), "cudnn_flash"),
    "chunk": ((*GROUPED, "attention_type=chunk", "chunk_attn_window_size=4096"), "cudnn_flash"),
    "context": ((*GROUPED, "ici_context_parallelism=4", "ici_fsdp_parallelism=2"), "cudnn_flash"),
    "context, soft cap": (
        (*GROUPED, "ici_context_parallelism=8", "ici_fsdp_parallelism=1", "attn_logits_soft_cap=30"),
        "blocked",
    ),
    "remat": ((*GROUPED, "remat_policy=full"), "cudnn_flash"),
}


# One of cuDNN's, with a mask; each of the others takes ten to twenty seconds. In tiles: tests/model/test_blocked.py.
SHORT = ("packed",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long) for kind in KINDS]
)
def test_no_array_has_an_eighth_of_all_scores(kind):
    """Of whatever shape, forward or backward; 8,192 tokens of a device, in rows of its own or shared."""
    keys, kernel = KINDS[kind]
    traced = step_of(*SMALL, *keys)
    text = traced.jax_traced.lower().compile().as_text()
    assert traced.plan.kernel == kernel
    assert not buffers(text, HEADS * LENGTH**2 // 8)
    assert ("fmhaSoftmax" in text) == (kernel == "cudnn_flash")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((*GROUPED, "head_dim=256"), "up to 128, not 256 on GPUs older than Hopper"),
        (LATENT, "up to 128, not 128, 192 on GPUs older than Hopper"),
        ((*LATENT, "qk_nope_head_dim=64", "v_head_dim=64"), "values of the size of queries"),
        (GROUPED, ""),
    ],
)
def test_an_a100_has_what_it_can(keys, reason):
    plan = step_of(*SMALL, *keys, topology="a100:1").plan
    assert plan.kernel == ("blocked" if reason else "cudnn_flash")
    assert reason in plan.why_not_fused


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_no_models_attention_holds_an_eighth_of_all_scores(model):
    """Each published model at its own sizes, but for the vocabulary. (Gathered weights and what blocks keep may be
    larger: they are not attention's.)"""
    positions = ["trainable_position_size=8192"] * model.startswith("gpt3")
    traced = step_of(f"model_name={model}", "vocab_size=512", *positions)
    text = traced.jax_traced.lower().compile().as_text()
    heads = max(layer.num_query_heads for layer in traced.plan.spec.layers)
    found = buffers(text, heads * LENGTH**2 // 8).values()
    # XLA leaves out the name of what it makes of named arrays, such as copies.
    assert not [kind for kind, attributes in found if "attention" in attributes]
