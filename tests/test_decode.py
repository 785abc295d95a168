"""Text from a model, as users ask for it, against transformers' generation."""

import contextlib
import copy
import gc
import importlib
import io
import itertools
import json
import re
import shutil
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.generation import completion, decode
from src.extras.generation.decode import Completion, generate
from src.extras.generation.generate import Generator, Sampling, in_training
from src.extras.generation.inference_weights import unrolled
from src.extras.generation.loaded_model import inference_plan
from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.parallel.mesh import make_layout
from src.run.resolve_config import load
from src.system.errors import UserError, printable
from tests import runs, tiny
from tests.data import every_source

BYTES = ByteTokenizer()
LENGTH = 48
SIZES = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": BYTES.bos,
    "eos_token_id": BYTES.eos,
}
PROMPTS = ["a", "What is the answer?", "def main(argv):", "zz top", "é漢😀 is", "x = 1"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def save(model, folder):
    """A Hugging Face folder of the model with other weights, some of which make it end texts, and with a tokenizer."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
        model.lm_head.weight[BYTES.eos] *= 2.5
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{i}>" for i in range(256, 262)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<256>", "eos_token": "<257>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return model.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, save(LlamaForCausalLM(LlamaConfig(**SIZES)), folder)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """The same of a model whose layers see seven tokens."""
    folder = tmp_path_factory.mktemp("mistral")
    return folder, save(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)), folder)


def arguments(folder, **keys):
    keys = {
        "model_name": folder,
        "load_parameters_path": folder,
        "tokenizer_type": "byte",  # not the folder's, unless a test says so
        "tokenizer_path": "",
        "accept_changes": "[tokenizer_path]",
        "max_target_length": LENGTH,
        "dtype": "float32",
        "matmul_precision": "highest",
        "decode_sampling_strategy": "greedy",
        "jax_cache_dir": runs.TINY["jax_cache_dir"],
        **keys,
    }
    return [runs.BASE, *(f"{key}={json.dumps(v) if isinstance(v, list) else v}" for key, v in keys.items())]


def continuation(model, prompt_ids, tokenizer=BYTES, new=None):
    """What transformers' greedy generation says after a prompt, and how many tokens that took."""
    prompt = torch.tensor(np.asarray(prompt_ids)[None].astype(np.int64))
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new or LENGTH - prompt.shape[1],
        pad_token_id=BYTES.eos,
    )[0].numpy()
    count = len(ids) - prompt.shape[1]
    return tokenizer.decode(ids)[len(tokenizer.decode(prompt_ids)) :], count


@pytest.mark.long  # weights in 8 bits generate texts in tests/model/test_low_precision.py
def test_weights_kept_in_8_bits_answer_as_rounded_ones_do(llama, tmp_path, capsys):
    """Those of transformers' model, rounded to 127 steps of each output's largest magnitude but for the logits'."""
    folder, model = llama
    rounded = copy.deepcopy(model)
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127
            module.weight.data = torch.round(module.weight.data / scale) * scale
    expected = [continuation(rounded, BYTES.encode_prompt(prompt))[0] for prompt in PROMPTS[:3]]
    assert expected != [continuation(model, BYTES.encode_prompt(prompt))[0] for prompt in PROMPTS[:3]]
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS[:3]), encoding="utf-8")
    assert decode.main(arguments(folder, prompt_path=tmp_path / "prompts.txt", quantize_weights="int8")) == expected
    # 67 KB of embedding and logits beside 101 KB of products, now a quarter.
    assert "weights: 0.1 MB in memory, 0.2 before quantize_weights=int8" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.long)])
