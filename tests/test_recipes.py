"""The recipes: what their comments say of published runs is what their keys make, and agrees with itself."""

import math
import re
from functools import cache

import jax
import pytest

from scripts.evidence.recipes import FOLDER, read
from src.extras.aot.devices import abstract_devices
from src.model.flops import count_params, flops_per_token
from src.parallel.chips import peak_flops
from src.parallel.mesh import global_batch_size, make_layout
from src.parallel.slices import describe_mesh
from src.step.trace import plan_step, trace_train_step
from tests.compilers import needs_cuda, needs_libtpu
from tests.tiny import spec_of

PATHS = sorted(FOLDER.glob("*.yml"))
NAMES = [path.stem for path in PATHS]


@cache
def recipe(name):
    return read(FOLDER / f"{name}.yml")


def published():
    return [name for name in NAMES if recipe(name).published]


def on_topology(name):
    """A mark: the compiler whose devices the recipe is for must be there."""
    return pytest.param(name, marks=needs_cuda if recipe(name).topology().platform == "gpu" else needs_libtpu)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_is_of_the_size_it_says(name):
    said, config = recipe(name), recipe(name).load()
    assert count_params(spec_of(config)) == said.parameters
    topology = said.topology()
    devices = "GPUs" if topology.platform == "gpu" else "chips"
    assert said.hardware == f"{topology.slices} x {topology.name}, {topology.num_devices} {devices}"
    assert said.tokens == said.rows * config.batch.max_target_length
    micro_batch = config.batch.per_device_batch_size * topology.num_devices
    assert said.rows == micro_batch * config.step.gradient_accumulation_steps
    assert re.search(r"https://(github\.com|catalog\.ngc\.nvidia\.com)/\S+", said.source)
    assert said.unpublished.startswith("none (") or said.published


@pytest.mark.parametrize("name", [name for name in NAMES if not recipe(name).load().run.model_name])
def test_parameters_are_those_of_the_published_sizes(name):
    """Matrices of dense layers by hand: four of attention, and of each factor and the output of the feed-forward."""
    model = recipe(name).load().model
    sizes = [model.base_emb_dim, model.base_mlp_dim, model.base_num_query_heads, model.base_num_decoder_layers]
    if model.global_parameter_scale > 1:
        thirds, rest = divmod(model.global_parameter_scale.bit_length() - 1, 3)
        D, F, N, L = (
            size << power
            for size, power in zip(sizes, (thirds + (rest > 1), *2 * (thirds + (rest > 0),), thirds), strict=True)
        )
    else:
        D, F, N, L = sizes
    layer = 4 * D * N * model.head_dim + (len(model.mlp_activations) + 1) * D * F
    tables = (1 if model.logits_via_embedding else 2) * model.vocab_size
    positions = model.trainable_position_size if model.position_type == "learned" else 0
    assert recipe(name).parameters == pytest.approx(L * layer + (tables + positions) * D, rel=5e-4)


@pytest.mark.parametrize("name", [on_topology(name) for name in NAMES])
def test_its_mesh_multiplies_out(name):
    said, config = recipe(name), recipe(name).load()
    layout = make_layout(config.mesh, abstract_devices(said.topology()))
    assert describe_mesh(layout.mesh.shape) == said.mesh
    rows = global_batch_size(layout, config.batch.per_device_batch_size, config.step.gradient_accumulation_steps, "")
    assert rows == said.rows
    # A device has its share of the weights, and more only of what is as small as norms.
    plan = plan_step(config, layout)
    parts = jax.tree.map(lambda leaf, at: math.prod(at.shard_shape(leaf.shape)), plan.shapes, plan.shardings)
    parts.pop("position_embedding", None)  # which fsdp alone shards
    share = said.parameters / (layout.mesh.size / layout.mesh.shape["data"])
    assert sum(jax.tree.leaves(parts)) < 1.15 * share


@pytest.mark.parametrize("name", [name for name in published() if recipe(name).topology().platform == "tpu"])
def test_other_numbers_of_slices_that_were_published_exist(name):
    for slices in recipe(name).published:
        config = recipe(name).load(f"compile_topology_num_slices={slices}")
        assert recipe(name).topology(config.aot.compile_topology_num_slices).slices == slices


@pytest.mark.parametrize("name", published())
def test_published_figures_agree_with_each_other(name):
    said = recipe(name)
    config, chip = said.load(), said.topology().chip
    peak = peak_flops(chip.kind, config.step.dtype) / 1e12
    counted = getattr(flops_per_token(spec_of(config), config.batch.max_target_length), said.attention_flops) / 1e12
    for figures in said.published.values():
        rates = []  # TFLOP/s, and how far rounding takes it off
        if figures.tflops:
            rates.append((figures.tflops, 0.5))
        if figures.mfu:
            rates.append((figures.mfu / 100 * peak, 0.0005 * peak))
        if figures.tokens_per_second:
            rates.append((figures.tokens_per_second * counted, 0.5 * counted))
        assert len(rates) == 2
        (one, off), (other, other_off) = rates
        assert abs(one - other) <= off + other_off


COMPILED = ["pax-2b-smoke-v4-8", "pax-gpt3-xl-pipeline-v4-128"]


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_copies_that_nobody_asked_for(name, capfd):
    said = recipe(name)
    traced = trace_train_step(said.load(), abstract_devices(said.topology()))
    traced.jax_traced.lower().compile()  # raises where it does not fit
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
