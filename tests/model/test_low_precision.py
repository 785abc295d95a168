"""Products in 8 bits against the same ones in float64 of operands that numpy rounds, and what runs with them."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from src.extras.generation.generate import Generator, Sampling
from src.extras.generation.inference_weights import quantize_at_rest, unrolled
from src.model import params
from src.model.decoder import Decoder
from src.model.forward_context import ForwardContext
from src.model.lora import Adapted
from src.model.low_precision import FORMATS, MAX_SUMMED, EightBitMatmuls, largest
from src.model.quantization import Quantized, attach, select
from src.parallel.chips import peak_flops
from src.parallel.mesh import make_layout
from src.system.errors import UserError
from tests.tiny import LENGTH, VOCAB, Trainer, assert_close, load, loss_and_gradients, make, packed_rows, random_weights

QUERY = ("BTD,DNH->BTNH", ("embed", "heads", "head_dim"), (0,))
OUT = ("BTNH,NHD->BTD", ("heads", "head_dim", "embed"), (0, 1))
SIZES = {"B": 4, "T": 8, "D": 16, "N": 4, "H": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}


def layout_of(devices, **mesh):
    return make_layout(load(**mesh).mesh, jax.devices()[:devices])


def product(kind, einsum, axes, fan_in, layout, bounds=(0.0, 0.0, 0.0)):
    """The product by `matmul` and its gradients, compiled: x, w, gradient -> out, to x, to w."""
    products = EightBitMatmuls(FORMATS[kind], layout, bounds)
    dims = fan_in if kind == "int8" else None

    def multiply(x, w):
        return params.matmul(x, Quantized(w, largest(jax.lax.stop_gradient(w), dims), products, axes), einsum)

    @jax.jit
    def run(x, w, gradient):
        out, transpose = jax.vjp(multiply, x, w)
        return out, *transpose(gradient)

    return run


def operands(einsum, seed=0):
    """x, w and the gradient of their product, such that every int8 scale is a power of two: int8 codes are exact.

    Rows of x and channels of w differ in size. The gradient's largest stand where those are largest too.
    """
    rng = np.random.default_rng(seed)
    x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")

    def of(dims, kept):
        size, limit = [SIZES[dim] for dim in dims], 127 / 32
        array = np.clip(rng.normal(size=size), -limit, limit)
        array[tuple(slice(None) if dim in kept else 0 for dim in dims)] = limit
        powers = 2.0 ** rng.integers(-3, 1, [SIZES[dim] if dim in kept else 1 for dim in dims])
        powers[(0,) * len(dims)] = 1
        return (array * powers).astype(np.float32)

    gradient = np.clip(rng.normal(size=[SIZES[dim] for dim in out_dims]), -3, 3).astype(np.float32)
    gradient[tuple(slice(None) if dim in x_dims else 0 for dim in out_dims)] = 127 / 32
    gradient[tuple(slice(None) if dim in w_dims else 0 for dim in out_dims)] = 127 / 32
    return of(x_dims, out_dims), of(w_dims, out_dims), gradient


def rounded(x, dims, dtype):
    """What codes of x stand for, with a scale for each entry of all dims but these; float64."""
    greatest = np.max(np.abs(x), axis=dims, keepdims=True)
    if dtype == np.int8:
        scale = greatest / 127
        return np.rint(x / scale) * scale
    greatest = np.max(np.abs(x))
    scale = 2.0 ** (np.floor(np.log2(greatest / float(ml_dtypes.finfo(dtype).max))) + 1)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def transposes(einsum):
    """The einsums of a product's gradients: to x of gradient and w, to w of x and gradient."""
    x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")
    return f"{out_dims},{w_dims}->{x_dims}", f"{x_dims},{out_dims}->{w_dims}"


