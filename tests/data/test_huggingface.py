"""Tokenizers made on the spot, against what `transformers` does with the same folders."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.extras.datasets.train_tokenizer import train
from src.extras.evaluation.scoring import TextBytes
from src.extras.hf import untrusted
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.system.errors import UserError

TEXTS = ["Hello world, hello you.\n\n  def f(x):\n\treturn 'é漢😀'\n", "What is it? It is what it is."] * 4
SPECIALS = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
CHAT_ML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
# Blocks on lines of their own, which trim_blocks and lstrip_blocks take out; and what else a template may call.
BY_LINES = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {% set system = messages[0].content %}
    {% set rest = messages[1:] %}
{% else %}
    {% set system = strftime_now('%Y')[:0] %}
    {% set rest = messages %}
{% endif %}
{% for message in rest %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'user' %}
[USER] {{ system + message.content | trim }} {{ {'é<': message.role} | tojson }}
    {% elif message.role == 'assistant' %}
 {{ message.content }}{{ eos_token }}
    {% else %}
        {{ raise_exception('no such role: ' + message.role) }}
    {% endif %}
{% endfor %}"""
CHAT = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "What is\nit? "},
    {"role": "assistant", "content": " It is 'é漢😀'.\n\n"},
    {"role": "tool", "content": "{}"},
    {"role": "user", "content": "Hello world"},
    {"role": "assistant", "content": "Hello you <|end|> hello."},
]


def byte_level():
    """Byte-pair pieces of bytes, as GPT-2, Llama 3 and Qwen have them; its spans leave out spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def with_post_processor():
    """Pieces that begin with a sign for a space, and a bos that a post-processor adds, as Llama 2 and Gemma have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", *SPECIALS]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def write_folder(folder, tokenizer, **files):
    """A model's folder; `tokenizer_config={...}` is the file of that name."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.fixture(scope="module", params=[byte_level, with_post_processor])
def folder(request, tmp_path_factory):
    settings = {**TOKENS, "chat_template": CHAT_ML}
    return write_folder(tmp_path_factory.mktemp("hf") / "model", request.param(), tokenizer_config=settings)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Makes a folder of the byte-level tokenizer with the given files."""
    tokenizer = byte_level()

    def make(**files):
        return write_folder(tmp_path_factory.mktemp("hf") / "model", tokenizer, **files)

    return make


@pytest.fixture(scope="module")
def plain_folder(plain):
    return plain(tokenizer_config=TOKENS)


@pytest.fixture
def open_folder(config):
    def open_it(path, vocab_size=1000):
        keys = {"tokenizer_type": "huggingface", "tokenizer_path": str(path), "vocab_size": vocab_size}
        settings = config(**keys)
        return make_tokenizer(settings.data, settings.model.vocab_size)

    return open_it


def reference(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)


def test_ids_are_those_of_transformers_between_one_bos_and_one_eos(folder, open_folder):
    tokenizer, theirs = open_folder(folder), reference(folder)
    assert (tokenizer.bos, tokenizer.eos) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in [*TEXTS, "", " ", "x<|end|>y", "unseen ß"]:
        inner = theirs.encode(text, add_special_tokens=False)
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == [tokenizer.bos, *inner, tokenizer.eos]
        assert tokenizer.encode_prompt(text).tolist() == [tokenizer.bos, *inner]
        assert tokenizer.encode_text(text).tolist() == inner
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# As Llama 2's: bos before each question, eos after each answer.
INSTRUCT = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[I] ' + message.content + ' [/I]' }}"
    "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("turns", [[1, 2], [1, 2, 4, 5], [1]])
def test_the_bos_and_eos_that_a_template_wrote_are_not_doubled(folder, open_folder, turns):
    tokenizer, theirs, messages = open_folder(folder), reference(folder), [CHAT[turn] for turn in turns]
    text = theirs.apply_chat_template(messages, chat_template=INSTRUCT, tokenize=False)
    ids = theirs.apply_chat_template(messages, chat_template=INSTRUCT)["input_ids"]
    assert ids[0] == tokenizer.bos
    assert tokenizer.encode_prompt(text).tolist() == tokenizer.encode_default(text).tolist() == ids
    assert tokenizer.encode(text).tolist() == (ids if len(turns) > 1 else [*ids, tokenizer.eos])
    assert TextBytes(tokenizer).document(text).ids.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("settings", [TOKENS, {"eos_token": "<|end|>"}])
