"""Bits per byte of `python -m src.evaluate`: against a closed form, transformers' own losses, and counted bytes."""

import io
import json
import math
import re

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from src.data.tokenizer import ByteTokenizer
from src.data.types import END
from src.extras.datasets.train_tokenizer import train
from src.extras.evaluation import evaluate
from src.extras.evaluation.scoring import TextBytes
from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.system.errors import UserError
from tests.runs import ROOT, TINY
from tests.test_scoring import log_probs

V, T = 320, 32
TEXTS = ["def f(x):\n    return x", "é漢😀 is four, three and two bytes", " ", "x", "a  b " * 20, "self.x = self.y\n"]


def byte_level(folder):
    """A folder with a tokenizer.json of byte-level BPE, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<s>", "</s>"]}
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, **vocabulary)
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By type: our tokenizer, the keys that name it, and a function from a text to its ids by the package itself."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "t.model").write_bytes(train(TEXTS * 3, 300))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "t.model"))
    bpe = byte_level(folder / "hf")
    return {
        "byte": (ByteTokenizer(), {}, lambda text: list(text.encode())),
        "sentencepiece": (
            SentencePieceTokenizer(str(folder / "t.model")),
            {"tokenizer_type": "sentencepiece", "tokenizer_path": folder / "t.model"},
            pieces.encode,
        ),
        "huggingface": (
            HuggingFaceTokenizer(folder / "hf" / "tokenizer.json", V),
            {"tokenizer_type": "huggingface", "tokenizer_path": folder / "hf"},
            lambda text: bpe.encode(text).ids,
        ),
    }


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    """The folder of a model to which all V tokens are equally likely."""
    model, folder = llama(), tmp_path_factory.mktemp("uniform")
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """transformers' model and its folder."""
    model, folder = llama(), tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model.eval(), folder


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes, **heads, initializer_range=0.3))


def write(folder, texts):
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "texts.jsonl"