def test_a_file_of_prompts_is_answered_as_greedy_generation_does(family, request, tmp_path, capsys):
    folder, reference = request.getfixturevalue(family)
    expected = [continuation(reference, BYTES.encode_prompt(prompt)) for prompt in PROMPTS]
    assert len({count for _, count in expected}) > 2, "texts should end at different places"
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS), encoding="utf-8")
    # Half a row a device: two batches.
    texts = decode.main(arguments(folder, prompt_path=tmp_path / "prompts.txt", per_device_batch_size=0.5))
    assert texts == [text for text, _ in expected]
    output = capsys.readouterr().out
    for number, prompt in enumerate(PROMPTS, start=1):
        assert f"prompt {number}:\n  {prompt}" in output
    tokens = sum(len(BYTES.encode_prompt(prompt)) for prompt in PROMPTS)
    assert re.search(rf"^prefill: {tokens} tokens in [\d.]+ s, [\d.,]+ tokens/s$", output, re.MULTILINE)
    drawn = sum(count for _, count in expected) - len(PROMPTS)
    assert re.search(rf"^decode: {drawn} tokens in [\d.]+ s, [\d.,]+ tokens/s$", output, re.MULTILINE)


def test_one_prompt_streams_its_whole_text(llama, capsys, monkeypatch):
    folder, reference = llama
    pieces = []
    for module in (completion, decode):
        monkeypatch.setattr(module, "write_now", pieces.append)
    (text,) = decode.main(arguments(folder, prompt=PROMPTS[1], sample_length=20))
    assert text == continuation(reference, BYTES.encode_prompt(PROMPTS[1]), new=20)[0]
    assert len(pieces) > 10
    assert "".join(pieces) == f"{PROMPTS[1]}{text}\n"
    capsys.readouterr()
    decode.main(arguments(folder, prompt=PROMPTS[1], sample_length=LENGTH - len(PROMPTS[1])))
    said = f"sample_length={LENGTH - len(PROMPTS[1])}: prompt and text are limited to max_target_length={LENGTH} tokens"
    assert said in capsys.readouterr().out, "with its bos the prompt has a token more"


def test_a_chat_template_writes_what_the_user_says(llama, tmp_path):
    folder, reference = llama
    lines = [{"prompt": "hi"}, {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "hi"}]}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    keys = {"prompt_path": tmp_path / "chat.jsonl", "tokenizer_type": "huggingface", "tokenizer_path": folder}
    texts = decode.main(arguments(folder, use_chat_template=True, **keys))
    tokenizer = huggingface(folder)
    rendered = ["user: hi\nassistant:", "system: b\nuser: hi\nassistant:"]
    assert texts == [continuation(reference, tokenizer.encode_text(text), tokenizer)[0] for text in rendered]


def test_what_a_chat_template_wrote_is_printed_apart_from_the_answer(llama, tmp_path, capsys):
    folder, reference = llama
    shutil.copy(folder / "tokenizer.json", tmp_path)
    template = "{% for m in messages %}{{ '<258>' + m.role + '\n' + m.content + '<259>' }}{% endfor %}<258>assistant"
    names = {"bos_token": "<256>", "eos_token": "<257>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat.jsonl").write_text('{"prompt": "hi", "id": 1}\n{"prompt": "ho"}\n')
    keys = {"use_chat_template": True, "tokenizer_type": "huggingface", "tokenizer_path": tmp_path}
    tokenizer = huggingface(tmp_path)
    hi, ho = (f"<258>user\n{each}<259><258>assistant" for each in ("hi", "ho"))
    (text,) = decode.main(arguments(folder, prompt="hi", **keys))
    assert text == continuation(reference, tokenizer.encode_text(hi), tokenizer)[0]
    assert f"\n{hi}\n{printable(text)}\n" in capsys.readouterr().out
    texts = decode.main(arguments(folder, prompt_path=tmp_path / "chat.jsonl", **keys))
    assert texts[0] == text
    printed = capsys.readouterr().out
    assert printed.count("prompt_path: these fields have no effect: id\n") == 1
    shown = "\n".join(f"  {line}" for line in f"{ho}\n{printable(texts[1])}".splitlines())
    assert f"\nprompt 2:\n{shown}\n" in printed


def huggingface(folder):
    return HuggingFaceTokenizer(folder / "tokenizer.json", SIZES["vocab_size"])


