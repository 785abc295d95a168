"""Files of tokenizers that end or hang their readers, and those whose ids tokenizer_config.json changes."""

import itertools
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from src.extras.hf import huggingface_tokenizer, untrusted
from src.extras.hf.convert import compare_ids
from src.extras.hf.folder_tokenizer import folder_tokenizer
from src.extras.hf.huggingface_tokenizer import BUILT_BY_CLASS
from src.system.errors import UserError

TEXTS = [
    *("", "a", " a", "Hello  world ", "a\n\n b\t", "don't 12345", "é中😀", "<s>a</s> b", "x <tool>y</tool> z"),
    *("a <|x|> b", "<|x|><|x|>", "▁a ▁", "123 4 56", "<sep> a<sep>b"),
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet()


def llama(normalizer=None, pre_tokenizer=None):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, ["▁"]


PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
METASPACE = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)


def qwen(digits):
    tokenizer, alphabet = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(digits + r"| ?[^\s\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer, alphabet


def save(folder, made, config, special=("<unk>", "<s>", "</s>")):
    """A folder of a tokenizer that was trained on some texts."""
    tokenizer, alphabet = made
    folder.mkdir(exist_ok=True)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(special), initial_alphabet=alphabet)
    if isinstance(tokenizer.model, models.BPE) and tokenizer.model.byte_fallback:
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        )
    tokenizer.train_from_iterator([*TEXTS[:8], "the quick brown fox " * 20, "12 123 1234 hello world"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>", **config}))
    return folder


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
X = {"content": "<|x|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
CONFIGS = {
    "plain": {},
    "a token of the decoder": {"added_tokens_decoder": {"700": X}},
    "one that takes the space before it": {"added_tokens_decoder": {"700": {**X, "lstrip": True}}},
    "one that takes the space after it": {"added_tokens_decoder": {"700": {**X, "rstrip": True, "special": False}}},
    "two of the decoder": {"added_tokens_decoder": {"9000": {**X, "content": "<sep>"}, "700": X}},
    "additional special tokens": {"additional_special_tokens": ["<tool>", "</tool>"]},
    "extra special tokens": {"extra_special_tokens": ["<tool>", "<|x|>"]},
    "extra special tokens by name": {"extra_special_tokens": {"tool_token": "<tool>"}},
    "a named token": {"sep_token": "<sep>"},
    "special tokens that are split": {"split_special_tokens": True},
    "special tokens that are split, with more": {"split_special_tokens": True, "additional_special_tokens": ["<|x|>"]},
    "everything": {"added_tokens_decoder": {"700": X}, "additional_special_tokens": ["<tool>"], "mask_token": "<sep>"},
}
FOLDERS = [
    *((made, GENERIC | config) for made, config in itertools.product((byte_level, llama), CONFIGS.values())),
    *((lambda: llama(PREPENDED), {"tokenizer_class": name}) for name in ("LlamaTokenizer", "LlamaTokenizerFast", None)),
    *(
        (lambda: llama(None, METASPACE), {"tokenizer_class": "LlamaTokenizer", **more})
        for more in ({}, {"add_prefix_space": False}, {"add_prefix_space": True})
    ),
    *((byte_level, {"tokenizer_class": "GPT2Tokenizer", **more}) for more in ({}, {"add_prefix_space": True})),
    *(
        (lambda digits=digits: qwen(digits), {"tokenizer_class": "Qwen2Tokenizer"})
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ),
    (byte_level, {"tokenizer_class": "CohereTokenizer"}),
    (byte_level, {"tokenizer_class": "GPTNeoXTokenizer"}),
]


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_ids_are_transformers_or_the_header_says_that_they_may_not_be(tmp_path, number):
    made, config = FOLDERS[number]
    folder = save(tmp_path / "folder", made(), config)
    ours, theirs = folder_tokenizer(folder, 10_000), transformers.AutoTokenizer.from_pretrained(folder)
    differing = [
        text for text in TEXTS if ours.encode_text(text).tolist() != theirs.encode(text, add_special_tokens=False)
    ]
    assert not differing or ours.caveat
    if config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast"):
        assert not ours.caveat
    said = compare_ids(folder, 10_000)
    assert said.startswith("ids differ        in 0 of") or ours.caveat


def test_the_classes_that_build_their_own_steps_build_these():
    for name, expected in BUILT_BY_CLASS.items():
        traced = json.loads(getattr(transformers, name)().backend_tokenizer.to_str())
        steps = json.dumps([traced["normalizer"], traced["pre_tokenizer"]], sort_keys=True)
        assert zlib.crc32(steps.encode()) == expected, name


def test_added_tokens_are_of_the_fingerprint_and_a_run_of_older_rules_is_without_them(tmp_path):
    folder = save(tmp_path / "folder", byte_level(), GENERIC | CONFIGS["additional special tokens"])
    tokenizer = folder_tokenizer(folder, 10_000)
    plain = save(tmp_path / "plain", byte_level(), GENERIC)
    assert tokenizer.fingerprint() != folder_tokenizer(plain, 10_000).fingerprint()
    text = "x <tool>y</tool> z"
    assert tokenizer.encode_text(text).tolist() != folder_tokenizer(plain, 10_000).encode_text(text).tolist()
    tokenizer.rules = 1
    assert tokenizer.fingerprint() == folder_tokenizer(plain, 10_000).fingerprint()
    assert tokenizer.encode_text(text).tolist() == folder_tokenizer(plain, 10_000).encode_text(text).tolist()


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", split("(a+)+$|(a|a)+b")),
        ("pre_tokenizer", split("(x+x+)+y")),
        ("pre_tokenizer", split("(7|77)+b")),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    ],
)
def test_a_file_that_ends_or_hangs_its_reader_is_one_sentence(tmp_path, monkeypatch, part, value):
    monkeypatch.setattr(untrusted, "TRIAL_SECONDS", 2)
    folder = save(tmp_path / "folder", byte_level(), GENERIC)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {part: value}))
    with pytest.raises(UserError) as error:
        folder_tokenizer(folder, 10_000)
    assert "\n" not in str(error.value)
    assert "tokenizer.json can't be" in str(error.value)


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0, "b": 1, "</s>": 2}), models.WordPiece({"a": 0, "</s>": 2, "b": 1})]
)
def test_a_vocabulary_without_an_unknown_token_is_told_at_the_text_that_needs_it(tmp_path, model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    ours = folder_tokenizer(tmp_path, 10)
    assert ours.encode("a b").tolist() == [2, 0, 1, 2]
    with pytest.raises(UserError, match=r"tokenizer\.json can't tokenize a text: .*unknown token"):
        ours.encode("a c")


@pytest.mark.parametrize("eos", ["</s>", [[2]], [2, "3"], True, -1, {"id": 2}])
def test_ids_of_another_type_are_refused(tmp_path, eos):
    folder = save(tmp_path / "folder", byte_level(), GENERIC)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"has eos_token_id .*expected an id, or a list of ids"):
        folder_tokenizer(folder, 10_000)