def test_a_bos_or_eos_elsewhere_in_a_text_is_one_more(plain, open_folder, settings):
    """As it was: a text is read as it spells, and its first and last id alone may be the document's own."""
    tokenizer = open_folder(plain(tokenizer_config=settings))
    bos, eos = (tokenizer.decode_spelled(np.array([token])) for token in (tokenizer.bos, tokenizer.eos))
    inner = tokenizer.encode_text("a").tolist()
    for text, expected in {
        bos: [tokenizer.bos, tokenizer.eos],
        eos + eos: [tokenizer.bos, tokenizer.eos] if bos == eos else [tokenizer.bos, tokenizer.eos, tokenizer.eos],
        bos + bos + "a": [tokenizer.bos, tokenizer.bos, *inner, tokenizer.eos],
        "a" + bos + "a": [tokenizer.bos, *inner, tokenizer.bos, *inner, tokenizer.eos],
        "a" + eos + "a": [tokenizer.bos, *inner, tokenizer.eos, *inner, tokenizer.eos],
        bos + "a" + eos: [tokenizer.bos, *inner, tokenizer.eos],
    }.items():
        assert tokenizer.encode(text).tolist() == expected, text


def test_by_the_first_rules_of_data_a_spelled_bos_and_eos_are_doubled(plain, open_folder, config):
    tokenizer = open_folder(plain(tokenizer_config=TOKENS))
    old = InputSpec.of(config(), tokenizer, rules=1).tokenizer
    inner = [tokenizer.bos, *tokenizer.encode_text("a").tolist(), tokenizer.eos]
    assert old.encode("<|bos|>a<|eos|>").tolist() == [tokenizer.bos, *inner, tokenizer.eos]
    assert old.encode_prompt("<|bos|>a<|eos|>").tolist() == [tokenizer.bos, *inner]


@given(text=st.text(st.characters(codec="utf-8")))
def test_byte_level_text_comes_back(config, plain_folder, text):
    settings = config(tokenizer_type="huggingface", tokenizer_path=str(plain_folder))
    tokenizer = make_tokenizer(settings.data, 1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_beyond_the_vocabulary_give_no_text(folder, open_folder):
    tokenizer = open_folder(folder)
    ids = [*tokenizer.encode("hello"), tokenizer.vocab_size, tokenizer.vocab_size + 7]
    assert tokenizer.decode(np.array(ids)) == "hello"


def test_truncation_and_padding_that_the_file_asks_for_are_left_out(open_folder, tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    opened = open_folder(write_folder(tmp_path / "model", tokenizer, tokenizer_config=TOKENS))
    text = "Hello world, hello you."
    assert opened.decode(opened.encode(text)) == text
    assert len(opened.encode(text)) < 64


@pytest.mark.parametrize("template", [CHAT_ML, BY_LINES])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_chat_is_rendered_as_transformers_does(plain, open_folder, template, add_generation_prompt):
    folder = plain(tokenizer_config={**TOKENS, "chat_template": template})
    tokenizer = open_folder(folder)
    for messages in (CHAT, CHAT[1:3], CHAT[1:2]):
        expected = reference(folder).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert tokenizer.render_chat(messages, add_generation_prompt) == expected
        ids = reference(folder).apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
        assert tokenizer.encode_text(expected).tolist() == ids


def test_the_template_file_comes_before_the_one_in_tokenizer_config(plain, open_folder):
    folder = plain(tokenizer_config={**TOKENS, "chat_template": CHAT_ML})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert open_folder(folder).render_chat(CHAT, False) == "Be <brief>.!"


# Spaces and lines at both ends, which Jinja2 keeps or takes away, and a template with blocks of its own.
PLAIN = "\n  yes{% if add_generation_prompt %}!{% endif %}\n  \n"
OF_TOOLS = "\n {% set a %}b{% endset %}\n{{ tools | tojson }}\n\n\t"


@pytest.mark.parametrize("in_files", [False, True])
def test_of_several_templates_it_is_the_default_and_the_one_for_tools(plain, open_folder, in_files):
    named = [{"name": "tool_use", "template": OF_TOOLS}, {"name": "default", "template": PLAIN}]
    folder = plain(tokenizer_config={**TOKENS, **({} if in_files else {"chat_template": named})})
    if in_files:
        (folder / "chat_template.jinja").write_text(PLAIN)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OF_TOOLS)
    tokenizer, theirs = open_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs.chat_template, dict)
    assert tokenizer.chat_template == PLAIN
    for tools in (None, [], [{"type": "function"}]):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert tokenizer.render_chat(CHAT, False, {"tools": tools}) == expected
    assert tokenizer.render_chat(CHAT, False) == theirs.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (BY_LINES.replace("'tool'", "'x'"), "rejects the conversation: no such role: tool"),
        ("{{ messages[0].content + 1 }}", "rejects the conversation"),
        ("{{ messages.append(1) }}", "rejects the conversation.*unsafe"),
        ("{{ ''.__class__.__mro__[1] }}", "rejects the conversation"),
    ],
)
def test_a_template_that_refuses_is_an_error(plain, open_folder, template, message):
    tokenizer = open_folder(plain(tokenizer_config={**TOKENS, "chat_template": template}))
    with pytest.raises(UserError, match=message):
        tokenizer.render_chat(CHAT, False)


