"""Weights and optimizer state that every device has whole: none of a shipped config's, and named where there are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from scripts.evidence.recipes import FOLDER, read
from src.config.yaml import CONFIGS
from src.extras.aot.whole_arrays import SHARE, whole_arrays, whole_lines
from src.model import params
from src.model.decoder import Decoder
from src.model.latent_attention import place_latents
from src.parallel.chips import memory_of
from src.parallel.mesh import make_layout, weight_shardings
from src.parallel.slices import mesh_sizes
from src.run import resolve_config
from src.step.state import abstract_state
from tests.tiny import BASE, abstract_layout, load, make, spec_of

SMALLEST = memory_of("TPU v5 lite")
MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.yml"))
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yml"))
OPTIMIZER = 2  # of Adam's moments, which lie as their weights do (tests/step)


def whole_bytes(config, layout):
    """Bytes of the weights and both moments of a config's model that each device of a layout has whole."""
    spec = spec_of(config)
    layout = place_latents(layout, spec)
    _, declarations = params.abstract(functools.partial(Decoder, spec))
    shapes, axes = params.values(declarations), params.field(declarations, "out_sharding")
    shardings = weight_shardings(layout, shapes, axes)
    placed = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings)
    return (1 + OPTIMIZER) * sum(whole_arrays(placed, layout).values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [8, 64, 512])
def test_no_model_has_much_that_is_whole_on_every_device(name, devices):
    """On devices with the least memory; on the largest number of up to `devices` that divides the model's width."""
    config = resolve_config.load([BASE, f"model_name={name}"])
    while spec_of(config).emb_dim % devices:
        devices //= 2
    assert whole_bytes(config, abstract_layout(config, fsdp=devices)) <= SHARE * SMALLEST


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_has(name):
    recipe, config = read(FOLDER / f"{name}.yml"), read(FOLDER / f"{name}.yml").load()
    topology = recipe.topology()
    inner, outer = (
        mesh_sizes(kind, config.mesh, topology.num_devices // topology.slices, topology.slices)
        for kind in ("ici", "dcn")
    )
    sizes = {name: a * b for name, a, b in zip(config.mesh.mesh_axes, inner, outer, strict=True)}
    held = whole_bytes(config, abstract_layout(config, **sizes))
    assert held <= SHARE * topology.chip.memory


@pytest.mark.parametrize("name", ["deepseek3-671b", "deepseek2-236b", "kimi-k2"])
def test_latents_that_no_axis_shards_are_found_by_it(name):
    """With the rule as it was: 37.2 of 51.8 GiB of the first on 512 devices."""
    config = resolve_config.load([BASE, f"model_name={name}", "logical_axis_rules.latent=[]"])
    held = whole_bytes(config, abstract_layout(config, fsdp=512))
    assert held > SHARE * memory_of("TPU v5")
    if name == "deepseek3-671b":
        assert held / 2**30 == pytest.approx(37.2, abs=0.1)


LATENT = {
    "attention_type": "mla",
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}


def test_they_are_named_with_their_bytes_and_their_key():
    _, plan = make(8, **LATENT, logical_axis_rules__latent="[]")
    state, layers, heads = abstract_state(plan), 2, 4
    up = {"attention.query": 24 * heads * 12, "attention.kv_up": 16 * heads * 16}
    found = whole_arrays((state.weights, state.opt), plan.layout)
    for name, size in up.items():
        assert found[name] == 3 * 4 * layers * size  # with both moments, of 4 bytes
    assert not {name for name in found if not re.search("norm|query$|kv_up$", name)}
    capacity = 10 * sum(found.values())
    (line,) = whole_lines(plan, state, capacity)
    assert "10% of a device's memory" in line
    assert "whole on every device along fsdp, the largest attention.query 0.00 GiB, attention.kv_up" in line
    assert whole_lines(plan, state, 3 * capacity) == whole_lines(plan, state, None) == []


def test_by_default_they_are_sharded_and_on_a_mesh_that_does_not_divide_them_whole():
    _, plan = make(8, **LATENT)
    assert whole_lines(plan, abstract_state(plan), 2**17) == []
    _, plan = make(8, **{**LATENT, "q_lora_rank": 20})
    (line,) = whole_lines(plan, abstract_state(plan), None)
    assert line.startswith("latent = 20 (q_lora_rank or kv_lora_rank) is not divisible by fsdp=8: ")
    assert plan.layout.rules["latent"] == ()


def test_copies_for_rows_count_and_parts_for_tensor_do_not():
    layout = make_layout(load(ici_tensor_parallelism=2).mesh, jax.devices())

    def placed(*spec):
        at = NamedSharding(layout.mesh, PartitionSpec(*spec))
        return {"it": {"wi": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=at)}}

    sizes = [whole_arrays(placed(*spec), layout)["it.wi"] for spec in ([], ["tensor"], ["fsdp"], ["fsdp", "tensor"])]
    assert sizes == [256, 128, 0, 0]
    alone = make_layout(load().mesh, jax.devices()[:1])
    assert not whole_arrays(jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape)), placed()), alone)
