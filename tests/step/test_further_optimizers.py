"""Adafactor and Muon against Optax's and PyTorch's, and optimizers by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from src.model.params import by_path
from src.step.adafactor import adafactor
from src.step.matrices import MatrixDims
from src.step.muon import muon, orthogonalise
from src.step.optimizer import clip, hparams_at, learning_rate
from src.step.optimizer_rules import OptimizerInputs, describe_rules
from src.system.errors import UserError
from tests.step.updates import ADAM, MATRICES, MESH, SETTINGS, our_updates, problem, pytorchs_updates
from tests.tiny import VOCAB, assert_close, load, make


def stacked_problem():
    """As `problem`, with kernels of three layers in one array, and the `MatrixDims` of each weight."""
    rng = np.random.default_rng(1)
    shapes = {"bias": (3, 4), "wide": (3, 6, 2, 4), "tall": (3, 2, 4, 5)}

    def draw(scale):
        return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}

    kinds = {
        "bias": MatrixDims((0,), (), (1,), hidden=False),
        "wide": MatrixDims((0,), (1,), (2, 3), hidden=True),
        "tall": MatrixDims((0,), (1, 2), (3,), hidden=True),
    }
    return draw(1.0), [draw(scale) for scale in np.linspace(0.1, 2.0, 4)], kinds


def by_matrix(tree):
    """Each layer's arrays of `stacked_problem`, kernels as matrices."""
    rows = {"bias": (4,), "wide": (6, 8), "tall": (8, 5)}
    return [{name: tree[name][layer].reshape(shape) for name, shape in rows.items()} for layer in range(3)]


def moved(after, before):
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), after, before)


def test_adafactor_equals_optaxs_for_each_layer_by_itself():
    weights, gradients, kinds = stacked_problem()
    decays = {"bias": False, "wide": True, "tall": True}
    ours, state = our_updates(
        "adafactor", weights, decays, gradients, matrices=kinds, gradient_clipping_threshold=0, learning_rate=0.01
    )
    assert [leaf.size for leaf in jax.tree.leaves(state)] == [1, *(3 * 8, 3 * 6), *(3 * 5, 3 * 8), 3 * 4]
    assert {leaf.dtype for leaf in jax.tree.leaves(state)[1:]} == {jnp.dtype("float32")}
    config = load(**{**SETTINGS, "learning_rate": 0.01})
    for layer, found in enumerate(by_matrix(ours)):
        expected = by_matrix(weights)[layer]
        state = None
        for step, gradient in enumerate(gradients):
            rate = learning_rate(config.step, config.run.steps, step)
            optimizer = optax.adafactor(
                rate,
                min_dim_size_to_factor=1,
                weight_decay_rate=rate * config.step.adam_weight_decay,
                weight_decay_mask=decays,
            )
            state = state or optimizer.init(expected)
            updates, state = optimizer.update(by_matrix(gradient)[layer], state, expected)
            expected = optax.apply_updates(expected, updates)
        assert_close(moved(found, by_matrix(weights)[layer]), moved(expected, by_matrix(weights)[layer]), 1e-4)


@pytest.mark.parametrize(("kind", "padding"), [("table", (2, 0)), ("output", (0, 2))])
def test_adafactor_is_the_same_however_far_a_vocabulary_is_padded(kind, padding):
    V, D, rng = 6, 4, np.random.default_rng(3)
    shape = (V, D) if kind == "table" else (D, V)
    weights = {kind: rng.normal(size=shape).astype(np.float32)}
    gradients = [{kind: rng.normal(size=shape, scale=3.0).astype(np.float32)} for _ in range(4)]

    def updated(weights, gradients):
        kinds = {kind: MatrixDims((), (0,), (1,), hidden=False, vocab=(shape.index(V), V))}
        settings = {"gradient_clipping_threshold": 0, "learning_rate": 0.01}
        return our_updates("adafactor", weights, {kind: True}, gradients, matrices=kinds, **settings)[0][kind]

    def padded(x, value):
        return {kind: np.pad(x[kind], [(0, extra) for extra in padding], constant_values=value)}

    # Padding has values, as it is initialised like the rest, and no gradient.
    ours = updated(padded(weights, 7.0), [padded(gradient, 0.0) for gradient in gradients])
    np.testing.assert_allclose(ours[: shape[0], : shape[1]], updated(weights, gradients), rtol=1e-5)


def test_a_models_vocabulary_is_known_to_its_optimizer_by_its_own_size():
    _, plan = make()
    sizes = {path: kind.vocab for path, kind in by_path(plan.matrices).items() if kind.vocab}
    assert sizes == {("embedding",): (0, VOCAB), ("output",): (1, VOCAB)}


