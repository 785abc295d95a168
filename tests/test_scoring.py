"""`python -m src.evaluate` on a Hugging Face model, against transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from src.data.tokenizer import ByteTokenizer
from src.extras.evaluation import evaluate
from src.extras.evaluation.scoring import Scorer
from src.step.token_scores import token_scores
from src.system.errors import UserError
from tests import runs, tiny

LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama and its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=20,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("hf") / "llama"
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model, folder


def run(folder, **keys):
    settings = {
        "model_name": folder,
        "load_parameters_path": folder,
        "dtype": "float32",
        "max_target_length": LENGTH,
        "per_device_batch_size": 1,
        "jax_cache_dir": "",
        "ici_data_parallelism": -1,
        "ici_fsdp_parallelism": 1,
        **keys,
    }
    return evaluate.main(["configs/base.yml", *(f"{key}={value}" for key, value in settings.items())])


def log_probs(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(ids)[None].astype(np.int64))).logits[0]
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:]).long()].numpy()


def test_texts_are_scored_token_by_token(model, tmp_path):
    texts = ["def f(x):", "é", "a longer line of text, 31 by"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    run(model[1], texts_path=tmp_path / "texts.jsonl", scores_path=tmp_path / "scores.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == texts
    for line in lines:
        assert line["ids"] == ByteTokenizer().encode(line["text"])[:-1].tolist()
        expected = log_probs(model[0], line["ids"])
        assert line["log_probs"][0] is None
        np.testing.assert_allclose(line["log_probs"][1:], expected, atol=1e-5)
        assert line["log_prob"] == pytest.approx(expected.sum(), abs=1e-4)


def test_padding_takes_no_capacity_of_experts(tmp_path):
    """Each expert has 16 slots of a row, more than the tokens of a text: nothing is dropped, as in transformers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 20, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.3}
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))
    mixtral.save_pretrained(tmp_path / "mixtral")
    (tmp_path / "texts.txt").write_text("def f(x):\nreturn x + 1\n")
    keys = {"texts_path": tmp_path / "texts.txt", "scores_path": tmp_path / "scores.jsonl", "capacity_factor": 0.5}
    run(tmp_path / "mixtral", **keys, max_target_length=64)
    for line in map(json.loads, (tmp_path / "scores.jsonl").open()):
        np.testing.assert_allclose(line["log_probs"][1:], log_probs(mixtral, line["ids"]), atol=1e-5)


def test_a_score_does_not_depend_on_what_else_is_scored_where_experts_have_a_capacity():
    """Rows of short texts are shorter, and an expert's capacity is a share of its row."""
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "capacity_factor": 0.05}
    config, plan = tiny.make(**keys, max_target_length=256, per_device_batch_size=2)
    weights = plan.split(tiny.random_weights(plan))
    scorer = Scorer(config.evaluation, config.batch, plan, weights)
    short, long = (np.random.default_rng(0).integers(0, tiny.VOCAB, size) for size in (40, 250))
    (alone, _), (beside, _) = next(scorer([short])), next(scorer([short, long]))
    np.testing.assert_allclose(beside, alone, atol=1e-5)


def test_scores_are_the_same_in_tiles(model, tmp_path):
    (tmp_path / "texts.txt").write_text("def f(x):\na longer line of text, 31 by\n")
    for tiles in (1, 4):
        scores = tmp_path / f"{tiles}.jsonl"
        run(model[1], texts_path=tmp_path / "texts.txt", scores_path=scores, num_vocab_tiling=tiles)
    one, four = ([json.loads(line) for line in (tmp_path / f"{n}.jsonl").open()] for n in (1, 4))
    for whole, tiled in zip(one, four, strict=True):
        np.testing.assert_allclose(tiled["log_probs"][1:], whole["log_probs"][1:], atol=1e-6)


def test_tiles_hold_the_logits_of_one_tile_at_a_time():
    rows, length, width, vocab = 2, 64, 8, 4096
    shapes = [((rows, length, width), jnp.float32), ((width, vocab), jnp.float32), ((rows, length), jnp.int32)]

    def memory(tiles):
        def scores(hidden, output, targets):
            return token_scores(lambda h: h @ output, hidden, targets, tiles)

        lowered = jax.jit(scores).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    whole = 4 * rows * length * vocab
    assert memory(1) >= whole
    assert memory(16) < whole / 4


def test_logits_of_given_ids(model, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, (10, 17)).astype(np.int32)
    np.save(tmp_path / "in.npy", tokens)
    run(model[1], tokens_path=tmp_path / "in.npy", logits_path=tmp_path / "out.npy")
    with torch.no_grad():
        expected = model[0](torch.tensor(tokens).long()).logits.numpy()
    logits = np.load(tmp_path / "out.npy")
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= 2e-4 * expected.std()


def accuracy(logits, batch):
    """A metric of a user's own."""
    hits = (jnp.argmax(logits, -1) == batch["targets"]) * batch["loss_mask"]
    return {"accuracy": (hits.sum(), batch["loss_mask"].sum()), "vocabulary": (logits.shape[-1], 1)}


