"""What a layer moves over the axes tensor and context, counted in programs compiled for TPUs.

On v5e-16, 4 x 4 chips, each axis of the mesh lies along one dim of the torus: there the TPU compiler keeps a
reduce-scatter, which over a whole square it would turn into an all-reduce and a slice.
"""

from collections import Counter

import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.topology import parse_topology
from src.step.trace import trace_train_step
from tests.compilers import needs_libtpu
from tests.tiny import GPT3, load

pytestmark = [needs_libtpu, pytest.mark.usefixtures("little_effort")]

LAYERS, LENGTH, D, N, K, H = 3, 256, 512, 4, 4, 128
KEYS = {
    "base_num_decoder_layers": LAYERS,
    "base_emb_dim": D,
    "base_mlp_dim": 1024,
    "base_num_query_heads": N,
    "base_num_kv_heads": K,
    "head_dim": H,
    "vocab_size": 512,
    "max_target_length": LENGTH,
    "dtype": "bfloat16",
    "matmul_precision": "default",
}
MODELS = {
    "llama": {"base_num_query_heads": 8},
    "gpt": GPT3,
    "latent": {
        "attention_type": "mla",
        "base_num_kv_heads": None,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
TENSOR = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 4, "per_device_batch_size": 1}
SEQUENCE = {**TENSOR, "logical_axis_rules__norm_length": "[context,tensor]"}
STREAM = 16 // 4 * LENGTH * D * 2  # bytes of a device's rows of the residual stream, whole along T


def moved(training, **overrides):
    """How often a step, or an evaluation, runs each collective: by its kind, its axes and its bytes. And its text."""
    keys = {key: value for key, value in {**KEYS, **overrides}.items() if value is not None}
    step = trace_train_step(load(**keys), abstract_devices(parse_topology("v5e-16", 1)))
    lowered = step.jax_traced.lower() if training else step.eval.lower(step.state.weights, step.batch)
    text = lowered.compile().as_text()
    found = Counter()
    for each in collectives(text, step.plan.layout.mesh):
        found[each.kind, each.axes, each.whole_bytes] += each.times
    return found, text


def of_stream(found):
    """Of these, how many of each kind move the residual stream over tensor in each layer."""
    over_tensor = {key: times for key, times in found.items() if "tensor" in key[1]}
    assert all(size <= STREAM for _, _, size in over_tensor)
    # Beside layers the embedding and the output each have theirs.
    return {kind: times // LAYERS for (kind, _, size), times in over_tensor.items() if size == STREAM}


def test_without_sequence_sharding_a_layer_sums_twice():
    assert of_stream(moved(False, **MODELS["llama"], **TENSOR)[0]) == {"all-reduce": 2}


# Forward and backward of one step, at once: the test of tiles, below.
of_models = pytest.mark.parametrize("model", ["llama", "gpt", "latent"])


@pytest.mark.long
@of_models
def test_with_sequence_sharding_a_layer_gathers_twice_and_scatters_twice(model):
    assert of_stream(moved(False, **MODELS[model], **SEQUENCE)[0]) == {"all-gather": 2, "reduce-scatter": 2}


@pytest.mark.long
@of_models
def test_backwards_it_does_so_again(model):
    # A latent's gradient is summed before its projection, and so needs no scatter behind that.
    backward = 1 if model == "latent" else 2
    found, _ = moved(True, remat_policy="none", **MODELS[model], **SEQUENCE)
    assert of_stream(found) == {"all-gather": 4, "reduce-scatter": 2 + backward}


ROW = 1024  # tokens that devices share out
CONTEXT = {
    **{"ici_fsdp_parallelism": 4, "ici_context_parallelism": 4},
    **{"per_device_batch_size": 0.25, "max_target_length": ROW},
}
KEYS_OF_ROW = 16 // 4 // 4 * ROW * K * H * 2  # bytes of all keys of a device's rows, and of all values


def test_over_the_context_axis_a_layer_moves_keys_and_values_alone():
    """Beside them its weights, in whose gathers the axis has a part, and segments."""
    found, text = moved(False, **MODELS["llama"], **CONTEXT)
    assert "splash" in text
    large = {key: times for key, times in found.items() if "context" in key[1] and key[2] > 2**14}
    assert large.pop(("all-gather", ("context",), KEYS_OF_ROW)) == 2 * LAYERS
    weights = {(kind, axes) for kind, axes, _ in large}
    assert weights == {("all-gather", ("fsdp", "context"))}


@pytest.mark.long
def test_over_the_context_axis_a_layer_moves_gradients_of_keys_and_values_back():
    """So it does with tiles of the loss, below."""
    found, _ = moved(True, remat_policy="none", **MODELS["llama"], **CONTEXT)
    assert over_context(found) == {
        (kind, ("context",), KEYS_OF_ROW): 2 * LAYERS for kind in ("all-gather", "reduce-scatter")
    }


def over_context(found):
    """Of these, those that move more than segments over context alone."""
    return {key: times for key, times in found.items() if key[1] == ("context",) and key[2] > 2**14}


@pytest.mark.long
def test_over_the_context_axis_a_layer_of_latents_moves_them_and_their_rotary_key_alone():
    """And their gradients, which come in one sum, or with JAX 0.11 in two scatters of the same bytes."""
    latent, rotary = (16 // 4 // 4 * ROW * size * 2 for size in (128, 64))
    gathers = {("all-gather", ("context",), size): LAYERS for size in (latent, rotary)}
    found, text = moved(False, **MODELS["latent"], **CONTEXT)
    assert "splash" in text
    assert over_context(found) == gathers
    found, _ = moved(True, remat_policy="none", **MODELS["latent"], **CONTEXT)
    one_sum = {("all-reduce", ("context",), latent + rotary): LAYERS}
    two_scatters = {("reduce-scatter", ("context",), size): LAYERS for size in (latent, rotary)}
    assert over_context(found) in ({**gathers, **one_sum}, {**gathers, **two_scatters})


def test_over_the_context_axis_a_device_gathers_those_key_heads_that_its_queries_read():
    """Of two heads that are copied over tensor 4, each device the one of its two query heads; the rest are weights."""
    axes = {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 4, "ici_tensor_parallelism": 4}
    heads = {"base_num_query_heads": 8, "base_num_kv_heads": 2, "logical_axis_rules__kv_heads": "[]"}
    found, text = moved(False, **axes, **heads, per_device_batch_size=0.25, max_target_length=ROW)
    assert "splash" in text
    largest = max(over_context(found), key=lambda key: key[2])
    assert largest == ("all-gather", ("context",), 4 * ROW * H * 2)
    assert found[largest] == 2 * LAYERS


TILES = {"num_vocab_tiling": 4, "remat_policy": "none", "vocab_size": 2048}


@pytest.mark.long
def test_tiles_of_the_loss_gather_the_hidden_states_of_a_tile_alone_over_tensor():
    """Forward, and backward again; whole the stream is in the layers' gathers, and in the embedding's gradient's."""
    found, _ = moved(True, **MODELS["llama"], **SEQUENCE, **TILES)
    gathers = {size: times for (kind, axes, size), times in found.items() if kind == "all-gather" and "tensor" in axes}
    assert gathers == {STREAM: 4 * LAYERS + 1, STREAM // 4: 2 * 4}
    # Each layer gathers twice and scatters twice, and backwards again.
    assert of_stream(found) == {"all-gather": 4, "reduce-scatter": 4}


@pytest.mark.long
def test_tiles_of_the_loss_gather_no_hidden_states_over_context():
    """What crosses it is keys and values, as without tiles, and weights, which fsdp shards too."""
    found, _ = moved(True, **MODELS["llama"], **CONTEXT, **TILES)
    assert over_context(found) == {
        (kind, ("context",), KEYS_OF_ROW): 2 * LAYERS for kind in ("all-gather", "reduce-scatter")
    }


@pytest.mark.long
def test_sharded_latents_are_gathered_not_multiplied_by_one_devices_rows_at_a_time():
    """XLA would make loops of permutes of such products, with a few rows of a weight in each round."""
    permuted = []
    for rule in ("[]", "[fsdp,context,expert]"):
        found, _ = moved(True, **MODELS["latent"], per_device_batch_size=2, logical_axis_rules__latent=rule)
        permuted.append(sum(times for (kind, *_), times in found.items() if kind == "collective-permute"))
    assert permuted[1] == permuted[0]