DEEP = "{% for a in range(99999) %}{% for b in range(99999) %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for n in range(99999999) %}{% endfor %}", "Range too big"),
        (DEEP + "{% endfor %}{% endfor %}", "did not finish within 1 seconds"),
        ("{{ 9 ** (9 ** 9) }}", "did not finish within 1 seconds|MiB"),  # no step of Python's ends in it
        ("{{ 'a' * 10 ** 12 }}", "it takes more than 256 MiB"),  # at compilation
        ("{{ messages[0].content * 10 ** 12 }}", "it takes more than 256 MiB"),
        ("{{ '%999999999999d' % 1 }}|{{ 'a'.center(10 ** 11) }}", "MiB|big"),
        ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('a' * 100000) }}", "aaa"),
        ("{{ 'a' * 20000000 }}", r"it wrote 20,000,000 characters, more than 16,777,216"),
        ("{{ messages[0].content|no_such }}", "no_such"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_template_that_fails_or_takes_too_much_is_one_error_in_any_thread(
    plain, open_folder, template, message, monkeypatch
):
    monkeypatch.setattr(untrusted, "CPU_SECONDS", 1)
    monkeypatch.setattr(untrusted, "MEMORY_BYTES", 256 << 20)
    folder = plain(tokenizer_config={**TOKENS, "chat_template": template})
    tokenizer = open_folder(folder)
    with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match=message) as raised:
        thread.submit(tokenizer.render_chat, CHAT, False).result()
    assert str(raised.value).startswith(f"the chat template of {folder}/tokenizer_config.json rejects the conversation")
    assert len(str(raised.value)) < 700


def test_a_template_goes_on_after_a_conversation_that_ended_its_process(plain, open_folder, monkeypatch):
    monkeypatch.setattr(untrusted, "CPU_SECONDS", 1)
    template = "{% if messages|length > 1 %}" + DEEP + "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    tokenizer = open_folder(plain(tokenizer_config={**TOKENS, "chat_template": template}))
    assert tokenizer.render_chat(CHAT[:1], False) == CHAT[0]["content"]
    with pytest.raises(UserError, match="did not finish within 1 seconds"):
        tokenizer.render_chat(CHAT, False)
    with ThreadPoolExecutor(4) as threads:
        messages = [[{"role": "user", "content": f"ünd \ud800 {n}"}] for n in range(40)]
        rendered = list(threads.map(lambda each: tokenizer.render_chat(each, False), messages))
    assert rendered == [each[0]["content"].replace("\ud800", "?") for each in messages]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
            "chat_template.jinja is not a chat template",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ " + "(" * 50_000), "nested too deeply|line 1"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "chat_template": [1]})),
            'tokenizer_config.json: "chat_template" is neither',
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(
                json.dumps({**TOKENS, "chat_template": [{"name": [], "template": ""}]})
            ),
            'tokenizer_config.json: "chat_template" is neither',
        ),
    ],
)
def test_a_file_that_is_no_template_is_an_error(plain, open_folder, write, message):
    folder = plain(tokenizer_config=TOKENS)
    write(folder)
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_no_template_is_an_error_that_names_the_key(plain, open_folder):
    tokenizer = open_folder(plain(tokenizer_config=TOKENS))
    assert tokenizer.chat_template is None
    with pytest.raises(UserError, match=r"tokenizer_path.*chat_template"):
        tokenizer.render_chat(CHAT, False)


def test_a_template_that_is_none_is_an_error(plain, open_folder):
    with pytest.raises(UserError, match=r"chat template of .*can't be read: line 2"):
        open_folder(plain(tokenizer_config={**TOKENS, "chat_template": "a\n{% if %}"}))


ORDER = [
    ("tokenizer_config", {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "lstrip": False}}),
    ("special_tokens_map", {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}),
    ("generation_config", {"bos_token_id": 0, "eos_token_id": [3, 1]}),
    ("config", {"bos_token_id": 2, "eos_token_id": 1}),
]