def test_an_interactive_conversation_goes_on_and_begins_anew_when_it_is_full(llama, monkeypatch, capsys):
    folder, reference = llama
    tokenizer = huggingface(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nho\nwhat?\nhe\n"))
    keys = {"tokenizer_type": "huggingface", "tokenizer_path": folder, "sample_length": 4}
    keys |= {"max_target_length": 64}
    texts = decode.main(arguments(folder, interactive=True, use_chat_template=True, **keys))

    def answer(rendered):
        return continuation(reference, tokenizer.encode_text(rendered), tokenizer, new=4)[0]

    first = answer("user: hi\nassistant:")
    second = answer(f"user: hi\nassistant: {first}\nuser: ho\nassistant:")
    assert texts[:2] == [first, second]
    output = capsys.readouterr().out
    assert "max_target_length" in output
    assert "starts over" in output
    assert texts[2:] == [answer("user: he\nassistant:")]


def test_a_line_that_is_not_text_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    with pytest.raises(UserError, match=r"standard input has a line that is not text in utf-8: invalid continuation"):
        decode.converse(None, None, None)


def test_interactive_texts_stand_alone_without_a_template(llama, monkeypatch, capsys):
    folder, reference = llama
    monkeypatch.setattr(sys, "stdin", io.StringIO("zz top\nx = 1\n"))
    texts = decode.main(arguments(folder, interactive=True))
    assert texts == [continuation(reference, BYTES.encode_prompt(prompt))[0] for prompt in ("zz top", "x = 1")]
    assert "> " + "\n> ".join(map(printable, texts)) + "\n> \n" in capsys.readouterr().out


# ---- Where a text ends, and what of it may be shown


def config_of(**keys):
    return tiny.load(**{"vocab_size": 258, "max_target_length": LENGTH, **keys})


def completed(text, **keys):
    """A completion that was given the text's bytes until it was done, and its stable text after each."""
    completion = Completion(config_of(**keys).decoding, keys.get("max_target_length", LENGTH), BYTES, "ab")
    stable = []
    for byte in text.encode():
        if not completion.done:
            completion.add(byte)
            stable.append(completion.stable_text())
    return completion, stable


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.stop_ids, self.decoded = tokenizer, frozenset(), 0

    def encode_prompt(self, text):
        return self.tokenizer.encode_prompt(text)

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


def sentencepiece_of_bytes(folder):
    """A SentencePiece model that spells what it does not know in bytes."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat, and the dog too"] * 20),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "bytes.model").write_bytes(model.getvalue())
    return SentencePieceTokenizer(str(folder / "bytes.model"))


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
@pytest.mark.parametrize("stop", ["never", "the 漢😀 290"])
def test_a_stop_text_is_looked_for_at_the_end_of_what_is_drawn(tmp_path, kind, stop):
    tokenizer = BYTES if kind == "byte" else sentencepiece_of_bytes(tmp_path)
    ids = np.concatenate([tokenizer.encode_text(f"the 漢😀 {number}, and \ufffd") for number in range(300)])
    prompt, counting = tokenizer.encode_prompt("on the mat"), Counting(tokenizer)
    keys = config_of(decode_stop=f'["{stop}"]').decoding
    completion = Completion(keys, len(prompt) + len(ids), counting, "on the mat")
    added = next(
        number for number, token in enumerate(ids.tolist(), start=1) if completion.add(token) or completion.done
    )
    generated = tokenizer.decode(np.concatenate([prompt, ids]))[len(tokenizer.decode(prompt)) :]
    assert completion.text == generated.partition(stop)[0]
    assert stop in tokenizer.decode(ids[:added]) or added == len(ids)
    assert stop not in tokenizer.decode(ids[: added - 1])
    assert counting.decoded < 70 * len(ids)  # and not each time all before it


def byte_fallback(folder):
    """A tokenizer.json that decodes a run of bytes as one, as Llama 2's does: a cut run has no characters."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return HuggingFaceTokenizer(folder / "tokenizer.json", 258)


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "byte fallback"])
def test_a_text_is_shown_as_it_grows_by_its_last_ids_alone(tmp_path, kind):
    make = {"byte": lambda folder: BYTES, "sentencepiece": sentencepiece_of_bytes, "byte fallback": byte_fallback}
    tokenizer = make[kind](tmp_path)
    ids = np.concatenate([tokenizer.encode_text(f"the 漢จักรวาล😀 {number}, and ") for number in range(300)])
    prompt, counting = tokenizer.encode_prompt("on the mat"), Counting(tokenizer)
    completion = Completion(config_of().decoding, len(prompt) + len(ids) + 1, counting, "on the mat")
    shown = [""]
    for token in ids.tolist():
        completion.add(token)
        shown.append(completion.stable_text())
    generated = tokenizer.decode(np.concatenate([prompt, ids]))[len(tokenizer.decode(prompt)) :]
    assert shown[-1] == generated
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert len(set(shown)) > 300 * 8  # a character or a piece at a time
    assert counting.decoded < 70 * len(ids)


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "byte fallback"])
def test_a_character_that_a_prompt_of_ids_cuts_belongs_to_the_text(tmp_path, kind):
    """Prompts by decode_prompt_tokens end at any id; one that ends in U+FFFD itself is whole."""
    make = {"byte": lambda folder: BYTES, "sentencepiece": sentencepiece_of_bytes, "byte fallback": byte_fallback}
    tokenizer = make[kind](tmp_path)
    ids = tokenizer.encode_prompt("the \ufffd漢😀 mat")
    text = tokenizer.decode(ids)  # SentencePiece replaces U+FFFD
    for cut in range(2, len(ids)):
        completion = Completion(config_of().decoding, len(ids), tokenizer, ids[:cut])
        shown = [completion.add(token) or completion.stable_text() for token in ids[cut:].tolist()]
        prompt = completion.prompt_text
        whole = prompt if text.startswith(prompt) else prompt.rstrip("\ufffd")
        assert text.startswith(whole)
        assert completion.text == text[len(whole) :]
        assert all(completion.text.startswith(each) for each in shown)