def reference(kind, case, x, w, gradient):
    """The product of operands that are rounded, and its gradients."""
    einsum, _, fan_in = case
    forward, backward = ((np.int8, np.int8), (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))[kind == "fp8"]
    x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")
    rows = tuple(out_dims.index(dim) for dim in out_dims if dim in x_dims)
    channels = tuple(out_dims.index(dim) for dim in out_dims if dim in w_dims)
    x8, w8 = rounded(x, tuple(range(2, x.ndim)), forward), rounded(w, fan_in, forward)

    def scale(array, dims):
        return np.max(np.abs(array), axis=dims) / 127 if kind == "int8" else np.ones(1)

    x_scale = scale(x, tuple(range(2, x.ndim))).reshape(*([4, 8] if kind == "int8" else [1]), *[1] * len(channels))
    w_scale = scale(w, fan_in)
    to_x, to_w = transposes(einsum)
    return [
        np.einsum(einsum, x8, w8),
        # The scales of the other operand are along the dims that are summed over, so the gradient has them in it.
        np.einsum(to_x, rounded(gradient * w_scale, channels, backward) / w_scale, w8),
        np.einsum(to_w, x8, rounded(gradient * x_scale, rows, backward) / x_scale),
    ]


@pytest.mark.parametrize("case", [QUERY, OUT], ids=["query", "out"])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_and_gradients_are_those_of_rounded_operands(kind, case):
    einsum, axes, fan_in = case
    x, w, gradient = operands(einsum)
    made = product(kind, einsum, axes, fan_in, layout_of(1))(x, w, gradient)
    to_x, to_w = transposes(einsum)
    wide = np.einsum(einsum, x, w), np.einsum(to_x, gradient, w), np.einsum(to_w, x, gradient)
    for array, expected, plain in zip(made, reference(kind, case, x, w, gradient), wide, strict=True):
        assert_close(array, expected, 1e-6)
        assert np.max(np.abs(plain - expected)) > 1e-3 * np.max(np.abs(expected))  # they are rounded


@pytest.mark.parametrize("case", [QUERY, OUT], ids=["query", "out"])
@pytest.mark.parametrize("kind", FORMATS)
def test_adapters_beside_rounded_weights_stay_wide(kind, case):
    """LoRA: a frozen weight's product is of 8 bits, and the adapters' products and gradients of what they take."""
    einsum, axes, fan_in = case
    x, w, gradient = operands(einsum)
    rng = np.random.default_rng(1)
    down, up = (rng.normal(size=shape) for shape in ((*w.shape[: len(fan_in)], 3), (3, *w.shape[len(fan_in) :])))
    products = EightBitMatmuls(FORMATS[kind], layout_of(1))
    dims = fan_in if kind == "int8" else None

    @jax.jit
    def run(x, down, up):
        base = Quantized(jnp.asarray(w), largest(jnp.asarray(w), dims), products, axes)
        out, transpose = jax.vjp(lambda x, *pair: params.matmul(x, Adapted(base, *pair), einsum), x, down, up)
        return out, *transpose(jnp.asarray(gradient))

    out, to_x, _ = reference(kind, case, x, w, gradient)
    to_x_einsum, to_w_einsum = transposes(einsum)
    added = np.tensordot(down, up, axes=1)  # the weight that the adapters stand for, and its gradient
    to_added = np.einsum(to_w_einsum, x.astype(np.float64), gradient)
    inner = len(fan_in)
    expected = [
        out + np.einsum(einsum, x, added),
        to_x + np.einsum(to_x_einsum, gradient, added),
        np.tensordot(to_added, up, axes=(list(range(inner, w.ndim)), list(range(1, up.ndim)))),
        np.tensordot(down, to_added, axes=(list(range(inner)), list(range(inner)))),
    ]
    for array, near in zip(run(x, down.astype(np.float32), up.astype(np.float32)), expected, strict=True):
        assert_close(array, near, 1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", [QUERY, OUT], ids=["query", "out"])
@pytest.mark.parametrize(
    "rules",
    [{}, {"logical_axis_rules__heads": "[fsdp,tensor]", "logical_axis_rules__embed": "[]"}],
    ids=["", "heads over rows' axis, then another"],
)
def test_a_mesh_makes_the_products_of_one_device(kind, case, rules):
    """Where each device finds the same largest magnitudes, each with its part of rows, tokens, heads and weights."""
    einsum, axes, fan_in = case
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-126, 127, [SIZES[dim] for dim in dims]) for dims in einsum.replace("->", ",").split(",")]
    for array in arrays:  # along every dim, in every part
        array[np.indices(array.shape).sum(axis=0) % 2 == 0] = 127
    arrays = [array.astype(np.float32) for array in arrays]
    on_one = product(kind, einsum, axes, fan_in, layout_of(1))(*arrays)
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_context_parallelism": 2}
    assert_close(product(kind, einsum, axes, fan_in, layout_of(8, **mesh, **rules))(*arrays), on_one, 1e-6)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(kind, value):
    x, w, gradient = operands(QUERY[0])
    run = product(kind, *QUERY, layout_of(1))
    x[1, 2, 3] = value
    out, _, to_w = run(x, w, gradient)
    assert not np.isfinite(out[1, 2]).any()
    assert not np.isfinite(to_w[3]).all()