def test_a_process_is_limited_below_a_limit_of_its_user():
    """Only root may raise a hard limit, and so nothing may try to."""
    command = (
        "import resource; from src.extras.hf import untrusted\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (900, 1000)); untrusted._limit(5, 1 << 40)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_CPU); assert soft < 900 and hard == 1000, (soft, hard)"
    )
    subprocess.run([sys.executable, "-c", command], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize(
    "entry",
    [
        {"added_tokens_decoder": [{"content": "<x>"}]},
        {"added_tokens_decoder": {"five": {"content": "<x>"}}},
        {"added_tokens_decoder": {"5": {}}},
        {"added_tokens_decoder": {"5": {"content": "<x>", "lstrip": "yes"}}},
        {"additional_special_tokens": [None]},
        {"additional_special_tokens": ["\ud800"]},
        {"extra_special_tokens": {"image_token": ["<x>"]}},
    ],
)
def test_added_tokens_of_another_type_are_refused(tmp_path, entry):
    folder = save(tmp_path / "folder", byte_level(), GENERIC | entry)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: its added or special tokens can't be read: "):
        folder_tokenizer(folder, 10_000)


def test_a_file_is_tried_once(tmp_path, monkeypatch):
    folder = save(tmp_path / "folder", byte_level(), GENERIC)
    folder_tokenizer(folder, 10_000)
    monkeypatch.setattr(untrusted.subprocess, "run", lambda *_, **__: pytest.fail("it is tried again"))
    folder_tokenizer(folder, 10_000)
    assert huggingface_tokenizer.try_tokenizer is untrusted.try_tokenizer
