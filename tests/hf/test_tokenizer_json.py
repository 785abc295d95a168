"""tokenizer.json of our own tokenizers: transformers gives the same ids and the same text."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import transformers

from src.checkpoint.checkpointer import Checkpointer
from src.config.load import to_yaml
from src.data.sentencepiece_tokenizer import SentencePieceTokenizer
from src.data.tokenizer import ByteTokenizer, make_tokenizer
from src.extras.datasets.train_tokenizer import train
from src.extras.hf import convert
from src.extras.hf.tokenizer_json import save_tokenizer
from src.model import params
from src.run import resolve_config
from src.system.errors import UserError
from tests.tiny import BASE, spec_of

CORPUS = [
    "def add(a, b):\n    return a + b\n\n\tthe quick brown fox jumps over the lazy dog, then the others do\n",
    "Größe, naïve café; 日本語の文章; aaa aaaa aaaaa; in the end: <s> and </s>    are text\n",
] * 40
TEXTS = (
    *CORPUS[:2],
    "",
    " ",
    "   two  spaces and more    ",
    "\n\n\t\r\n",
    "aaaaaaaaaaa baaab",
    "a<s>b</s> <bos><eos><unk> <0x41>",
    "\u2581 is a sign of its own",
    "e\u0301 é 👩‍👩‍👧 \U0010fffd \x00 \ufeff",
    "unknown: ☃ ж 한국어",
)


def sentencepiece_model(**changes):
    """A model of SentencePiece's own defaults, but for what a tokenizer.json can hold; `changes` are its options."""
    model = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    lines = (line for text in CORPUS for line in text.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options | changes)
    return model.getvalue()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The files of SentencePiece models by name: src.train_tokenizer's, and one that puts a space before a text."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "ours.model").write_bytes(train(CORPUS, 330))
    (folder / "prefix.model").write_bytes(sentencepiece_model())
    return folder


@pytest.mark.parametrize("name", ["byte", "ours", "prefix"])
def test_transformers_gives_the_same_ids_and_the_same_text(models, tmp_path, name):
    ours = ByteTokenizer() if name == "byte" else SentencePieceTokenizer(str(models / f"{name}.model"))
    save_tokenizer(tmp_path, ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos, ours.eos, ours.vocab_size)
    for text in TEXTS:
        ids = ours.encode_prompt(text)
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids[1:].tolist()
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == ours.decode(ids)


def test_the_folder_is_one_that_runs_read_too(models, tmp_path):
    ours = SentencePieceTokenizer(str(models / "ours.model"))
    save_tokenizer(tmp_path, ours)
    argv = [BASE, "tokenizer_type=huggingface", f"tokenizer_path={tmp_path}"]
    config = resolve_config.load(argv)
    again = make_tokenizer(config.data, config.model.vocab_size)
    assert (again.bos, again.eos, again.vocab_size) == (ours.bos, ours.eos, ours.vocab_size)
    assert again.encode(CORPUS[0]).tolist() == ours.encode(CORPUS[0]).tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram", "vocab_size": 310}, "not a BPE model"),
        ({"byte_fallback": False, "vocab_size": 90}, "no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes text"),
        ({"remove_extra_whitespaces": True}, "normalizes text"),
        ({"treat_whitespace_as_suffix": True}, "ends of words"),
        ({"user_defined_symbols": ["<user>"]}, "user-defined pieces"),
    ],
)
def test_models_that_it_cannot_hold_are_refused_by_what_they_do(tmp_path, changes, reason):
    (tmp_path / "odd.model").write_bytes(sentencepiece_model(**changes))
    with pytest.raises(UserError, match=f"can't represent this SentencePiece model: .*{reason}"):
        save_tokenizer(tmp_path, SentencePieceTokenizer(str(tmp_path / "odd.model")))


# ---- to-hf


def run_folder(folder, **keys):
    """A run of a tiny Llama that has saved a checkpoint."""
    sizes = {"base_emb_dim": 32, "base_mlp_dim": 40, "base_num_decoder_layers": 1, "head_dim": 8, "vocab_size": 330}
    heads = {"base_num_query_heads": 4, "base_num_kv_heads": 2, "max_target_length": 32}
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in {**sizes, **heads, **keys}.items())])
    folder.mkdir()
    (folder / "config.yml").write_text(to_yaml(config))
    tree, _ = convert.declared_weights(spec_of(config))
    rng = np.random.default_rng(0)
    arrays = {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in params.by_path(tree).items()}
    checkpointer = Checkpointer(folder / "checkpoints", max_to_keep=-1, async_save=False)
    checkpointer.save(3, {"trainable": params.nested(arrays)}, {})
    checkpointer.close()
    return folder


@pytest.mark.parametrize("name", ["byte", "ours", "huggingface"])
def test_a_runs_own_tokenizer_is_exported_with_it(models, tmp_path, name):
    path = models / "ours.model"
    keys = {} if name == "byte" else {"tokenizer_type": "sentencepiece", "tokenizer_path": path}
    ours = ByteTokenizer() if name == "byte" else SentencePieceTokenizer(str(path))
    if name == "huggingface":
        (tmp_path / "folder").mkdir()
        save_tokenizer(tmp_path / "folder", ours)
        keys = {"tokenizer_type": name, "tokenizer_path": tmp_path / "folder"}
    convert.to_hf(run_folder(tmp_path / "run", **keys), tmp_path / "out")
    generate = transformers.pipeline("text-generation", model=str(tmp_path / "out"))
    config = generate.model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (ours.bos, ours.eos, None)
    assert generate.model.generation_config.eos_token_id == ours.eos  # where it stops
    for text in TEXTS[:6]:
        assert generate.tokenizer(text)["input_ids"] == ours.encode_prompt(text).tolist()
    answer = generate("def add", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert answer.startswith("def add")


def test_a_tokenizer_that_is_not_exported_is_named_in_one_line(tmp_path, capsys):
    gone = tmp_path / "gone.model"
    run = run_folder(tmp_path / "run", tokenizer_type="sentencepiece", tokenizer_path=gone)
    convert.to_hf(run, tmp_path / "out")
    lines = [line for line in capsys.readouterr().out.splitlines() if "has no tokenizer" in line]
    assert len(lines) == 1
    assert str(tmp_path / "out") in lines[0]
    assert str(gone) in lines[0]
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_tokenizer_json_of_another_name_is_exported_under_the_one_that_is_read(models, tmp_path):
    save_tokenizer(tmp_path, SentencePieceTokenizer(str(models / "ours.model")))
    file = (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")
    convert.to_hf(run_folder(tmp_path / "run", tokenizer_type="huggingface", tokenizer_path=file), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == json.loads(file.read_text())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