def test_muon_equals_pytorchs_for_each_layer_by_itself_and_adamw_for_what_is_no_matrix():
    weights, gradients, kinds = stacked_problem()
    decays = {"bias": False, "wide": True, "tall": True}
    settings = {"gradient_clipping_threshold": 0, "matrices": kinds}
    ours, _ = our_updates("muon", weights, decays, gradients, **settings)
    adamw, _ = our_updates("adamw", weights, decays, gradients, **settings)
    np.testing.assert_allclose(ours["bias"], adamw["bias"], rtol=1e-6)

    for layer, found in enumerate(by_matrix(ours)):
        before = by_matrix(weights)[layer]

        def muon(wide, tall):
            return torch.optim.Muon(
                [wide, tall], weight_decay=0.3, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
            )

        # PyTorch's orthogonalises in bfloat16.
        expected = pytorchs_updates(muon, before, [by_matrix(each)[layer] for each in gradients], 0, ("wide", "tall"))
        del found["bias"], before["bias"], expected["bias"]
        assert_close(moved(found, before), moved(expected, before), 0.03)


@pytest.mark.parametrize("shape", [(2, 16, 40), (3, 40, 16)])
def test_orthogonal_updates_have_the_singular_vectors_and_values_near_one(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    with jax.default_matmul_precision("highest"):
        y = np.asarray(orthogonalise(jnp.asarray(x)))
    values = np.einsum("sir,sio,sro->sr", u, y, v)
    assert np.all((values > 0.65) & (values < 1.25))
    np.testing.assert_allclose((u * values[:, None]) @ v, y, atol=1e-4)


def test_matrices_are_what_a_layers_products_multiply_by():
    _, plan = make(
        num_experts=4,
        num_experts_per_tok=2,
        attention_bias="true",
        position_type="learned",
        lora_rank=2,
        lora_parameters="[attention.out]",
        load_parameters_path="x",
    )
    kinds = {path[-1]: kind for path, kind in by_path(plan.matrices).items()}
    found = {name: (kind.batch, kind.reduction, kind.output, kind.hidden) for name, kind in kinds.items()}
    assert found["query"] == ((0,), (1,), (2, 3), True)
    assert found["router"] == ((0,), (1,), (2,), True)
    assert found["wi"] == ((0, 1, 3), (2,), (4,), True)
    assert found["wo"] == ((0, 1), (2,), (3,), True)
    assert found["down"] == ((0,), (1, 2), (3,), True)
    assert found["up"] == ((0,), (1,), (2,), True)
    assert found["embedding"] == found["position_embedding"] == ((), (0,), (1,), False)
    assert found["output"] == ((), (0,), (1,), False)
    assert found["query_bias"] == ((0,), (), (1, 2), False)
    assert found["scale"] == ((0,), (), (1,), False)


LINEAR = {  # a layer of linear attention and one of attention
    "decoder_segments": "[{repeats: 2, pattern: [{attention_type: gated_delta}, {}]}]",
    "base_num_decoder_layers": 4,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "gdn_key_head_dim": 4,
    "gdn_value_head_dim": 6,
}


def test_a_layer_of_linear_attention_is_whole_matrices():
    adapters = {"lora_rank": 2, "lora_parameters": "[qkv, attention.out]", "load_parameters_path": "x"}
    _, plan = make(**LINEAR, **adapters)
    kinds, shapes = by_path(plan.matrices), by_path(plan.shapes)
    of_layer = {path: kind for path, kind in kinds.items() if "attention" in path and kind.hidden}
    assert {path[-1] for path in of_layer} >= {"qkv", "gate", "write_gate", "decay_gate", "out", "up", "down"}
    for path, kind in of_layer.items():
        assert kind.batch == (0,), (path, shapes[path].shape, kind)


def test_muon_makes_the_projections_of_linear_attention_orthogonal():
    """A first update is orthogonal as one matrix [D, outputs] a layer, with the gradient's singular vectors."""
    _, plan = make(**LINEAR, opt_type="muon", adam_weight_decay=0)
    optimizer, rate = plan.optimizer(hparams_at(plan.step, 20, 10)), hparams_at(plan.step, 20, 10)["learning_rate"]
    weights, rng = plan.split(plan.shapes).trainable, np.random.default_rng(0)
    weights = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), jnp.float32), weights)
    updates = by_path(jax.jit(optimizer.update)(weights, optimizer.init(weights), weights)[0])
    gradients = by_path(weights)
    for path in (path for path in updates if path[-1] in ("qkv", "gate", "write_gate", "decay_gate")):
        for gradient, update in zip(gradients[path], updates[path], strict=True):
            matrix = np.reshape(gradient, (len(gradient), -1))
            u, _, v = np.linalg.svd(matrix, full_matrices=False)
            made = np.reshape(update, matrix.shape) / (-0.2 * rate * np.sqrt(max(matrix.shape)))
            values = np.einsum("ir,io,ro->r", u, made, v)
            assert np.all((values > 0.65) & (values < 1.25)), path
            np.testing.assert_allclose((u * values) @ v, made, atol=1e-3, err_msg=str(path))


RULES = """[{match: bias, learning_rate_scale: 0.1, opt_type: sgd, weight_decay: 0.2}, {match: table, weight_decay: 0},
    {match: scale, opt_type: adafactor}, {match: "k*", opt_type: muon, learning_rate_scale: 3}]"""


