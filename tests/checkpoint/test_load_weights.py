"""Weights from other runs: their averages, and from several checkpoints by rules."""

import jax
import numpy as np
import pytest

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.load_weights import identity, load_weights
from src.checkpoint.resume import all_weights, new_state
from src.config.load import load
from src.extras import weights_by_rules
from src.extras.weights_by_rules import load_by_rules
from src.model.params import by_path, dotted, nested
from src.step.state import abstract_state
from src.system.errors import UserError
from tests.tiny import VOCAB, make, random_weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two checkpoints of random weights, the second of a wider feed-forward layer, with averages of 2 more."""
    folder, kept = tmp_path_factory.mktemp("runs"), {}
    for name, keys, ema in (("a", {}, {}), ("b", {"base_mlp_dim": 96}, {"ema_decay": 0.5})):
        _, plan = make(**keys, **ema)
        tree = random_weights(plan, seed=ord(name))
        entries = {"step": np.int32(3), "trainable": tree, "frozen": {}, "stats": {}, "opt": {}}
        if ema:
            entries["ema"] = jax.tree.map(lambda w: w + 2, tree)
        checkpointer = Checkpointer(folder / name / "checkpoints", max_to_keep=-1, async_save=False)
        meta = {"vocab_size": VOCAB, "tokenizer": None}
        checkpointer.save(3, jax.tree.map(jax.numpy.asarray, entries), meta)
        checkpointer.close()
        kept[name] = {dotted(path): leaf for path, leaf in by_path(tree).items()}
    return folder, kept


def tree_of(devices=8, **keys):
    _, plan = make(devices, **keys)
    return plan, all_weights(abstract_state(plan))


def test_each_weight_is_from_where_the_first_rule_says(runs):
    folder, kept = runs
    plan, tree = tree_of(ici_fsdp_parallelism=8)
    rules = [
        {"match": r"(.*)attention\.(key|value)", "path": str(folder / "b"), "name": r"\1attention.\2"},
        {
            "match": r".*feed_forward_norm\.scale",
            "path": str(folder / "b"),
            "name": "segments.0.0.attention_norm.scale",
        },
        {"match": r"segments\..*", "path": str(folder / "a")},
    ]
    loaded, metas, messages = load_by_rules(rules, tree, plan.axes)
    loaded = {dotted(path): leaf for path, leaf in by_path(loaded).items()}
    assert {name for name in kept["a"] if name.startswith("segments")} == set(loaded)
    for name, array in loaded.items():
        source, there = ("b", name) if name.endswith(("key", "value")) else ("a", name)
        if name.endswith("feed_forward_norm.scale"):
            source, there = "b", "segments.0.0.attention_norm.scale"
        np.testing.assert_array_equal(array, kept[source][there], err_msg=name)
    assert metas == [], "no weight of the vocabulary was taken"
    told = "\n".join(messages)
    assert f"from {folder / 'b'}: segments.0.0.attention.key, segments.0.0.attention.value" in told
    assert "segments.0.0.feed_forward_norm.scale (there segments.0.0.attention_norm.scale)" in told
    assert "3 weights not affected by rules" in told
    state = new_state(plan, abstract_state(plan), load_by_rules(rules, tree, plan.axes)[0])
    query = np.asarray(state.weights.trainable["segments"][0][0]["attention"]["query"])
    np.testing.assert_array_equal(query, kept["a"]["segments.0.0.attention.query"])
    initial = new_state(plan, abstract_state(plan)).weights.trainable["embedding"]
    np.testing.assert_array_equal(state.weights.trainable["embedding"], initial)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "segment"}, "segment fits none of the remaining weights: "),
        ({"match": ".*key", "name": "keys"}, "has no keys: it has .*attention.key"),
        ({"match": ".*wi"}, r"segments.0.0.feed_forward.wi: \[2, 32, 2, 96\] in the checkpoint, \[2, 32, 2, 64\]"),
        ({"match": ".*(key)", "name": r"\2"}, r"name=\\2 does not fit"),
        ({"match": r".*attention\.(key|value)", "name": "x"}, "gives two weights the same name: x$"),
        ({"match": r".*((key)|(wi|wo))", "name": r"x\2"}, "gives two weights the same name: x$"),  # not xkey
    ],
)
def test_a_rule_that_does_not_fit_is_refused(runs, rule, message):
    plan, tree = tree_of(1)
    with pytest.raises(UserError, match=message):
        load_by_rules([{**rule, "path": str(runs[0] / "b")}], tree, plan.axes)


def test_rules_are_checked_as_they_are_typed():
    for rules, message in (
        ("[{match: '(', path: x}]", "( is not a regular expression"),
        ("[{match: a}]", "a needs a path"),
        ("[{path: a}]", "it needs match"),
    ):
        with pytest.raises(UserError) as error:
            load(["configs/base.yml", f"load_weights_rules={rules}"])
        assert message in str(error.value)


def test_the_average_is_loaded_on_request_and_refused_where_there_is_none(runs):
    folder, kept = runs
    _, tree = tree_of(base_mlp_dim=96)
    weights, _, messages = load_weights(str(folder / "b"), tree, ema=True)
    for path, array in by_path(weights).items():
        np.testing.assert_array_equal(array, kept["b"][dotted(path)] + 2)
    assert "the average of the weights" in messages[-1]
    plain, _, _ = load_weights(str(folder / "b"), tree)
    np.testing.assert_array_equal(plain["embedding"], kept["b"]["embedding"])
    _, tree = tree_of()
    with pytest.raises(UserError, match="a has no average of its weights: that run was made without ema_decay"):
        load_weights(str(folder / "a"), tree, ema=True)


def test_rules_take_averages_on_request_and_refuse_a_path_without(runs):
    folder, kept = runs
    plan, tree = tree_of()
    rules = [{"match": r".*attention\.(key|value)", "path": str(folder / "b")}]
    loaded, _, _ = load_by_rules(rules, tree, plan.axes, ema=True)
    assert len(by_path(loaded)) == 2
    for path, array in by_path(loaded).items():
        np.testing.assert_array_equal(array, kept["b"][dotted(path)] + 2)
    rules.append({"match": "embedding", "path": str(folder / "a")})
    with pytest.raises(UserError, match="a has no average of its weights: that run was made without ema_decay"):
        load_by_rules(rules, tree, plan.axes, ema=True)
    config = load(["configs/base.yml", f"load_weights_rules=[{{match: embedding, path: {folder}/b}}]", "load_ema=true"])
    assert config.checkpoint.load_ema


def test_rules_merge_adapters(runs, tmp_path):
    """Also into a weight that was trained with them, which the checkpoint has under its own name."""
    folder, kept = runs
    plan, tree = tree_of(1)
    draw, query = np.random.default_rng(0), ("segments", 0, 0, "attention", "query")
    shape, alpha, rank = by_path(tree)[query].shape, 6.0, 2
    arrays = {
        query: draw.normal(size=shape),
        ("lora", *query, "down"): draw.normal(size=(*shape[:2], rank)),
        ("lora", *query, "up"): draw.normal(size=(shape[0], rank, *shape[2:])),
    }
    arrays = {path: array.astype(np.float32) for path, array in arrays.items()}
    entries = {"step": np.int32(5), "trainable": nested(arrays), "stats": {}, "opt": {}}
    base = {"base": str(folder / "a"), "base_identity": identity(str(folder / "a"))}
    checkpointer = Checkpointer(tmp_path / "checkpoints", max_to_keep=-1, async_save=False)
    meta = {"vocab_size": VOCAB, "tokenizer": None, "lora": {"rank": rank, "alpha": alpha, **base}}
    checkpointer.save(5, jax.tree.map(jax.numpy.asarray, entries), meta)
    checkpointer.close()
    rules = [{"match": r".*attention\.(query|key)", "path": str(tmp_path)}]
    loaded = {dotted(path): leaf for path, leaf in by_path(load_by_rules(rules, tree, plan.axes)[0]).items()}
    whole, down, up = arrays.values()
    merged = whole + alpha / rank * np.einsum("ldr,lrnh->ldnh", down, up)
    np.testing.assert_allclose(loaded["segments.0.0.attention.query"], merged, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(loaded["segments.0.0.attention.key"], kept["a"]["segments.0.0.attention.key"])


def test_rules_take_what_a_run_with_adapters_saved_whole_into_another_model(tmp_path):
    """Neither the base, which is gone, nor the run's other weights have to fit."""
    plan, tree = tree_of(1)
    scale, query = ("final_norm", "scale"), ("segments", 0, 0, "attention", "query")
    arrays = {scale: np.full(by_path(tree)[scale].shape, 3, np.float32)}
    arrays |= {("lora", *query, part): np.zeros((1, 2, 2), np.float32) for part in ("down", "up")}  # of other shapes
    entries = {"step": np.int32(5), "trainable": nested(arrays), "stats": {}, "opt": {}}
    checkpointer = Checkpointer(tmp_path / "checkpoints", max_to_keep=-1, async_save=False)
    base = {"base": str(tmp_path / "gone"), "base_identity": ""}
    meta = {"vocab_size": VOCAB, "tokenizer": None, "lora": {"rank": 2, "alpha": 1.0, **base}}
    checkpointer.save(5, jax.tree.map(jax.numpy.asarray, entries), meta)
    checkpointer.close()
    loaded, _, _ = load_by_rules([{"match": r"final_norm\.scale", "path": str(tmp_path)}], tree, plan.axes)
    np.testing.assert_array_equal(by_path(loaded)[scale], arrays[scale])
    with pytest.raises(UserError, match=r"no checkpoint at .*gone"):
        load_by_rules([{"match": r".*attention\.query", "path": str(tmp_path)}], tree, plan.axes)