def test_fixed_bounds_clip():
    x, w, gradient = operands(QUERY[0])
    run = product("fp8", *QUERY, layout_of(1), bounds=(0.0, 1.75, 0.875))
    x8, w8 = (rounded(array, (), ml_dtypes.float8_e4m3fn) for array in (np.clip(x, -1.75, 1.75), w))
    gradient8 = rounded(np.clip(gradient, -0.875, 0.875), (), ml_dtypes.float8_e5m2)
    assert np.max(np.abs(x)) > 1.75 == np.max(x8)
    assert np.max(np.abs(gradient)) > 0.875 == np.max(gradient8)
    expected = (np.einsum(QUERY[0], x8, w8), np.einsum("BTNH,DNH->BTD", gradient8, w8))
    assert_close(run(x, w, gradient), (*expected, np.einsum("BTD,BTNH->DNH", x8, gradient8)), 1e-6)


def test_fixed_bounds_of_weights_are_theirs():
    ranges = {"weight": "fixed,-0.25,0.25", "act": "fixed,-8,8", "bwd": "fixed,-0.5,0.5"}
    _, plan = make(quantization="fp8", **{f"{of}_quantization_calibration_method": it for of, it in ranges.items()})
    query = attach(plan.quantization, random_weights(plan), plan.layout)["segments"][0][0]["attention"]["query"]
    assert query.products.bounds == (0.25, 8.0, 0.5)
    np.testing.assert_array_equal(query.bound, np.full((2, 1, 1, 1), 0.25))


def test_more_products_than_an_int32_can_sum_are_refused():
    x, w = jnp.zeros((1, 1, MAX_SUMMED + 1)), jnp.zeros((MAX_SUMMED + 1, 1))
    products = EightBitMatmuls(FORMATS["int8"], layout_of(1))
    with pytest.raises(UserError, match=r"133,145 products on a device.*fewer tokens"):
        params.matmul(x, Quantized(w, jnp.ones((1, 1)), products, (None, None)), "BTD,DF->BTF")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_factor_of_a_weight_is_multiplied_as_it_is_in_the_whole(kind):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 8, 16)).astype(np.float32), rng.normal(size=(16, 2, 8)).astype(np.float32)
    w[:, 1] *= 3  # int8 has bounds for each channel of each factor, fp8 one for both
    bound = largest(jnp.asarray(w), (0,) if kind == "int8" else None)
    whole = Quantized(jnp.asarray(w), bound, EightBitMatmuls(FORMATS[kind], layout_of(1)), ("embed", None, "mlp"))
    out = params.matmul(jnp.asarray(x), whole, "BTD,DAF->BTAF")
    for index in range(2):
        factor = whole[..., index, :]
        assert factor.axes == ("embed", "mlp")
        np.testing.assert_array_equal(params.matmul(jnp.asarray(x), factor, "BTD,DF->BTF"), out[..., index, :])
    half = whole[..., 1, :4]
    np.testing.assert_array_equal(params.matmul(jnp.asarray(x), half, "BTD,DF->BTF"), out[..., 1, :4])


LATENT = {"attention_type": "mla", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 8}
KINDS = {
    "dense": {},
    "latent attention": LATENT,
    "further predictions": {"mtp_num_layers": 1},
    "unrolled, recomputed": {"scan_layers": "false", "remat_policy": "full"},
    "kept products": {"remat_policy": "minimal"},
    "tied": {"logits_via_embedding": "true"},
    "adapters": {"lora_rank": 3, "lora_alpha": 0.5, "lora_parameters": "['*']", "load_parameters_path": "elsewhere"},
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "facts", [name if name == "dense" else pytest.param(name, marks=pytest.mark.long) for name in KINDS]
)
def test_a_models_gradients_are_near_those_of_wide_products(kind, facts):
    _, wide = make(**KINDS[facts])
    _, plan = make(quantization=kind, **KINDS[facts])
    weights, batch = random_weights(plan), packed_rows(0)
    (loss, grads), (expected, wide_grads) = (loss_and_gradients(each, weights, batch) for each in (plan, wide))
    assert 0 < abs(loss - expected) < 0.02 * expected
    for path, gradient in params.by_path(grads).items():
        reference = params.by_path(wide_grads)[path]
        if np.linalg.norm(reference):
            cosine = np.vdot(gradient, reference) / np.linalg.norm(gradient) / np.linalg.norm(reference)
            assert cosine > (0.99 if kind == "int8" else 0.9), path