def run(folder, **keys):
    """The metrics, and the counts that are written beside them."""
    settings = {
        **{"model_name": folder, "load_parameters_path": folder, "dtype": "float32", "max_target_length": T},
        **{"per_device_batch_size": 1, "ici_data_parallelism": -1, "ici_fsdp_parallelism": 1},
        **{"jax_cache_dir": TINY["jax_cache_dir"], **keys},
    }
    return evaluate.main(["configs/base.yml", *(f"{key}={value}" for key, value in settings.items())])


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "huggingface"])
def test_of_a_uniform_model_it_is_log2_of_the_vocabulary_times_tokens_per_byte(kind, tokenizers, uniform, tmp_path):
    """Whole documents, which rows of 32 tokens cut; the ends of documents are neither tokens nor bytes."""
    _, keys, ids_of = tokenizers[kind]
    results = tmp_path / "results.json"
    metrics = run(uniform, eval_dataset_path=write(tmp_path, TEXTS), results_path=results, **keys)
    tokens, size = sum(len(ids_of(text)) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    assert metrics["eval_bits_per_byte"] == pytest.approx(math.log2(V) * tokens / size, rel=1e-6)
    written = json.loads(results.read_text())
    assert written["eval_bits_per_byte"] == metrics["eval_bits_per_byte"]
    assert (written["eval_text_bytes"], written["eval_tokens"]) == (size, tokens + len(TEXTS))


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "huggingface"])
def test_of_documents_that_are_cut_off_only_the_bytes_that_are_scored_count(kind, tokenizers, uniform, tmp_path):
    _, keys, ids_of = tokenizers[kind]
    text, results = "self.x = self.y  " * 9, tmp_path / "results.json"
    keys = {**keys, "packing": "false", "long_documents": "truncate", "results_path": results}
    metrics = run(uniform, eval_dataset_path=write(tmp_path, [text, "a"]), **keys)
    scored = tokenizers[kind][0].decode(np.array(ids_of(text)[:T]))
    assert text.startswith(scored)
    assert len(scored) < len(text)
    assert json.loads(results.read_text())["eval_text_bytes"] == len(scored) + 1
    expected = math.log2(V) * (T + len(ids_of("a"))) / (len(scored) + 1)
    assert metrics["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_it_is_transformers_loss_of_the_text(model, tmp_path):
    texts = [text for text in TEXTS if len(text.encode()) <= T]
    nats = [log_probs(model[0], [256, *text.encode()]).sum() for text in texts]
    expected = -sum(nats) / math.log(2) / sum(len(text.encode()) for text in texts)
    keys = {"eval_dataset_path": write(tmp_path, texts), "packing": "false"}
    meshes = ({}, {"ici_context_parallelism": 2, "num_vocab_tiling": 4})
    found = [run(model[1], **keys, **mesh) for mesh in meshes]
    for metrics in found:
        assert metrics["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    with_ends = [log_probs(model[0], [256, *text.encode(), 257]) for text in texts]
    for metrics in found:
        assert metrics["eval_loss"] == pytest.approx(-np.concatenate(with_ends).mean(), rel=1e-5)


def test_it_prints_what_the_page_says(uniform, tmp_path, capsys):
    run(uniform, eval_dataset_path=write(tmp_path, TEXTS))
    page = (ROOT / "docs" / "evaluation.md").read_text()
    printed, shown = (
        re.findall(r"^(eval_\w+) [\d.]+$", text, re.MULTILINE) for text in (capsys.readouterr().out, page)
    )
    assert printed == shown


def test_sets_have_their_own_and_data_without_text_none(uniform, tmp_path, capsys):
    write(tmp_path, TEXTS)
    (tmp_path / "ids.jsonl").write_text('{"text": [1, 2, 3]}\n{"text": "abc"}\n')
    sets = f"[{{name: text, dataset_path: {tmp_path}/texts.jsonl}}, {{name: ids, dataset_path: {tmp_path}/ids.jsonl}}]"
    metrics = run(uniform, eval_datasets=sets)
    assert metrics["eval_bits_per_byte/text"] == pytest.approx(math.log2(V), rel=1e-6)
    assert "eval_bits_per_byte/ids" not in metrics
    assert "eval_loss/ids" in metrics
    said = capsys.readouterr().out
    assert "eval_bits_per_byte is left out: 2 tokens come from data that is not text" in said
    assert f"eval_text_bytes/text {sum(len(text.encode()) for text in TEXTS)}\n" in said
    assert "eval_text_bytes/ids" not in said


def test_a_loss_of_parts_of_a_text_has_none(uniform, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    keys = {"use_sft": True, "packing": False, "eval_dataset_path": tmp_path / "pairs.jsonl"}
    assert set(run(uniform, **keys)) == {"eval_loss", "eval_perplexity"}
    assert "eval_bits_per_byte is left out: with use_sft or batch_transform" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"results_path": "{tmp}/texts.jsonl/a.json"}, "texts.jsonl/a.json: cannot write it: NotADirectoryError"),
        (
            {"results_path": "a", "texts_path": "b", "scores_path": "c"},
            "results_path and texts_path ask for different things: leave one out",
        ),
        ({"results_path": "{tmp}"}, "cannot write it: it exists and is not a regular file"),
        ({"results_path": "gs://bucket/a.json"}, "expected a path on this machine"),
    ],
)
def test_bad_input(uniform, tmp_path, keys, sentence, monkeypatch):
    """It is told before the weights are read."""
    monkeypatch.setattr(evaluate, "load_model", lambda *_: pytest.fail("the model was read first"))
    write(tmp_path, ["a"])
    keys = {key: value.replace("{tmp}", str(tmp_path)) for key, value in keys.items()}
    with pytest.raises(UserError, match=sentence):
        run(uniform, eval_dataset_path=tmp_path / "texts.jsonl", **keys)


# ---- The bytes of each token


