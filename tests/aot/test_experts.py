"""What a layer of experts costs on TPUs and GPUs that are not here: kernels for the experts' rows, no dense product."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from scripts.evidence.program_stats import copies, instructions, kernels
from src.extras.aot import eight_bits, hlo
from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.topology import parse_topology
from src.model import params, quantization
from src.model.forward_context import ForwardContext
from src.model.moe.grouped_gpu import TILE
from src.model.moe.grouped_tpu import row_tile, tile_sizes
from src.model.moe.layer import Experts
from src.parallel.mesh import make_layout, weight_shardings
from src.step.compiler_flags import compiler_options
from tests.compilers import NO_AUTOTUNING, needs_cuda, needs_libtpu
from tests.tiny import load, spec_of

TOKENS = 4096  # of a device
MIXTRAL = {
    **{"base_emb_dim": 4096, "base_moe_mlp_dim": 14336, "num_experts": 8, "num_experts_per_tok": 2},
    **{"norm_topk_prob": "true", "dtype": "bfloat16", "max_target_length": TOKENS},
}
DEEPSEEK = {
    **{"base_emb_dim": 7168, "base_moe_mlp_dim": 2048, "num_experts": 256, "num_experts_per_tok": 8},
    **{"n_routing_groups": 8, "topk_routing_group": 4, "routing_group_score": "top2", "routed_score_func": "sigmoid"},
    **{"routed_bias": "true", "dtype": "bfloat16", "max_target_length": TOKENS},
}
SMALL_MIXTRAL = {**MIXTRAL, "base_emb_dim": 512, "base_moe_mlp_dim": 1024, "max_target_length": 1024}
SMALL_DEEPSEEK = {
    **{"base_emb_dim": 2048, "base_moe_mlp_dim": 1408, "num_experts": 64, "num_experts_per_tok": 6},
    **{"dtype": "bfloat16", "max_target_length": TOKENS},
}
LAYERS = {"mixtral on four": (MIXTRAL, "v5p-8", 4), "deepseek on sixteen": (DEEPSEEK, "v5e-16", 16)}
GPU_KERNEL = re.compile(r"@__gpu\$xla\.gpu\.triton.*?grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+) : i32")


def lowered(overrides, topology, experts, tokens=TOKENS):
    """A layer's gradients to weights and input, for as many tokens of a device."""
    config = load(**overrides, ici_expert_parallelism=experts, matmul_precision="default")
    devices = abstract_devices(parse_topology(topology, 1))
    layout, spec = make_layout(config.mesh, devices), spec_of(config)
    graphdef, declarations = params.abstract(lambda rngs: Experts(spec.layers[0], 1.0, "float32", rngs))
    quantized = quantization.select(config.step, declarations, layout)
    shapes = params.values(declarations)
    at = weight_shardings(layout, shapes, params.field(declarations, "out_sharding"))
    given = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, at)
    rows = layout.sharding(("batch", None, None))
    x = jax.ShapeDtypeStruct((len(devices), tokens, spec.emb_dim), jnp.bfloat16, sharding=rows)

    def loss(given, x_BTD):
        ones_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
        experts = nnx.merge(graphdef, quantization.attach(quantized, given, layout))
        out_BTD, _ = experts(x_BTD, ForwardContext(ones_BT, ones_BT, layout, "dot_product", True))
        return jnp.sum(jnp.square(out_BTD.astype(jnp.float32)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(at, rows)).lower(given, x)


def tiles_computed(sizes, tile):
    """How many tiles of rows a kernel visits."""
    rows = -(-sum(sizes) // tile) * tile
    with jax.default_device(jax.devices("cpu")[0]):
        _, count = make_group_metadata(
            group_sizes=jnp.asarray(sizes, jnp.int32),
            m=rows,
            tm=tile,
            start_group=jnp.int32(0),
            num_nonzero_groups=len(sizes),
            visit_empty_groups=False,
        )
    return int(count)


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_experts_cost_what_their_rows_do(layer):
    """A window for balanced experts: within 15% of three products forward and six backward a token and choice."""
    overrides, topology, experts = LAYERS[layer]
    D, F, E, k = (overrides[f] for f in ("base_emb_dim", "base_moe_mlp_dim", "num_experts", "num_experts_per_tok"))
    program = lowered(overrides, topology, experts).compile()
    text = program.as_text()
    computations, entry = hlo.parse(text)
    first = [each.type for each in computations[entry].values() if "tpu_custom_call" in each.attributes]
    assert sorted(kind[: kind.index("{")].count(",") for kind in first) == [1] * 6 + [2] * 3  # of rows; of weights
    room, here = TOKENS * k * 5 // 4, E // experts
    # Rows as tokens that choose at random bring them.
    sizes = np.random.default_rng(0).multinomial(TOKENS * k, np.full(here, 1 / here))
    tile = row_tile(room, here)
    work = 0
    for X, Y in ((D, F), (D, F), (F, D)):
        for x, y in ((X, Y), (Y, X), (D, F)):  # forward, the gradient to rows, that to weights
            padded = np.prod([-(-n // part) * part for n, part in zip((x, y), tile_sizes(tile, x, y, 2), strict=True)])
            work += 2 * tiles_computed(sizes, tile) * tile * padded
    active = 3 * 2 * TOKENS * k * 3 * D * F
    assert work < 1.15 * active
    # XLA counts each kernel for the room it is given, those of the loop over further windows too, which balanced
    # experts don't enter: of forward 3 products, of backward 6, and in the loop the 2 of the hidden units once more.
    assert text.count('custom_call_target="tpu_custom_call"') == 9 + 11
    counted = (9 + 11) / 9 * room / (TOKENS * k)
    assert 0 <= program.cost_analysis()["flops"] / active - counted < 0.02


@needs_libtpu
@pytest.mark.long
@pytest.mark.usefixtures("little_effort")
def test_nothing_of_experts_is_laid_out_anew():
    """Neither the rows' factors nor the gathered weights are copied, whose kernels take them as they lie."""
    text = lowered(SMALL_MIXTRAL, "v5p-8", 1, tokens=1024).compile().as_text()
    large = [each["name"] for each in copies(list(instructions(text))) if each["bytes"] > 2**20]
    assert not [name for name in large if "experts" in name or "all_gather" in name]


@needs_libtpu
@pytest.mark.long  # of other matmuls: test_quantized_products.py
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("settings", [{}, {"capacity_factor": 1.25}])
@pytest.mark.parametrize("topology", ["v5e-4", "v6e-4", "v5p-8"])
def test_a_tpu_makes_experts_products_of_int8(topology, settings):
    """Forward, to rows and to weights, of gate, up and down; weights are gathered as codes."""
    small = {**SMALL_MIXTRAL, "quantization": "int8", **settings}
    text = lowered(small, topology, 1, tokens=1024).compile().as_text()
    calls = {each["kind"]: each["executions"] for each in kernels(list(instructions(text)))}
    products = [narrow for _, _, narrow in eight_bits.matmuls(text)]
    assert products == [True] * 9
    assert calls == ({} if settings else {"in_8_bits: s32,s8,f32 -> bf16": 9})
    sent = {
        (kind, dtype)
        for types, kind in re.findall(r" = (.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", text)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", types)
        if np.prod(list(map(int, dims.split(",")))) >= 512 * 1024
    }
    assert {dtype for kind, dtype in sent if kind == "all-gather"} == {"s8"}
    assert {dtype for kind, dtype in sent if kind != "all-gather"} == {"bf16"}


@needs_cuda
@pytest.mark.long
@pytest.mark.parametrize("experts", [1, 8])
def test_experts_on_gpus_cost_what_their_rows_do(experts):
    """No kernel computes more tiles than the rows have and one for each expert, and nothing has all rows for each."""
    D, F, k = (SMALL_DEEPSEEK[f] for f in ("base_emb_dim", "base_moe_mlp_dim", "num_experts_per_tok"))
    here, room = 64 // experts, TOKENS * k * (1 if experts == 1 else 5 / 4)
    step = lowered(SMALL_DEEPSEEK, "a3", experts)
    found = {tuple(map(int, grid)) for grid in GPU_KERNEL.findall(step.as_text())}
    rows, d, f = int(room // TILE) + here, -(-D // TILE), -(-F // TILE)
    # Forward and the gradient to rows, of both products: the sums are over all of X. Then the gradients to weights.
    assert found == {(f, rows, 1), (d, rows, 1), (f, d, here)}
    every_row_for_every_expert = 2 * 64 * TOKENS * k * F
    assert step.compile().memory_analysis().temp_size_in_bytes < every_row_for_every_expert


@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize(
    "topology", [pytest.param("a3", marks=needs_cuda), pytest.param("v5e-8", marks=[needs_libtpu, pytest.mark.long])]
)
def test_exchanges_count_the_rows_of_balanced_experts(topology):
    """Rows travel there and back, forward and backward, with a weight beside each; an eighth stays on its device.

    On a TPU a weight takes as much as 256 numbers.
    """
    D, k = (SMALL_DEEPSEEK[f] for f in ("base_emb_dim", "num_experts_per_tok"))
    step = lowered({**SMALL_DEEPSEEK, "base_moe_mlp_dim": 256}, topology, 8)
    mesh = make_layout(load(ici_expert_parallelism=8).mesh, abstract_devices(parse_topology(topology, 1))).mesh
    text = step.compile(NO_AUTOTUNING if topology == "a3" else None).as_text()
    found = [each for each in collectives(text, mesh) if each.kind == "ragged-all-to-all"]
    numbers = 4 * D + 2 * (256 if topology == "v5e-8" else 1)
    assert sum(each.times * each.sent_bytes for each in found) == numbers * TOKENS * k * 2 * 7 // 8
    assert any(each.per_round for each in found), "further windows, which balanced experts don't need"


@needs_cuda
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.long, id="dropless"), pytest.param({"capacity_factor": 1.25}, id="capacity")],
)
def test_shared_experts_compute_while_rows_are_on_their_way(settings):
    """On GPUs, by the preset's flags: the program starts an exchange of rows, runs them, and then waits for its end."""
    D, F = (SMALL_DEEPSEEK[f] for f in ("base_emb_dim", "base_moe_mlp_dim"))
    flags = compiler_options("auto", abstract_devices(parse_topology("a3", 1))[0], 1)
    text = lowered({**SMALL_DEEPSEEK, "shared_experts": 3, **settings}, "a3", 8).compile(flags).as_text()
    under_way, beside_product = set(), []
    for line in text[text.index("\nENTRY ") :].splitlines():
        if match := re.match(rf"  %(\S*all-to-all-start\S*) = .*,{D}\]", line):
            under_way.add(match[1])
        elif match := re.match(r"  %\S*all-to-all-done\S* = .*\(%([\w.-]+)\)", line):
            under_way.discard(match[1])
        elif re.match(rf"  %\S+ = \(bf16\[{TOKENS},{2 * 3 * F}\].*matmul", line):  # both factors
            beside_product.append(set(under_way))
    assert len(beside_product) == 1
    assert beside_product[0]