def test_rules_give_each_weight_its_own_optimizer_and_rates():
    """Beside each weight alone with optax's transformations, written out."""
    weights, decays, gradients = problem()
    rng = np.random.default_rng(1)
    more = {"table": (6, 4), "scale": (4,), "other": (3, 4)}
    weights |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in more.items()}
    gradients = [
        gradient | {name: rng.normal(size=shape).astype(np.float32) for name, shape in more.items()}
        for gradient in gradients
    ]
    decays |= {"table": True, "scale": False, "other": True}
    matrices = MATRICES | {
        "table": MatrixDims((), (0,), (1,), hidden=False),
        "scale": MatrixDims((), (), (0,), hidden=False),
        "other": MatrixDims((), (0,), (1,), hidden=True),
    }
    config = load(**SETTINGS, **ADAM, optimizer_rules=RULES)
    ours, state = our_updates("adamw", weights, decays, gradients, matrices, optimizer_rules=RULES)
    adam = optax.scale_by_adam(config.step.adam_b1, config.step.adam_b2, config.step.adam_eps)
    of_kernel = ({"w": matrices["kernel"]}, {"w": NamedSharding(MESH, P(None, None))}, {"muon_beta": 0.0})
    _, orthogonal = muon({"w": True}, OptimizerInputs(*of_kernel, "float32", False))
    kinds = {  # scaling, decay, rate over the others'
        "bias": ([], 0.2, 0.1),
        "table": ([adam], 0.0, 1.0),
        "scale": (adafactor({"w": True}, OptimizerInputs({"w": matrices["scale"]}, None, {}, "", False)), 0.0, 1.0),
        "kernel": ([optax.trace(config.step.muon_beta, nesterov=True), orthogonal], 0.3, 3.0),
        "other": ([adam], 0.3, 1.0),
    }
    for name, (scaling, decay, scale) in kinds.items():
        weight, own = {"w": weights[name]}, None
        for step, gradient in enumerate(gradients):
            clipped = clip(gradient, optax.tree.norm(gradient), np.float32(config.step.gradient_clipping_threshold))
            rate = learning_rate(config.step, config.run.steps, step)
            chain = optax.chain(*scaling, optax.add_decayed_weights(decay), optax.scale(-rate * scale))
            own = chain.init(weight) if own is None else own
            updates, own = chain.update({"w": clipped[name]}, own, weight)
            weight = optax.apply_updates(weight, updates)
        np.testing.assert_allclose(ours[name], weight["w"], rtol=2e-6, atol=2e-6, err_msg=name)
    held = {jax.tree_util.keystr(path).rpartition("['")[2][:-2] for path, _ in jax.tree.leaves_with_path(state)}
    assert "bias" not in held, "sgd keeps nothing"


def test_a_rule_that_takes_nothing_is_refused():
    with pytest.raises(UserError, match=r"optimizer_rules: \*\.nrom matches no weight that is trained: attention"):
        make(optimizer_rules='[{match: "*.nrom"}]')
    with pytest.raises(UserError, match=r"earlier rules take every weight that \*norm.scale matches"):
        make(optimizer_rules='[{match: "*.scale"}, {match: "*norm.scale"}]')
    with pytest.raises(UserError, match="matches no weight that is trained"):
        make(optimizer_rules="[{match: embedding}]", trainable_parameters="[attention.query]")
    config, plan = make(optimizer_rules='[{match: "*.scale", opt_type: sgd}, {match: embedding, weight_decay: 0}]')
    assert describe_rules(config.step, plan.rules, plan.shapes).splitlines() == [
        "*.scale: 3 weights, 160 parameters: sgd, learning rate x 1",
        "embedding: 1 weight, 4,096 parameters: adamw, learning rate x 1, weight decay 0",
        "the rest: 7 weights, 22,528 parameters: adamw, learning rate x 1",
    ]


def test_rules_take_adapters_by_their_names():
    """LoRA+ (Hayou et al. 2024, section 4) multiplies the learning rate of the matrix that begins as zero."""
    given = {"lora_rank": 4, "load_parameters_path": "elsewhere", "opt_type": "sgd", "gradient_clipping_threshold": 0}
    config, plan = make(**given, optimizer_rules='[{match: "lora.*.up", learning_rate_scale: 16}]')
    hparams = hparams_at(config.step, config.run.steps, 3)
    weights = jax.eval_shape(plan.init_weights).trainable
    optimizer, gradients = plan.optimizer(hparams), jax.tree.map(lambda w: np.ones(w.shape, w.dtype), weights)
    zeros = jax.tree.map(np.zeros_like, gradients)  # which have no decay
    updates = by_path(optimizer.update(gradients, optimizer.init(zeros), zeros)[0])
    assert {path[-1] for path in updates} == {"up", "down"}
    for path, update in updates.items():
        rate = learning_rate(config.step, config.run.steps, 3) * (16 if path[-1] == "up" else 1)
        np.testing.assert_allclose(update, np.full(update.shape, -rate), rtol=1e-6)