@given(text=st.text(st.characters(codec="utf-8"), min_size=1))
@example(text="x\r\n\t  y")
@settings(max_examples=60)
def test_the_bytes_of_a_texts_tokens_add_up_to_it(text, tokenizers):
    for tokenizer, _, _ in tokenizers.values():
        ids, _, text_bytes = TextBytes(tokenizer).document(text)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert text_bytes[[0, -1]].tolist() == [END, END]
        assert (text_bytes[1:-1] >= 0).all()
        assert text_bytes[1:-1].sum() == (len(text.encode()) if len(ids) > 2 else 0)


def test_the_bytes_of_a_token_are_those_it_stands_for(tokenizers):
    tokenizer = tokenizers["huggingface"][0]
    ids, _, text_bytes = TextBytes(tokenizer).document("self.жツ")
    pieces = [tokenizer.decode(ids[[at]]) for at in range(1, len(ids) - 1)]
    assert "".join(piece for piece in pieces if "\ufffd" not in piece) == "self."
    assert text_bytes[1:-1].tolist() == [len(piece) for piece in pieces if "\ufffd" not in piece] + [2, 0, 3, 0, 0]


def test_special_tokens_that_a_text_spells_are_not_lost(tokenizers):
    tokenizer = tokenizers["huggingface"][0]
    assert tokenizer.encode("a </s> b").tolist().count(tokenizer.eos) == 2
    for kind, (each, _, _) in tokenizers.items():
        counted = TextBytes(each)
        assert counted.document("a </s> b").text_bytes[1:-1].sum() == len("a </s> b")
        assert counted.notes() == [], kind


def test_a_bos_or_eos_that_a_text_spells_has_its_own_bytes(tokenizers):
    """The eos is predicted, and so are its bytes; the bos is the document's first input, which nothing predicts."""
    tokenizer = tokenizers["huggingface"][0]
    for text, first, last in (("<s>a</s>", 3, 4), ("<s>a", 3, END), ("a</s>", END, 4)):
        counted = TextBytes(tokenizer)
        ids, _, text_bytes = counted.document(text)
        assert ids[[0, -1]].tolist() == [tokenizer.bos, tokenizer.eos]
        assert text_bytes.tolist() == [first, 1, last]
        assert counted.notes() == []


def test_the_sign_that_sentencepiece_has_for_a_space_becomes_one(tokenizers):
    changing = TextBytes(tokenizers["sentencepiece"][0])
    for text in ("a▁b", "a▀b", "_"):
        changing.document(text)
    assert "changes 1 of the texts, such as 'a▁b' to 'a b'" in changing.notes()[0]


def test_a_tokenizer_that_changes_texts_is_said(tokenizers, tmp_path):
    for tokenizer, _, _ in tokenizers.values():
        unchanged = TextBytes(tokenizer)
        unchanged.document("a  b\n\n c ")
        assert unchanged.notes() == []
    model = io.BytesIO()
    lines = [text for text in TEXTS if text.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    (tmp_path / "spaces.model").write_bytes(model.getvalue())
    changing = TextBytes(SentencePieceTokenizer(str(tmp_path / "spaces.model")))
    for text in ("a b", "a  b ", "a  b "):
        document = changing.document(text)
    assert document.text_bytes[1:-1].sum() == len("a  b ")
    assert len(changing.notes()) == 1
    assert "changes 1 of the texts, such as 'a  b ' to 'a b'" in changing.notes()[0]


def test_a_normaliser_of_a_huggingface_tokenizer_takes_nothing_from_the_bytes(tmp_path):
    tokenizer = byte_level(tmp_path / "hf")
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    counted = TextBytes(HuggingFaceTokenizer(tmp_path / "hf" / "tokenizer.json", V))
    assert counted.document("ﬁne ½").text_bytes[1:-1].sum() == len("ﬁne ½".encode())
    assert "such as 'ﬁne ½' to 'fine 1\u20442'" in counted.notes()[0]