def test_rules_read_each_path_once(runs, monkeypatch):
    folder, kept = runs
    plan, tree = tree_of()
    read = []
    original = weights_by_rules.restore_weights

    def counted(path, *args, **named):
        read.append(path)
        return original(path, *args, **named)

    monkeypatch.setattr(weights_by_rules, "restore_weights", counted)
    rules = [
        {"match": f".*{name}", "path": str(folder / path), "name": "segments.0.0.attention_norm.scale"}
        for name, path in (("attention_norm.scale", "b"), ("embedding", "a"), ("feed_forward_norm.scale", "b"))
    ]
    rules[1].pop("name")
    loaded, _, _ = load_by_rules(rules, tree, plan.axes)
    assert read == [str(folder / "b"), str(folder / "a")]
    state = new_state(plan, abstract_state(plan), loaded)  # which donates them: two weights have one name there
    block = state.weights.trainable["segments"][0][0]
    for name in ("attention_norm", "feed_forward_norm"):
        np.testing.assert_array_equal(block[name]["scale"], kept["b"]["segments.0.0.attention_norm.scale"])
    rules[2] = {"match": r".*attention\.query", "path": str(folder / "b"), "name": "segments.0.0.attention_norm.scale"}
    for order in (rules, rules[::-1]):
        with pytest.raises(UserError, match=r"attention_norm\.scale"):
            load_by_rules(order, tree, plan.axes)