def test_a_stop_text_is_found_wherever_it_falls():
    for place in range(100, 400, 7):
        text = "x" * place + "STOP it"
        completion, stable = completed(text, decode_stop="[STOP]", max_target_length=500)
        assert completion.text == "x" * place == stable[-1]


def test_only_whole_characters_are_stable():
    completion, stable = completed("é漢😀!")
    assert stable == ["", "é", "é", "é", "é漢", "é漢", "é漢", "é漢", "é漢😀", "é漢😀!"]
    assert not completion.done


def test_a_stop_text_ends_a_completion_and_no_part_of_it_is_shown():
    completion, stable = completed("say END or E, END. more", decode_stop='["E, EN", "END."]')
    assert completion.done
    assert completion.text == "say END or "
    assert stable[4:7] == ["say ", "say ", "say "]  # it may be the beginning of END.
    assert stable[7] == "say END "


def test_a_completion_ends_at_its_length_limit():
    assert completed(100 * "x")[0].text == (LENGTH - 3) * "x"
    assert completed(100 * "x", sample_length=5)[0].text == 5 * "x"


# ---- Any layout, any way of running


def generated(devices, stacked, **keys):
    """Texts of a tiny random model for prompts of several lengths."""
    config = config_of(decode_seed=5, **keys)
    plan = inference_plan(config, make_layout(config.mesh, jax.devices()[:devices]))
    shardings = plan.shardings
    weights = jax.tree.map(jax.device_put, tiny.random_weights(plan), shardings)
    use = in_training if stacked else unrolled
    generator = Generator(*use(plan, plan.split(weights)), Sampling(1.0, 0, 0.9), config.decoding.decode_seed, LENGTH)
    completions = [Completion(config.decoding, LENGTH, BYTES, prompt) for prompt in PROMPTS]
    generate(generator, completions, len(completions), 0)
    if devices == 1 or "decoder_segments" in keys:  # on a mesh, one case of a batch of another size is enough
        alone = Completion(config.decoding, LENGTH, BYTES, PROMPTS[3])
        generate(generator, [alone], 1, 3)
        assert alone.text == completions[3].text
    return [completion.text for completion in completions]


WINDOWS = "[{repeats: 2, pattern: [{attention_type: local_sliding, sliding_window_size: 5}, {}]}]"


