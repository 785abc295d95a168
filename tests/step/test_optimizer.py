"""Updates against PyTorch's optimizers, and the schedules' closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from src.model.params import by_path
from src.step.adafactor import adafactor, clip_matrices
from src.step.matrices import MatrixDims
from src.step.muon import muon, orthogonalise
from src.step.optimizer import clip, hparams_at, learning_rate, make_optimizer
from src.step.optimizer_rules import OptimizerInputs, assign_rules, describe_rules
from src.step.state import state_shardings
from src.system.errors import UserError
from tests.tiny import VOCAB, assert_close, load, make

SETTINGS = {"adam_weight_decay": 0.3, "gradient_clipping_threshold": 1.0, "learning_rate": 0.1}
ADAM = {"adam_eps": 1e-6}
MATRICES = {"bias": MatrixDims((), (), (0,), hidden=False), "kernel": MatrixDims((), (0,), (1,), hidden=True)}
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def problem(steps=5):
    """Weights that decay and a bias that does not, and gradients of which some must be clipped."""
    rng = np.random.default_rng(0)
    weights = {"bias": rng.normal(size=4), "kernel": rng.normal(size=(3, 4))}
    weights = jax.tree.map(lambda w: w.astype(np.float32), weights)
    scales = np.linspace(0.05, 2.0, steps)
    gradients = [
        jax.tree.map(lambda w, scale=scale: (scale * rng.normal(size=w.shape)).astype(np.float32), weights)
        for scale in scales
    ]
    return weights, {"bias": False, "kernel": True}, gradients


def our_updates(opt_type, weights, decays, gradients, matrices=MATRICES, **overrides):
    adam = ADAM if opt_type in ("adamw", "muon") else {}
    config = load(opt_type=opt_type, **{**SETTINGS, **adam, **overrides})
    whole = jax.tree.map(lambda w: NamedSharding(MESH, PartitionSpec(*(None,) * w.ndim)), weights)
    given = config.step, decays, matrices, whole
    rules = assign_rules(config.step, weights)

    @jax.jit
    def update(weights, state, gradient, hparams):
        optimizer = make_optimizer(*given, hparams, rules)
        clipped = clip(gradient, optax.tree.norm(gradient), hparams["clip"])
        updates, state = optimizer.update(clipped, state, weights)
        return optax.apply_updates(weights, updates), state

    state = make_optimizer(*given, hparams_at(config.step, config.run.steps, 0), rules).init(weights)
    for step, gradient in enumerate(gradients):
        weights, state = update(weights, state, gradient, hparams_at(config.step, config.run.steps, step))
    return weights, state


def pytorchs_updates(make, weights, gradients, threshold, given=("kernel", "bias")):
    config = load(**SETTINGS, **ADAM)
    parameters = {name: torch.nn.Parameter(torch.tensor(weight)) for name, weight in weights.items()}
    optimizer = make(*(parameters[name] for name in given))
    for step, gradient in enumerate(gradients):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        if threshold:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), threshold)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.step, config.run.steps, step)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


@pytest.mark.parametrize("threshold", [1.0, 0.0])
def test_adamw_equals_pytorchs_with_decoupled_decay_and_clipping(threshold):
    weights, decays, gradients = problem()

    def adamw(decaying, other):
        groups = [{"params": [decaying], "weight_decay": 0.3}, {"params": [other], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)

    ours, _ = our_updates("adamw", weights, decays, gradients, gradient_clipping_threshold=threshold)
    assert_close(ours, pytorchs_updates(adamw, weights, gradients, threshold), 1e-5)


def test_sgd_equals_pytorchs():
    weights, decays, gradients = problem()

    def sgd(decaying, other):
        groups = [{"params": [decaying], "weight_decay": 0.3}, {"params": [other], "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)  # its decay, too, is scaled by the learning rate

    ours, state = our_updates("sgd", weights, decays, gradients)
    assert_close(ours, pytorchs_updates(sgd, weights, gradients, 1.0), 1e-5)
    assert jax.tree.leaves(state) == []


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


def test_the_first_moment_has_mu_dtype():
    weights, decays, gradients = problem()
    exact, _ = our_updates("adamw", weights, decays, gradients)
    rounded, state = our_updates("adamw", weights, decays, gradients, mu_dtype="bfloat16")
    (moments,) = [part for part in state if isinstance(part, optax.ScaleByAdamState)]
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.mu)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.nu)} == {jnp.dtype("float32")}
    assert_close(rounded, exact, 1e-2)


def test_norms_and_biases_do_not_decay_however_they_are_stacked():
    _, plan = make(normalization="layer", attention_bias="true", mlp_bias="true", position_type="learned")
    decays = {jax.tree_util.keystr(path): decay for path, decay in jax.tree_util.tree_leaves_with_path(plan.decays)}
    exempt = {path.rpartition("['")[2].removesuffix("']") for path, decay in decays.items() if not decay}
    decaying = {path.rpartition("['")[2].removesuffix("']") for path, decay in decays.items() if decay}
    biases = {f"{name}_bias" for name in ("query", "key", "value", "out", "wi", "wo")}
    assert exempt == biases | {"scale", "bias"}
    assert decaying == {"embedding", "position_embedding", "output", "query", "key", "value", "out", "wi", "wo"}


def rates(steps, **overrides):
    config = load(steps=steps, learning_rate=2.0, learning_rate_final_fraction=0.25, **overrides)
    return [learning_rate(config.step, config.run.steps, step) for step in range(steps)], config


def test_cosine_schedule():
    rate, config = rates(110, warmup_steps_fraction=10 / 110)
    np.testing.assert_allclose(rate[:10], 2.0 * np.arange(1, 11) / 10)
    assert rate[10] == 2.0
    assert rate[60] == pytest.approx(2.0 * (1 + 0.25) / 2)  # half way down: the mean of both ends
    assert rate[109] == pytest.approx(2.0 * (0.25 + 0.75 * (1 + np.cos(np.pi * 99 / 100)) / 2))
    assert learning_rate(config.step, config.run.steps, 110) == 0.0


def test_wsd_schedule():
    rate, config = rates(100, warmup_steps_fraction=0.05, lr_schedule_type="wsd", wsd_decay_steps_fraction=0.2)
    np.testing.assert_allclose(rate[:5], 2.0 * np.arange(1, 6) / 5)
    np.testing.assert_allclose(rate[5:81], 2.0)
    np.testing.assert_allclose(rate[80:], 2.0 - 1.5 * np.arange(20) / 20)
    assert learning_rate(config.step, config.run.steps, 100) == 0.0


def test_schedules_are_optaxs():
    """Which compute in float32, so that the last bits differ: why ours are not theirs."""
    steps, warmup, peak, final = 200, 20, 2.0, 0.25
    decay = steps - warmup
    stable_then_line = [optax.constant_schedule(peak), optax.linear_schedule(peak, peak * final, 40)]
    for kind, theirs in {
        "cosine": optax.cosine_decay_schedule(peak, decay, final),
        "exponential": optax.exponential_decay(peak, decay, final),
        "wsd": optax.join_schedules(stable_then_line, [decay - 40]),
    }.items():
        keys = {"wsd_decay_steps_fraction": 0.2} if kind == "wsd" else {}
        ours, _ = rates(steps, warmup_steps_fraction=warmup / steps, lr_schedule_type=kind, **keys)
        expected = [optax.linear_schedule(0.0, peak, warmup)(step + 1) for step in range(warmup)]
        expected += [theirs(step) for step in range(decay)]
        np.testing.assert_allclose(ours, expected, rtol=2e-6, err_msg=kind)


def test_clipping_is_optaxs():
    _, _, gradients = problem()
    for threshold in (0.5, 3.0, 1e9):
        for gradient in gradients:
            expected, _ = optax.clip_by_global_norm(threshold).update(gradient, None)
            assert_close(clip(gradient, optax.tree.norm(gradient), np.float32(threshold)), expected, 1e-6)


def test_adams_updates_are_clipped_as_optax_clips_blocks():
    """Each layer's matrix and vector by itself, and of a vocabulary's table the rows that there are."""
    rng = np.random.default_rng(0)
    shapes = {"bias": (2, 4), "kernel": (2, 3, 4), "table": (6, 4)}
    updates = {name: rng.normal(0, 3, shape).astype(np.float32) for name, shape in shapes.items()}
    updates["table"][5] = 0.0
    matrices = {
        "bias": MatrixDims((0,), (), (1,), hidden=False),
        "kernel": MatrixDims((0,), (1,), (2,), hidden=True),
        "table": MatrixDims((), (0,), (1,), hidden=False, vocab=(0, 5)),
    }
    chosen = {"bias": True, "kernel": True, "table": True}
    clipped, _ = clip_matrices(matrices, chosen, 1.0).update(updates, None)
    theirs = optax.clip_by_block_rms(1.0)
    for name in ("bias", "kernel"):
        expected = np.stack([theirs.update(layer, None)[0] for layer in updates[name]])
        np.testing.assert_allclose(clipped[name], expected, rtol=1e-6)
    np.testing.assert_allclose(clipped["table"][:5], theirs.update(updates["table"][:5], None)[0], rtol=1e-6)
    weights, decays, gradients = problem()
    plain, _ = our_updates("adamw", weights, decays, gradients[:1], adam_weight_decay=0)
    halved, _ = our_updates("adamw", weights, decays, gradients[:1], adam_weight_decay=0, adam_clip_threshold=0.5)
    for name in weights:  # Adam's first update has a root mean square of 1
        np.testing.assert_allclose(
            2 * (halved[name] - weights[name]), plain[name] - weights[name], rtol=1e-3, atol=1e-6
        )


def test_a_schedule_may_be_longer_or_shorter_than_the_run():
    long = load(steps=10, learning_rate_schedule_steps=1000, warmup_steps_fraction=0.01)
    short = load(steps=10, learning_rate_schedule_steps=5, warmup_steps_fraction=0.2)
    assert learning_rate(long.step, long.run.steps, 9) == long.step.learning_rate
    assert learning_rate(short.step, short.run.steps, 0) == short.step.learning_rate
    assert [learning_rate(short.step, short.run.steps, step) for step in range(5, 10)] == [0.0] * 5


def test_without_warm_up_a_schedule_starts_at_its_peak():
    rate, _ = rates(10, warmup_steps_fraction=0)
    assert rate[0] == 2.0


def test_a_state_of_another_rank_lies_as_its_weights_dims_do():
    """As of Shampoo and SOAP, which keep square matrices of a weight's sides."""
    mesh = jax.make_mesh((2, 2, 2), ("layers", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    at = NamedSharding(mesh, PartitionSpec("layers", "fsdp", "tensor"))
    shapes = {"mlp": {"wi": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)}}
    sizes = {
        "moment": ((4, 8, 16), ("layers", "fsdp", "tensor")),
        "row mean": ((4, 1, 16), ("layers", None, "tensor")),
        "row mean, dim left out": ((4, 16), ("layers", "tensor")),
        "left": ((4, 8, 8), ("layers", "fsdp", None)),
        "right": ((4, 1, 16, 16), ("layers", None, "tensor", None)),
        "count": ((4,), ("layers",)),
        "norm": ((), ()),
    }
    opt = [{"mlp": {"wi": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in sizes.items()}}}]
    opt += [{"by name": {"mlp": {"wi": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)}}, "count": shapes["mlp"]["wi"]}]
    copy = NamedSharding(mesh, PartitionSpec())
    of_weight, others = state_shardings(opt, shapes, {"mlp": {"wi": at}}, copy)
    assert {name: found.spec for name, found in of_weight["mlp"]["wi"].items()} == {
        name: PartitionSpec(*axes) for name, (_, axes) in sizes.items()
    }
    assert others == {"by name": {"mlp": {"wi": at}}, "count": copy}


def test_a_bfloat16_moment_decays_with_what_is_not_refused():
    """The bound stands where rounding to nearest stops: below it a moment reaches a hundredth, above it never moves."""
    for b2, ends_below in ((0.996, True), (0.9985, False)):
        adam = optax.scale_by_adam(b2=b2)
        state = adam.init({"w": jnp.zeros(1, jnp.bfloat16)})
        state = state._replace(nu={"w": jnp.ones(1, jnp.bfloat16)})
        update = jax.jit(lambda state, adam=adam: adam.update({"w": jnp.zeros(1, jnp.bfloat16)}, state)[1])
        for _ in range(2000):
            state = update(state)
        assert (float(state.nu["w"][0]) < 0.01) == ends_below