@pytest.mark.parametrize(("first", "bos", "eos"), [(0, 0, 1), (1, 2, 3), (2, 0, 3), (3, 2, 1)])
def test_special_tokens_are_those_of_the_first_file_that_names_them(plain, open_folder, first, bos, eos):
    nulls = {"tokenizer_config": {"bos_token": None, "eos_token": None}} if first else {}
    tokenizer = open_folder(plain(**nulls, **dict(ORDER[first:])))
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


def test_what_ends_an_answer_is_eos_and_what_generation_config_lists(plain, open_folder):
    tokenizer = open_folder(plain(tokenizer_config=TOKENS, generation_config={"eos_token_id": [3, 2]}))
    assert tokenizer.stop_ids == {1, 2, 3}
    assert open_folder(plain(tokenizer_config=TOKENS)).stop_ids == {1}


def test_without_bos_documents_start_with_eos(plain, open_folder):
    tokenizer = open_folder(plain(tokenizer_config={"bos_token": None, "eos_token": "<|eos|>"}))
    assert (tokenizer.encode("x")[0], tokenizer.bos) == (1, 1)


def test_a_path_may_be_the_file_itself(plain, open_folder):
    assert open_folder(plain(tokenizer_config=TOKENS) / "tokenizer.json").eos == 1


def test_a_folder_with_only_a_sentencepiece_model_is_read_by_sentencepiece(open_folder, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train(TEXTS, 300))
    assert isinstance(open_folder(tmp_path), SentencePieceTokenizer)


@pytest.mark.parametrize(
    ("settings", "added", "unread"),
    [
        ({}, {}, ""),
        ({"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"1": {"content": "<s>"}}}, {}, ""),
        ({"eos_token": "<|end|>"}, {"<|end|>": 300, "<s>": 1}, "no added tokens (<|end|>) of the files beside it"),
        ({"eos_token": "<s>"}, {}, "no eos_token <s> of"),
        (
            {"chat_template": "x", "added_tokens_decoder": {"300": {"content": "<x>"}}},
            {},
            "(<x>), nor chat template of",
        ),
        ({"eos_token": [], "added_tokens_decoder": [1]}, {}, ""),
    ],
)
def test_what_lies_beside_a_sentencepiece_model_and_is_not_read_is_said(open_folder, tmp_path, settings, added, unread):
    (tmp_path / "tokenizer.model").write_bytes(train(TEXTS, 300))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    caveat = open_folder(tmp_path).caveat
    assert unread in caveat
    assert bool(unread) == bool(caveat)


def test_unfit_folders_are_errors(plain, open_folder, tmp_path):
    with pytest.raises(UserError, match=r"neither tokenizer.json nor tokenizer.model"):
        open_folder(tmp_path)
    with pytest.raises(UserError, match=r"no such file or folder"):
        open_folder("meta-llama/Llama-3.1-8B")
    with pytest.raises(UserError, match=r"names its eos token.*tokenizer_config.json"):
        open_folder(plain())
    with pytest.raises(UserError, match=r"no token '<none>', which a file names as its bos"):
        open_folder(plain(tokenizer_config={**TOKENS, "bos_token": "<none>"}))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer.json can't be read as a tokenizer"):
        open_folder(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        folder = plain(tokenizer_config=TOKENS)
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(UserError, match=f"{name} is not JSON .*nested too deeply"):
            open_folder(folder)
        (folder / name).unlink()
    folder = plain(tokenizer_config=TOKENS)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json is not JSON"):
        open_folder(folder)


def test_an_added_token_beyond_vocab_size_is_an_error_only_where_a_text_has_it(open_folder, tmp_path):
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    folder = write_folder(tmp_path / "model", tokenizer, tokenizer_config=TOKENS)
    opened = open_folder(folder, vocab_size=size)
    assert opened.vocab_size == size
    with pytest.raises(UserError, match=rf"'<image>', id {size} .*vocab_size={size} does not have"):
        opened.encode("an <image>")
    assert open_folder(folder, vocab_size=size + 1).encode("an <image>")[-2] == size
    with pytest.raises(UserError, match=rf"vocab_size={size - 1} is less than the {size} ids"):
        open_folder(folder, vocab_size=size - 1)


def test_fingerprints_tell_tokenizers_apart_but_not_places(plain, open_folder, tmp_path):
    tokens = {"tokenizer_config": TOKENS}
    print_of = open_folder(plain(**tokens)).fingerprint()
    assert json.loads(json.dumps(print_of)) == print_of
    assert open_folder(plain(**tokens)).fingerprint() == print_of
    other_eos = open_folder(plain(tokenizer_config={**TOKENS, "eos_token": "<|end|>"}))
    other_pieces = open_folder(write_folder(tmp_path / "other", with_post_processor(), **tokens))
    assert print_of not in (other_eos.fingerprint(), other_pieces.fingerprint())
