"""Products in 8 bits in programs for TPUs and GPUs that are not here: which are made, and what is sent for them."""

import functools
import math
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from src.extras.aot import eight_bits
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.model import params, quantization
from src.model.block import Block
from src.model.forward_context import ForwardContext
from src.parallel.mesh import make_layout, weight_shardings
from src.step.compiler_flags import compiler_options
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.compilers import NO_AUTOTUNING, needs_cuda, needs_libtpu
from tests.tiny import load, spec_of

D, F, N, K, H, T = 512, 1024, 4, 2, 128, 512
LLAMA = {
    **{"base_emb_dim": D, "base_mlp_dim": F, "base_num_query_heads": N, "base_num_kv_heads": K, "head_dim": H},
    **{"max_target_length": T, "dtype": "bfloat16", "matmul_precision": "default"},
}
WEIGHTS = 6  # query, key, value, out, wi, wo; wi makes two of Llama's seven products: gate and up
ELEMENTS = 2 * D * N * H + 2 * D * K * H + 3 * D * F
PLAN = SimpleNamespace(
    quantization=SimpleNamespace(kind="fp8", matmuls={("wi",): None}),
    layout=SimpleNamespace(platform="gpu"),
    roles={"wi": "trainable"},
)


@functools.cache
def compiled(kind, topology, flags=""):
    """The gradients of a Llama layer to its input and its weights, sharded by fsdp, on a row a device: the program."""
    config = load(**LLAMA, quantization=kind)
    layout, spec = make_layout(config.mesh, abstract_devices(parse_topology(topology, 1))), spec_of(config)
    graphdef, declarations = params.abstract(lambda rngs: Block(spec.layers[0], spec, rngs))
    quantized = quantization.select(config.step, declarations, layout)
    shapes = params.values(declarations)
    at = weight_shardings(layout, shapes, params.field(declarations, "out_sharding"))
    weights = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, at)
    rows = layout.sharding(("batch", None, None))
    x = jax.ShapeDtypeStruct((layout.mesh.size, T, D), jnp.bfloat16, sharding=rows)

    def loss(weights, x_BTD):
        ones_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
        block = nnx.merge(graphdef, quantization.attach(quantized, weights, layout))
        out_BTD, _, _ = block(x_BTD, ForwardContext(ones_BT, ones_BT, layout, "dot_product", True), None, 0)
        return jnp.sum(jnp.square(out_BTD.astype(jnp.float32)))

    options = compiler_options(flags, layout.mesh.devices.flat[0], 1)
    if layout.platform == "gpu" and not flags:
        options |= NO_AUTOTUNING
    step = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=options, out_shardings=(at, rows))
    return step.lower(weights, x).compile().as_text()


def sent(text, kind):
    """The dtypes of the matrices that a kind of collective moves; vectors are norms' scales, and codes' ones."""
    found = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
    arrays = [array for types in found for array in re.findall(r"(\w+)\[([\d,]+)\]", types)]
    return {dtype for dtype, dims in arrays if math.prod(map(int, dims.split(","))) > 4 * F}


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize(
    "topology", ["v5e-4", *(pytest.param(name, marks=pytest.mark.long) for name in ("v6e-4", "v5p-8"))]
)
def test_a_tpu_makes_every_product_with_a_weight_of_int8(topology):
    text = compiled("int8", topology)
    products = re.findall(r'= (\w+)\[\S* convolution\((.*?)\), .*?op_name="([^"]*)"', text)
    with_weights = [dtype for dtype, _, name in products if "SKH" not in name]  # that is attention's
    assert with_weights == ["s32"] * 3 * WEIGHTS
    assert [narrow for _, _, narrow in eight_bits.matmuls(text)] == [True] * 3 * WEIGHTS
    assert sent(text, "all-gather") == {"s8"}
    assert sent(text, "all-reduce") == {"bf16"}  # gradients, no sum of 32 bits
    # No device waits for another's largest magnitudes, but for the weights', which are found before the first layer.
    maxima = set(re.findall(r"(?m)^%(\S+) .*\{\n(?:.*parameter.*\n)+\s*ROOT .* maximum\(", text))
    waits = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    assert len([line for line in waits if re.search(r"to_apply=%(\S+?)[,\s]", line)[1] in maxima]) == 1


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.long
def test_a_tpu7x_makes_every_product_with_a_weight_of_float8():
    text = compiled("fp8", "tpu7x-8")
    made = {"f8e4m3fn x f8e4m3fn": WEIGHTS, "f8e5m2 x f8e4m3fn": 2 * WEIGHTS}  # forward, backward
    assert Counter(how for _, how, narrow in eight_bits.matmuls(text) if narrow) == made
    assert all(narrow for *_, narrow in eight_bits.matmuls(text))
    assert sent(text, "all-gather") == {"f8e4m3fn"}