MESHES = {
    "fsdp, tensor and context": {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_context_parallelism": 2},
    "stages": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2},
    "micro-batches on replicas": {
        "ici_data_parallelism": 4,
        "ici_fsdp_parallelism": 2,
        "gradient_accumulation_steps": 2,
    },
    "norms shared out": {"ici_tensor_parallelism": 4, "logical_axis_rules__norm_length": "[context,tensor]"},
}


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, marks=() if (kind, mesh) == ("int8", "fsdp, tensor and context") else pytest.mark.long)
        for mesh in MESHES
        for kind in FORMATS
    ],
)
def test_a_step_on_a_mesh_is_near_that_on_one_device(kind, mesh):
    facts = {"quantization": kind, "base_num_kv_heads": 4, "remat_policy": "full"}
    batch = packed_rows(0, rows=16)
    one, many = Trainer(1, initial=False, **facts), Trainer(8, initial=False, **facts, **MESHES[mesh])
    expected, made = one.step(batch, 1), many.step(batch, 1)
    assert made["finite"]
    assert made["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    assert made["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


def test_excluded_weights_stay():
    _, plan = make(quantization="int8", quantization_exclude="[output,attention.*,feed_forward.wo]")
    assert [path[-1] for path in plan.quantization.matmuls] == ["wi"]
    assert plan.quantization.description == (
        "int8 in 2 weight matmuls, forward and backward; 11 not (output, key, out, query, value and 1 more)"
    )
    _, tied = make(quantization="int8", logits_via_embedding="true")
    assert tied.quantization.description.endswith("12 weight matmuls, forward and backward; 1 not (embedding)")


def test_weights_that_no_pattern_may_mean_are_refused():
    for facts, message in [
        ({"quantization_exclude": "[atention.query]"}, r"atention.query matches no weight.*attention.query"),
        ({"quantization_exclude": "['*']"}, "quantization_exclude leaves no weight for quantization="),
        (
            {"quantization": "fp8", **EXPERTS},
            r"=fp8 has no matmuls for experts.*quantization_exclude=\[output,router,embedding,.*,feed_forward.wi",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            make(**{"quantization": "int8", **facts})


def test_keys_that_do_not_go_together_are_refused():
    fixed = {"act_quantization_calibration_method": "fixed,-224,224"}
    assert load(quantization="fp8", **fixed)
    for keys, message in [
        ({"quantization": "int4"}, "quantization=int4 is none of"),
        (
            {"quantization": "nvfp4"},
            "no 4-bit matmuls, because jax.nn computes their gradients in 16 bits: quantization=mxfp8",
        ),
        ({"quantization": "int8", **fixed}, "needs quantization=fp8"),
        ({"quantization": "fp8", "act_quantization_calibration_method": "fixed,-2,3"}, "expected absmax, or a range"),
        ({"quantization": "fp8", "compile_xla_flags": "--xla_gpu_enable_triton_gemm"}, "computes no matmul of"),
        (
            {"quantization_exclude": "[output]"},
            "quantization_exclude=.* has no effect: it needs quantization=int8 or fp8 or mxfp8",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            load(**keys)


@pytest.mark.parametrize(
    ("kind", "device", "capability"),
    [
        ("fp8", "TPU v6 lite", None),
        ("int8", "TPU7x", None),
        ("fp8", "TPU v5", None),
        ("int8", "TPU v4", None),
        ("fp8", "NVIDIA A100-SXM4-80GB", "8.0"),
        ("fp8", "AMD Instinct MI300X", "gfx942"),
        ("int8", "NVIDIA H100 80GB HBM3", "9.0"),
        ("mxfp8", "NVIDIA H100 80GB HBM3", "9.0"),
        ("mxfp8", "NVIDIA GeForce RTX 5090", "12.0"),
        ("mxfp8", "TPU v6 lite", None),
    ],
)
def test_devices_without_the_products_are_refused(kind, device, capability):
    platform = "tpu" if "TPU" in device else "gpu"
    fake = SimpleNamespace(platform=platform, device_kind=device, compute_capability=capability)
    layout = SimpleNamespace(device=fake)
    of = {"fp8": "TPU7x, NVIDIA H100 80GB HBM3", "int8": "TPU v5 lite", "mxfp8": "NVIDIA B200"}[kind]
    makes = rf"MinText has no such matmuls for a {device}\. It has them for: {of}"
    with pytest.raises(UserError, match=f"quantization={kind}: {makes}"):
        select(load(quantization=kind).step, {}, layout)
    assert peak_flops(device, kind) is None


@pytest.mark.parametrize("facts", [{}, pytest.param(LATENT, marks=pytest.mark.long)], ids=["dense", "latent attention"])
def test_weights_kept_in_int8_generate_what_rounded_weights_do(facts):
    _, plan = make(**facts)
    weights = random_weights(plan)
    by_path = params.by_path(weights)
    _, declarations = params.abstract(lambda rngs: Decoder(plan.spec, rngs))
    fan_ins = params.by_path(params.field(declarations, "fan_in"))
    products = [path for path in by_path if fan_ins[path] and path not in {("embedding",), ("output",)}]
    for path in products:
        by_path[path] = rounded(by_path[path], fan_ins[path], np.int8).astype(np.float32)

    def tokens(of_plan, of_weights):
        generator = Generator(of_plan, of_weights, Sampling(0.0, 0, 1.0), 0, LENGTH)
        prompts = [np.array([5, 11, 7], np.int32), np.array([2], np.int32)]
        return list(itertools.islice(generator.tokens(*generator.padded(prompts, 2), np.zeros(2, np.int32)), 8))

    def placed(tree):
        return unrolled(plan, plan.split(jax.device_put(tree, plan.shardings)))

    kept_plan, kept = quantize_at_rest(*placed(weights), plan)
    np.testing.assert_array_equal(tokens(kept_plan, kept), tokens(*placed(params.nested(by_path))))
    codes = [leaf.size for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.int8]
    assert sum(codes) == sum(by_path[path].size for path in products)


def test_logits_of_weights_kept_in_int8_differ_as_much_as_their_rounding_explains():
    """To first order a logit moves by its derivatives times the weights' rounding errors.

    Of these each is even within half a step either way, so of a third of that squared in the mean.
    """
    _, plan = make(scan_layers="false")
    weights = random_weights(plan)
    text = packed_rows(0, rows=1)["tokens"]
    kept_plan, kept = quantize_at_rest(*unrolled(plan, plan.split(jax.device_put(weights, plan.shardings))), plan)
    wide_plan, wide = unrolled(plan, plan.split(jax.device_put(weights, plan.shardings)))

    def logits(of_plan, tree):
        decoder = of_plan.decoder(tree)
        positions = np.arange(text.size)[None]
        context = ForwardContext(positions, np.ones_like(text), of_plan.layout, of_plan.kernel, packed=False)
        hidden_BTD, _, _ = decoder(text, context, of_plan.execution)
        return decoder.logits(hidden_BTD, context)[0, -1, :VOCAB]

    moved = np.asarray(logits(kept_plan, kept)) - np.asarray(logits(wide_plan, wide))
    slopes = params.by_path(jax.jit(jax.jacrev(lambda tree: logits(wide_plan, tree)))(wide).merged())
    coded = {path: leaf.coded for path, leaf in params.by_path(kept.merged()).items() if hasattr(leaf, "coded")}
    assert len(coded) == 12
    explained = sum(
        np.sum(
            np.square(np.asarray(slopes[path]) * np.asarray(each.scale) / 2), axis=tuple(range(1, slopes[path].ndim))
        )
        for path, each in coded.items()
    )
    ratios = moved / np.sqrt(explained / 3)
    assert 0.6 < np.sqrt(np.mean(np.square(ratios))) < 1.4  # 1 but for how many logits and weights there are
    assert np.max(np.abs(ratios)) < 4.5