@pytest.mark.parametrize(
    "keys",
    [
        {"decoder_segments": WINDOWS, "base_num_decoder_layers": 4, "ici_tensor_parallelism": 2},
        pytest.param(
            {
                "decoder_segments": "[{repeats: 1, pattern: [{}]}, {repeats: 2, shared: true, pattern: [{}]}]",
                "base_num_decoder_layers": 3,
            },
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"attention_type": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"num_experts": 8, "num_experts_per_tok": 3, "base_moe_mlp_dim": 16, "ici_expert_parallelism": 4},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_mesh_of_eight_and_unrolled_layers_draw_what_one_device_does(keys):
    alone = {key: value for key, value in keys.items() if not key.startswith("ici_")}
    expected = generated(1, stacked=True, **alone)
    assert len(set(expected)) == len(PROMPTS)
    assert generated(8, stacked=False, **keys) == expected


@pytest.mark.long
def test_stages_of_a_pipeline_all_run_all_layers():
    keys = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    expected = generated(1, stacked=True)
    assert generated(8, stacked=True, **keys) == expected
    assert generated(8, stacked=False, **keys) == expected


@pytest.mark.parametrize("use", [in_training, unrolled])
def test_stages_of_a_pipeline_keep_their_part_of_the_weights(use):
    keys = {"ici_pipeline_parallelism": 4, "ici_fsdp_parallelism": 1, "base_num_decoder_layers": 4}
    _, plan = tiny.make(4, **keys)
    weights = plan.split(jax.device_put(tiny.random_weights(plan), plan.shardings))
    weights = jax.tree.leaves(use(plan, weights)[1])
    held = [sum(x.addressable_shards[device].data.size for x in weights) for device in range(4)]
    assert max(held) <= 1.05 * sum(x.size for x in weights) / 4  # a norm's scales may be copies


def test_of_stages_only_the_weights_that_they_share_out_move_and_all_others_are_the_same_arrays():
    keys = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}
    segments = "[{repeats: 4, pattern: [{}]}, {repeats: 3, shared: true, pattern: [{}]}, {repeats: 2, pattern: [{}]}]"
    adapters = {"lora_rank": 4, "lora_parameters": "['*']", "load_parameters_path": "elsewhere"}
    _, plan = tiny.make(4, base_num_decoder_layers=9, decoder_segments=segments, **keys, **adapters)
    weights = plan.split(jax.device_put(tiny.random_weights(plan), plan.shardings))
    before, after = (jax.tree.leaves_with_path(each) for each in (weights, in_training(plan, weights)[1]))
    for (path, old), (_, new) in zip(before, after, strict=True):
        if "['segments'][0]" in jax.tree_util.keystr(path):
            assert old.sharding.spec[0] == "stage"
            assert new.sharding.spec[0] is None
            np.testing.assert_array_equal(new, old)
        else:
            assert new is old


def test_a_sample_in_training_is_what_decode_gives_its_checkpoint(tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 4}
    runs.run_here(**keys, sample_length=20, prompt="alpha ")
    sample = capsys.readouterr().out.rpartition("sample:\n")[2].rpartition("report:")[0]
    folder = tmp_path / "run"
    (text,) = decode.main([str(folder / "config.yml"), f"load_parameters_path={folder}"])
    assert "".join(f"  {line}\n" for line in printable("alpha " + text).splitlines()) == sample


# ---- Bad input


def refused(*argv):
    with pytest.raises(UserError) as error:
        decode.main(list(argv))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("prompts.txt", "\n \n", ["prompts.txt has no prompt"]),
        ("prompts.jsonl", '{"prompt": "a"}\n{"text": "b"}', ["line 2", "messages"]),
        ("prompts.jsonl", '{"prompt": "a"', ["line 1"]),
        (
            "chat.jsonl",
            '{"messages": [{"role": "human", "content": "a"}]}',
            ["line 1", "message 1", "'human'", "assistant"],
        ),
    ],
)
def test_a_malformed_file_of_prompts(llama, write, name, content, parts):
    said = refused(*arguments(llama[0], prompt_path=write(name, content)))
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"prompt": 47 * "a"}, ["'aaa", "48 tokens", "47", "max_target_length=48"]),
        ({"prompt": 8 * "a", "max_prefill_predict_length": 8}, ["9 tokens", "max_prefill_predict_length=8"]),
        ({"prompt_path": "/nowhere"}, ["prompt_path=/nowhere"]),
        ({"load_parameters_path": ""}, ["load_parameters_path"]),
        ({"use_chat_template": True}, ["template", "tokenizer_path"]),
        ({"dataset_type": "synthetic"}, ["tokenizer"]),
        ({"decode_sampling_strategy": "topk"}, ["topk needs decode_sampling_top_k"]),
        ({"decode_sampling_nucleus_p": 0.9}, ["nucleus or composite"]),
        ({"interactive": True, "prompt_path": "x"}, ["interactive and prompt_path"]),
    ],
)
def test_keys_that_do_not_fit(llama, keys, parts):
    said = refused(*arguments(llama[0], **keys))
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"use_chat_template": True}, "chat template"),
        ({"use_chat_template": True, "interactive": True}, "chat template"),
        ({"prompt": LENGTH * "a"}, "max_target_length"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said_before_weights_are_looked_for(llama, keys, part):
    assert part in refused(*arguments(llama[0], load_parameters_path="/nowhere", **keys))


def test_another_tokenizer_than_the_checkpoint_was_trained_with(tmp_path, llama):
    corpus = runs.write_corpus(tmp_path / "corpus")
    runs.run_here(base_output_directory=tmp_path, dataset_path=corpus, steps=1, vocab_size=262)
    folder = tmp_path / "run"
    keys = ["tokenizer_type=huggingface", f"tokenizer_path={llama[0]}"]
    said = refused(str(folder / "config.yml"), f"load_parameters_path={folder}", *keys)
    assert "type: byte -> huggingface" in said


# ---- Texts of many prompts, in a file


DOCUMENTS = ["What is the answer?", "zz top and more", "def main(argv):", "x = 1; y", "a b c d e f g"]


@pytest.fixture
def documents(tmp_path):
    """A .jsonl file of documents, and keys that draw after the first five ids of each."""
    file = tmp_path / "data" / "documents.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    keys = {"dataset_path": file, "decode_prompt_tokens": 5, "decode_path": tmp_path / "out" / "texts.jsonl"}
    return {**keys, "per_device_batch_size": 0.25}


def test_documents_are_continued_as_greedy_generation_does(llama, documents):
    folder, reference = llama
    texts = decode.main(arguments(folder, **documents))
    lines = [json.loads(line) for line in documents["decode_path"].read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(len(DOCUMENTS)))
    for line, document, text in zip(lines, DOCUMENTS, texts, strict=True):
        prompt = BYTES.encode_prompt(document)[:5]
        expected, count = continuation(reference, prompt)
        assert line["prompt"] == document[:4]
        assert line["text"] == text == expected
        assert len(line["ids"]) == count
        ids = torch.tensor(np.concatenate([prompt, line["ids"]])[None].astype(np.int64))
        with torch.no_grad():
            log_probs = torch.log_softmax(reference(ids).logits[0, 4:-1].double(), dim=-1)
        wanted = log_probs.gather(1, ids[0, 5:, None])[:, 0].numpy()
        np.testing.assert_allclose(line["log_probs"], wanted, atol=1e-4)
        np.testing.assert_allclose(line["log_prob"], sum(line["log_probs"]))


def test_a_killed_command_goes_on_to_the_same_file(llama, documents, capsys):
    keys = {**documents, "decode_samples": 3, "decode_sampling_strategy": "weighted"}
    decode.main(arguments(llama[0], **keys))
    path = documents["decode_path"]
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [(line["id"], line["sample"]) for line in lines] == [(n, s) for n in range(len(DOCUMENTS)) for s in range(3)]
    assert len({line["text"] for line in lines}) > len(DOCUMENTS)
    for kept in (len(whole) // 3, len(whole)):
        path.write_bytes(whole[:kept])
        capsys.readouterr()
        decode.main(arguments(llama[0], **keys))
        assert path.read_bytes() == whole
    assert "15 texts, 0 of them generated now" in capsys.readouterr().out
    said = refused(*arguments(llama[0], **{**keys, "decode_seed": 5}))
    assert f"decode_path={path} has texts from other settings (decode_seed): name a new file" in said
    for key, value in (("dtype", "bfloat16"), ("rope_max_timescale", 500), ("matmul_precision", "high")):
        assert f"has texts from other settings ({key})" in refused(*arguments(llama[0], **{**keys, key: value}))
    (path.parent / f"{path.name}.settings").unlink()
    assert "has texts from other settings" in refused(*arguments(llama[0], **keys))


def test_a_kill_at_any_moment_of_a_restart_loses_no_text(llama, documents, monkeypatch, capsys):
    decode.main(arguments(llama[0], **documents))
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):

        def torn(file, text):
            file.write_bytes(text.encode()[:20])
            raise KeyboardInterrupt

        patch.setattr(Path, "write_text", torn)
        decode.main(arguments(llama[0], **documents))
    capsys.readouterr()
    decode.main(arguments(llama[0], **documents))
    assert "5 texts, 0 of them generated now" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tokens", "custom"])
def test_prompts_are_the_beginnings_of_the_documents_of_any_type(kind, tmp_path):
    settings = every_source.write(tmp_path / "data", kind, lambda text: BYTES.encode(text).tolist())
    argv = [runs.BASE, "decode_prompt_tokens=4", "decode_path=x", "decode_num_prompts=30", "vocab_size=258"]
    config = load([*argv, *(f"{key}={value}" for key, value in settings.items())])
    prompts = decode.prompts_of(config.decoding, InputSpec.of(config, BYTES))
    assert len(prompts) == 30
    beginnings = {tuple(BYTES.encode(text)[:4].tolist()) for text in every_source.texts(kind)}
    assert {tuple(ids.tolist()) for ids in prompts[:]} <= beginnings


@pytest.mark.parametrize("key", ["datasets", "eval_datasets"])
def test_prompts_for_a_file_come_from_one_set_of_data(key, tmp_path, capsys):
    for name in ("code", "prose"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 9)
    sets = [f"{{name: {name}, dataset_path: {tmp_path / name}.txt}}" for name in ("code", "prose")]
    beside = [] if key == "datasets" else [f"dataset_path={tmp_path}"]

    def prompts_of(sets, *keys):
        config = load([runs.BASE, "decode_prompt_tokens=4", f"{key}=[{', '.join(sets)}]", *beside, *keys])
        return decode.prompts_of(config.decoding, InputSpec.of(config, BYTES))

    with pytest.raises(UserError, match=f"prompts from one dataset, but {key} names code, prose: name only one"):
        prompts_of(sets, "decode_path=x")
    assert BYTES.decode(prompts_of(sets[1:], "decode_path=x")[0][1:]) == "pro"
    if key == "eval_datasets":
        assert BYTES.decode(prompts_of(sets, "decode_metrics=a:b", "eval_interval=1")[0][1:]) == "cod"
        said = "decode_metrics takes prompts only from code, the first dataset of eval_datasets: code, prose\n"
        assert capsys.readouterr().out == said


def test_of_conversations_the_prompt_ends_before_the_last_answer(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    keys = ["use_sft=true", f"dataset_path={tmp_path}", "decode_prompt_tokens=4", "decode_path=x"]
    config = load([runs.BASE, *keys])
    (prompt,) = decode.prompts_of(config.decoding, InputSpec.of(config, BYTES))[:]
    assert [message["content"] for message in prompt.messages] == ["a", "b", "c"]


def test_prompts_of_a_stream_are_the_same_at_each_evaluation(tmp_path, monkeypatch):
    """A stream is read by windows of 1,024 documents, and here there are more."""
    code = "import grain\n\nTEXTS = [str(10_000 + n) for n in range(2_500)]\n\n"
    code += "def made(config, split):\n    return grain.MapDataset.source(TEXTS).to_iter_dataset()\n"
    (tmp_path / "my_stream.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["dataset_type=custom", "dataset_factory=my_stream:made", "decode_prompt_tokens=6", "decode_path=x"]
    config = load([runs.BASE, *keys, "decode_num_prompts=2_100", "eval_interval=-1"])
    prompts = decode.prompts_of(config.decoding, InputSpec.of(config, BYTES))
    for _ in range(2):
        texts = [BYTES.decode(prompt[1:]) for prompt in prompts[:]]
        assert texts == [str(10_000 + n) for n in range(2_100)]


def test_texts_are_measured_at_each_evaluation(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_metrics.py").write_text(
        "seen = []\n\ndef measure(lines):\n    seen.append(lines)\n"
        "    return {'ids': sum(len(line['ids']) for line in lines)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    corpus = runs.write_corpus(tmp_path / "corpus", documents=20)
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 4, "eval_interval": 2, "eval_steps": 1}
    keys |= {"decode_prompt_tokens": 3, "decode_num_prompts": 5, "decode_samples": 2, "sample_length": 7}
    result = runs.run_here(**keys, decode_metrics="my_metrics:measure", base_num_decoder_layers=1)
    my_metrics = importlib.import_module("my_metrics")
    assert [len(lines) for lines in my_metrics.seen] == [10, 10]
    counts = [sum(len(line["ids"]) for line in lines) for lines in my_metrics.seen]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_decode_ids"] for line in lines if "eval_loss" in line] == counts
    assert result.eval_metrics["eval_decode_ids"] == counts[-1]
    folder = tmp_path / "run"
    drawn = ["decode_path=" + str(tmp_path / "drawn.jsonl"), "decode_metrics=", "per_device_batch_size=1"]
    decode.main([str(folder), *drawn])
    again = [json.loads(line) for line in (tmp_path / "drawn.jsonl").read_text().splitlines()]
    assert [line["ids"] for line in again] == [line["ids"] for line in my_metrics.seen[-1]]
    capsys.readouterr()
    decode.main([str(folder), "prompt=zebra"])
    assert "\nzebra" in capsys.readouterr().out


def test_weights_of_an_evaluation_are_in_memory_no_longer_than_it(tmp_path, monkeypatch):
    (tmp_path / "my_count.py").write_text("def count(lines):\n    return {'texts': len(lines)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    corpus = runs.write_corpus(tmp_path / "corpus", documents=20)
    keys = [f"dataset_path={corpus}", "decode_prompt_tokens=3", "decode_num_prompts=2", "sample_length=2"]
    config = load([runs.BASE, *keys, "decode_metrics=my_count:count", "eval_interval=1", "max_target_length=16"])
    _, plan = tiny.make(vocab_size=258)
    measured = decode.DecodeMetrics(config.decoding, InputSpec.of(config, BYTES), 2)
    weights = jax.tree.map(jnp.asarray, plan.split(tiny.random_weights(plan)))
    before = [weakref.ref(leaf) for leaf in jax.tree.leaves(weights)]
    assert measured.run(plan, weights) == {"decode_texts": 2}
    del weights
    gc.collect()
    assert not any(each() is not None for each in before)


@pytest.mark.parametrize("returned", [3, {"a": [1.0, 2.0]}, {"a": "text"}, {"a": None}, {"a/b": 1.0}])
def test_what_is_no_number_of_texts_is_refused(tmp_path, monkeypatch, returned):
    (tmp_path / "my_numbers.py").write_text(f"def bad(lines):\n    return {returned}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_numbers", raising=False)
    monkeypatch.setattr(decode, "complete_batch", lambda *rest: [])
    config = load([runs.BASE, "decode_metrics=my_numbers:bad", "eval_interval=1"])
    _, plan = tiny.make()
    measured = decode.DecodeMetrics(config.decoding, InputSpec.of(config, BYTES), 4)
    with pytest.raises(
        UserError, match="decode_metrics must return a mapping of names, without /, to numbers: it returned"
    ):
        measured.run(plan, plan.split(tiny.random_weights(plan)))