def nothing(logits, batch):
    """A metric of rows that no batch has, and one that all have."""
    return {"of_none": (logits.sum(), jnp.zeros(())), "rows": (logits.shape[0], 1)}


def test_a_metric_that_counted_nothing_is_left_out_and_said(model, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one line\n")
    metrics = run(model[1], eval_metrics="tests.test_scoring:nothing", eval_dataset_path=tmp_path)
    assert set(metrics) == {"eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_rows"}
    assert "eval_of_none is left out: its count is 0" in capsys.readouterr().out


def test_conversations_to_evaluate_on_are_all_the_data_it_needs(model, tmp_path, capsys):
    pairs = [("ab", "cde"), ("", "f")]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    keys = {"use_sft": True, "packing": False, "eval_dataset_path": tmp_path / "pairs.jsonl"}
    metrics = run(model[1], **keys)
    answers = [
        log_probs(model[0], ByteTokenizer().encode(prompt + completion))[len(prompt.encode()) :]
        for prompt, completion in pairs
    ]
    assert metrics["eval_loss"] == pytest.approx(-np.concatenate(answers).mean(), abs=1e-5)
    assert "eval_tokens 6\neval_batches 1\n" in capsys.readouterr().out  # with the end of each answer


def test_conversations_to_train_on_are_asked_for(model, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    keys = {"use_sft": True, "eval_dataset_path": tmp_path / "pairs.jsonl", "base_output_directory": tmp_path / "out"}
    with pytest.raises(UserError, match=r"use_sft=true reads \.jsonl files of conversations: set dataset_path"):
        runs.run_here(**keys)
    assert not (tmp_path / "out").exists()


def test_the_loss_on_any_data_and_metrics_of_ones_own(model, tmp_path):
    texts = ["one line\n", "another, which is rather longer\n", "x"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    keys = {"eval_dataset_path": tmp_path, "packing": False, "max_target_length": 64}
    metrics = run(model[1], eval_metrics="tests.test_scoring:accuracy", **keys)
    encoded = [ByteTokenizer().encode(text) for text in texts]
    everything = np.concatenate([log_probs(model[0], ids) for ids in encoded])
    assert metrics["eval_loss"] == pytest.approx(-everything.mean(), abs=1e-5)
    with torch.no_grad():
        logits = [model[0](torch.tensor(ids[None, :-1].astype(np.int64))).logits[0].numpy() for ids in encoded]
    hits = [(x.argmax(-1) == ids[1:]).sum() for x, ids in zip(logits, encoded, strict=True)]
    assert metrics["eval_accuracy"] == pytest.approx(sum(hits) / len(everything))
    assert metrics["eval_vocabulary"] == 300


@pytest.mark.parametrize(("given", "written"), [("texts_path", "scores_path"), ("tokens_path", "logits_path")])
def test_a_place_that_can_not_be_written_is_refused_before_weights_are_read(model, tmp_path, given, written):
    (tmp_path / "file").write_text("x")
    for place, why in (
        (tmp_path / "file" / "out", "NotADirectoryError"),
        (tmp_path, "it exists and is not a regular file"),
    ):
        with pytest.raises(UserError, match=f"{written}={place}: cannot write it: {why}"):
            run(model[1], load_parameters_path="/not/there", **{given: "in", written: place})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"texts_path": "nowhere.txt", "scores_path": "out"}, "texts_path=nowhere.txt cannot be read"),
        ({"texts_path": "{tmp}/empty.txt", "scores_path": "out"}, "has no text"),
        (
            {"texts_path": "{tmp}/long.txt", "scores_path": "out"},
            "'aaaa.*' has 41 tokens, more than max_target_length=32:",
        ),
        ({"texts_path": "{tmp}/no.jsonl", "scores_path": "out"}, "line 2: expected"),
        ({"texts_path": "x.txt"}, "texts_path and scores_path go together"),
        ({"tokens_path": "{tmp}/float.npy", "logits_path": "out"}, "expected int32 .B, T., got float64"),
        ({"tokens_path": "{tmp}/big.npy", "logits_path": "out"}, "ids reach from 0 to 300"),
        ({"tokens_path": "{tmp}/long.txt", "logits_path": "out"}, "cannot be read as a .npy file"),
        ({"load_parameters_path": ""}, "load_parameters_path is empty: give the weights to use"),
        ({"quantize_weights": "int8"}, "it is for src.decode, and this is src.evaluate"),
        ({"eval_metrics": "accuracy"}, "expected module:function"),
        ({"eval_metrics": "tests.test_scoring:precision"}, "has no function precision"),
    ],
)
def test_bad_input(model, tmp_path, keys, sentence):
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "long.txt").write_text("a" * 40)
    (tmp_path / "no.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    np.save(tmp_path / "float.npy", np.zeros((2, 3)))
    np.save(tmp_path / "big.npy", np.array([[0, 300]], np.int32))
    with pytest.raises(UserError, match=sentence):
        run(model[1], **{key: value.replace("{tmp}", str(tmp_path)) for key, value in keys.items()})