@needs_cuda
def test_a_gpu_makes_every_product_with_a_weight_of_float8():
    """Some are made as one: those of query, key and value. So their operations are counted."""
    text = compiled("fp8", "a3")
    shapes = {name: list(map(int, dims.split(","))) for name, dims in re.findall(r"%(\S+) = \(?\w+\[([\d,]+)\]", text)}
    operations = 0
    for name, left, summed in re.findall(
        r'%(\S+) = .*? custom-call\(%([^,]+),.*"__cublas\$lt\$matmul\$f8".*?"lhs_contracting_dimensions":\["(\d)"\]',
        text,
    ):
        operations += math.prod(shapes[name]) * shapes[left][int(summed)]
    assert operations == 3 * T * ELEMENTS
    assert sent(text, "all-gather") == {"f8e4m3fn"}
    assert all(narrow for _, _, narrow in eight_bits.matmuls(text))


@pytest.mark.long
@needs_cuda
def test_a_blackwell_gpu_makes_every_product_with_a_weight_in_blocks():
    text = compiled("mxfp8", "a4")
    found = eight_bits.matmuls(text)
    assert [(how, narrow) for _, how, narrow in found] == [("__cudnn$blockScaledDot", True)] * 3 * WEIGHTS
    assert sent(text, "all-gather") == {"f8e4m3fn", "f8e8m0fnu"}  # weights as codes, with the blocks' scales
    assert sent(text, "reduce-scatter") == {"bf16"}


@pytest.mark.long
@needs_cuda
def test_an_evaluation_on_a_gpu_multiplies_in_float8_too():
    keys = {**LLAMA, "quantization": "fp8", "vocab_size": 512}
    traced = trace_train_step(load(**keys), abstract_devices(parse_topology("a3:1", 1)))
    text = traced.eval.lower(traced.state.weights, traced.batch).compile().as_text()
    # Those of query, key and value are made as one; the loop's body stands there once.
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == WEIGHTS - 2


@pytest.mark.long  # programs that lack some of their products are refused below
@needs_cuda
def test_a_gpus_program_with_wider_products_is_refused():
    """Triton's: its float8 becomes float16."""
    program = SimpleNamespace(as_text=lambda: compiled("fp8", "a3", "--xla_gpu_enable_triton_gemm=true"))
    with pytest.raises(UserError, match=r"quantization=fp8: the compiled step has .* these in more bits: .*in_8_bits"):
        eight_bits.check(program, PLAN)


@needs_cuda
def test_a_gpus_program_without_the_products_of_one_pass_is_refused():
    """As where the compiler made them into something that has lost their name."""
    text = compiled("fp8", "a3")
    eight_bits.check(SimpleNamespace(as_text=lambda: text), PLAN)

    def without(is_lost):
        lines = [line for line in text.splitlines() if "in_8_bits" not in line or not is_lost("transpose(" in line)]
        return SimpleNamespace(as_text=lambda: "\n".join(lines))

    with pytest.raises(
        UserError, match=r"has [1-9]\d* matmuls in 8 bits, and these in more bits: every forward one\. "
    ):
        eight_bits.check(without(lambda is_backward: not is_backward), PLAN)
    with pytest.raises(
        UserError, match=r"has [1-9]\d* matmuls in 8 bits, and these in more bits: every backward one\. "
    ):
        eight_bits.check(without(lambda is_backward: is_backward), PLAN)
    # As where the layers' weights are frozen, and the output's alone are trained.
    some_frozen = SimpleNamespace(**vars(PLAN) | {"roles": {"wi": "frozen", "output": "trainable"}})
    eight_bits.check(without(lambda is_backward: is_backward), some_frozen)
    # A fixed number that is no product's, such as Gemma 4's of a layer, excuses nothing.
    fixed = SimpleNamespace(**vars(PLAN) | {"roles": {"wi": "trainable", "layer_scalar": "frozen"}})
    with pytest.raises(UserError, match="every backward one"):
        eight_bits.check(without(lambda is_backward: is_backward), fixed)
    with pytest.raises(UserError, match=r"has 0 matmuls in 8 bits, .*: every forward one, every backward one"):
        eight_bits.check(without(lambda is_backward: True), PLAN)
