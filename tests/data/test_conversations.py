"""Finetuning data: what is read, which tokens count in the loss, and how that travels through rows."""

import datetime
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from src.data.rules import PRESENT_RULES
from src.data.tokenizer import ByteTokenizer
from src.data.types import EvalSet, InputSpec
from src.extras.conversations import ConversationSource, encode_conversation
from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer
from src.system.errors import UserError
from tests.data.one_source import alone, data_fingerprint, eval_batches, held_out, open_sources, train_batches

B = 4
SPECIALS = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
CHAT_ML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# As Llama 2's: no token opens the assistant's turn, and eos closes it.
INSTRUCT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[I] ' + message['content'] + ' [/I]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
# As Qwen 3's: thoughts are written in the turns after the last question alone, and are empty where there is none.
QWEN = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.index0 > last.user %}{{ '<think>' + (parts[0].split('<think>')[-1] if parts|length > 1 else '') }}"
    "{{ '</think>' }}{% endif %}{{ parts[-1] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# As Mistral's (v3): the system message stands in the question that comes last, and in none once it has an answer.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[I] ' + system + '\n\n' + m.content + '[/I]' }}"
    "{% else %}{{ '[I] ' + m.content + '[/I]' }}{% endif %}"
    "{% else %}{% generation %}{{ ' ' + m.content|trim + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
THOUGHTS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>greet</think>hello"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>again?</think>hello"},
    {"role": "assistant", "content": "bye"},
]
# As Qwen 3's with an empty thought before the last answer alone.
THINKING = CHAT_ML.replace("{% generation %}", "{% generation %}{% if loop.last %}<think></think>{% endif %}")
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " it's  héé\n\n"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """Bytes as ids 4 to 259 after the special tokens, with a template; spans leave out spaces, as in Llama 3's file."""

    def make(template, stop_ids=(1, 3)):
        folder = tmp_path_factory.mktemp("hf")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: n for n, token in enumerate([*SPECIALS, *alphabet, "Ġi"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "i")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIALS)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stop_ids)}))
        return HuggingFaceTokenizer(folder / "tokenizer.json", 261), folder

    return make


@pytest.fixture
def conversations(config, write):
    """A source of lines, for a run with this tokenizer, these rules of data and these keys."""

    def make(*records, name="chat.jsonl", tokenizer=None, rules=PRESENT_RULES, **keys):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        inputs = InputSpec.of(config(**keys), tokenizer, rules)
        return ConversationSource(str(write(name, "\n".join(lines))), "dataset_path", inputs)

    return make


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def learned_text(folder, document):
    """The runs of tokens that count, special tokens and all."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs = itertools.groupby(zip(document.ids, document.loss_mask, strict=True), key=lambda each: each[1])
    return [
        tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=False)
        for learned, run in runs
        if learned
    ]


def test_a_pair_without_a_template_is_bos_prompt_completion_eos(conversations):
    source = conversations(pair("ab", "cd"), {"prompt": "", "response": "é"})
    (document,) = encode_conversation(ByteTokenizer(), source[0], True)
    assert document.ids.dtype == np.int32
    assert document.ids.tolist() == [256, *b"abcd", 257]
    assert document.loss_mask.tolist() == [False, False, False, True, True, True]
    (document,) = encode_conversation(ByteTokenizer(), source[1], True)
    assert document.ids.tolist() == [256, *"é".encode(), 257]
    assert document.loss_mask.tolist() == [False, True, True, True]
    assert encode_conversation(ByteTokenizer(), source[0], False)[0].loss_mask is None


def test_a_pair_that_spells_bos_and_eos_has_each_once(conversations, chat_tokenizer):
    tokenizer, _ = chat_tokenizer(None)
    source = conversations(pair("ab", "cd"), pair("<|bos|>ab", "cd<|eos|>"), tokenizer=tokenizer)
    (one,), (other,) = (encode_conversation(tokenizer, each, True) for each in (source[0], source[1]))
    assert one.ids.tolist() == other.ids.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_a_pair_with_a_template_is_a_user_and_an_assistant(conversations, chat_tokenizer):
    tokenizer, folder = chat_tokenizer(CHAT_ML)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    source = conversations(pair("ab", "cd"), {"messages": messages})
    (first,), (second,) = (encode_conversation(tokenizer, source[i], True) for i in range(2))
    assert first.ids.tolist() == second.ids.tolist()
    assert learned_text(folder, first) == learned_text(folder, second) == ["cd<|end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (CHAT_ML, TURNS, [" it's  héé\n\n<|end|>", "no<|end|>"]),
        (CHAT_ML, TURNS[1:4], [" it's  héé\n\n<|end|>"]),
        (INSTRUCT, TURNS[1:], ["  it's  héé\n\n <|eos|>", " no <|eos|>"]),
        (THINKING, TURNS[:3], ["<think></think> it's  héé\n\n<|end|>"]),
    ],
)
def test_what_counts_is_what_transformers_marks_between_generation_tags(
    conversations, chat_tokenizer, template, messages, said
):
    tokenizer, folder = chat_tokenizer(template)
    (document,) = encode_conversation(tokenizer, conversations({"messages": messages})[0], True)
    assert learned_text(folder, document) == said
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    untrimmed = Tokenizer.from_file(str(folder / "tokenizer.json"))
    untrimmed.post_processor = processors.ByteLevel(trim_offsets=False)  # else transformers finds no token at a space
    theirs = PreTrainedTokenizerFast(tokenizer_object=untrimmed, **settings).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    assert document.ids.tolist() == theirs["input_ids"]
    assert document.loss_mask.tolist() == [bool(mark) for mark in theirs["assistant_masks"]]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (QWEN, THOUGHTS[:5], ["<think>greet</think>hello<|end|>", "<think>again?</think>hello<|end|>"]),
        (QWEN, THOUGHTS[1:], ["<think>greet</think>hello<|end|>", "<think>again?</think>hello<|end|>", None]),
        (MISTRAL, TURNS, [" it's  héé<|eos|>", " no<|eos|>"]),
        (MISTRAL, TURNS[:3], [" it's  héé<|eos|>"]),
        (THINKING, TURNS, ["<think></think> it's  héé\n\n<|end|>", "<think></think>no<|end|>"]),
    ],
)
def test_a_template_that_rewrites_earlier_turns_gives_each_turn_an_example(
    conversations, chat_tokenizer, template, messages, said
):
    """An example is what transformers gives the model for the turn, and what it then marks as the assistant's."""
    tokenizer, folder = chat_tokenizer(template)
    documents = encode_conversation(tokenizer, conversations({"messages": messages})[0], True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    untrimmed = Tokenizer.from_file(str(folder / "tokenizer.json"))
    untrimmed.post_processor = processors.ByteLevel(trim_offsets=False)
    theirs = PreTrainedTokenizerFast(tokenizer_object=untrimmed, **settings)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(documents) == len(turns) == len(said)
    for document, turn, text in zip(documents, turns, said, strict=True):
        prompt = theirs.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=True)["input_ids"]
        marked = theirs.apply_chat_template(messages[: turn + 1], return_assistant_tokens_mask=True, return_dict=True)
        marks = np.array(marked["assistant_masks"], bool)
        begin = np.flatnonzero(np.diff(marks, prepend=False) & marks)[-1]  # of the last turn that is marked
        assert document.ids[: len(prompt)].tolist() == prompt
        assert not document.loss_mask[: len(prompt)].any()
        said_ids = np.array(marked["input_ids"])[begin:][marks[begin:]]
        assert document.ids[document.loss_mask].tolist() == said_ids.tolist()
        assert text is None or learned_text(folder, document) == [text]


def test_examples_of_a_conversation_are_whole_in_rows_of_their_own_segments(config, conversations, chat_tokenizer):
    tokenizer, _ = chat_tokenizer(QWEN)
    source = conversations(*({"messages": THOUGHTS[:5]} for _ in range(6)), {"messages": THOUGHTS[:3]})
    examples = encode_conversation(tokenizer, source[0], True) + encode_conversation(tokenizer, source[6], True)
    expected = Counter()
    for document in examples:
        pairs = tuple(zip(document.ids[:-1].tolist(), document.loss_mask[1:].tolist(), strict=True))
        expected[pairs] += 6 if document.ids.tolist() != examples[-1].ids.tolist() else 0
    expected[tuple(zip(examples[-1].ids[:-1].tolist(), examples[-1].loss_mask[1:].tolist(), strict=True))] = 7
    for keys in ({"max_target_length": 300}, {"max_target_length": 120}, {"packing": False, "max_target_length": 120}):
        found = Counter()
        for batch in eval_batches(sft(config, vocab_size=300, **keys), held_out(source), tokenizer, range(2), 2):
            for row in range(2):
                for name in range(1, batch["segment_ids"][row].max() + 1):
                    here = batch["segment_ids"][row] == name
                    learned = batch["loss_mask"][row][here] == 1
                    found[tuple(zip(batch["tokens"][row][here].tolist(), learned.tolist(), strict=True))] += 1
        assert found == expected
    with pytest.raises(UserError, match=r"rewrites earlier turns.*long_documents=truncate has room for one"):
        list(
            eval_batches(
                sft(config, vocab_size=300, packing=False, long_documents="truncate", max_target_length=120),
                *(held_out(source), tokenizer, range(2), 2),
            )
        )


def test_all_tokens_count_where_the_user_says_so(conversations, chat_tokenizer):
    tokenizer, _ = chat_tokenizer(CHAT_ML)
    source = conversations({"messages": TURNS})
    (whole,), (part,) = (encode_conversation(tokenizer, source[0], only) for only in (False, True))
    assert whole.loss_mask is None
    assert whole.ids.tolist() == part.ids.tolist()


def test_without_the_end_of_turn_among_the_stop_ids_the_turn_counts_to_its_last_character(
    conversations, chat_tokenizer
):
    tokenizer, folder = chat_tokenizer(CHAT_ML, stop_ids=(1,))
    (document,) = encode_conversation(tokenizer, conversations(pair("a", "b"))[0], True)
    assert learned_text(folder, document) == ["b<|end|>\n"]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHAT_ML.replace("['content'] + '<|end|>' }}{% endgen", "['content'] + '<|end|> more' }}{% endgen"), TURNS),
        (CHAT_ML.replace("add_generation_prompt", "true"), TURNS),  # a prompt where none was asked for
        (CHAT_ML.replace("add_generation_prompt", "true"), TURNS[:3]),
        (CHAT_ML.replace("<|start|>assistant\n' }}{% endif", "<|start|>think\n' }}{% endif"), TURNS),  # another prompt
        ("{{ messages[0].content }}", TURNS),  # the answer is not written at all
    ],
)
def test_a_template_that_does_not_show_the_turns_is_an_error(conversations, chat_tokenizer, template, messages):
    tokenizer, _ = chat_tokenizer(template)
    source = conversations(pair("a", "b"), {"messages": messages})
    with pytest.raises(
        UserError, match=r"chat\.jsonl, line 2: the tokenizer's chat template.*(message 3|after the tok)"
    ):
        encode_conversation(tokenizer, source[1], True)
    assert encode_conversation(tokenizer, source[1], False)[0].loss_mask is None


def test_a_template_that_refuses_names_the_line(conversations, chat_tokenizer):
    tokenizer, _ = chat_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"chat\.jsonl, line 1: .*roles must alternate"):
        encode_conversation(tokenizer, conversations({"messages": TURNS})[0], True)


def test_messages_without_a_template_are_an_error(conversations):
    source = conversations({"messages": TURNS})
    for completion_only in (True, False):
        with pytest.raises(UserError, match=r"chat\.jsonl, line 1: .*tokenizer_type=huggingface.*tokenizer_path"):
            encode_conversation(ByteTokenizer(), source[0], completion_only)


def test_other_fields_of_a_message_reach_the_template(conversations, chat_tokenizer):
    tokenizer, _ = chat_tokenizer("{% for m in messages %}{{ m.content + (m.name or '') }}{% endfor %}")
    source = conversations({"messages": [{"role": "assistant", "content": "a", "name": "b"}], "id": 7})
    assert tokenizer.decode(encode_conversation(tokenizer, source[0], False)[0].ids) == "ab"


def test_a_template_that_asks_for_the_date_writes_the_same_data_on_every_day(conversations, chat_tokenizer):
    dated = "{{ strftime_now('%d %b %Y') }}" + CHAT_ML
    tokenizer, _ = chat_tokenizer(dated)
    source = conversations({"messages": TURNS})
    for completion_only in (True, False):
        (document,) = encode_conversation(tokenizer, source[0], completion_only)
        assert tokenizer.decode(document.ids).startswith("26 Jul 2024")
    assert tokenizer.render_chat(TURNS, False).startswith(f"{datetime.date.today():%d %b %Y}")


def test_a_surrogate_without_its_pair_is_replaced(conversations):
    assert conversations(r'{"prompt": "a\ud800", "completion": "b"}')[0].messages[0]["content"] == "a?"


def role(name, content="x"):
    return {"messages": [{"role": "user", "content": "x"}, {"role": name, "content": content}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (role("human"), "message 2 has the role 'human': expected one of system, user, assistant, tool"),
        (role(["user"]), r"message 2 has the role \['user'\]"),
        ({"messages": [{"content": "x"}]}, 'message 1 has no "role"'),
        ({"messages": [{"role": "assistant"}]}, 'message 1 has no "content"'),
        (role("assistant", None), 'message 2 has no "content"'),
        (role("user", [{"type": "text", "text": "x"}]), r'message 2 has "content": \[{"type".*, expected a string'),
        ({"messages": ["x"]}, "message 1 is not an object"),
        ({"messages": "x"}, '"messages" is not a list'),
        (role("user"), "no message of the assistant counts"),
        ({"messages": []}, "no message of the assistant counts"),
        (role("assistant", " \n"), "message 2, of the assistant, is empty"),
        (pair("a", ""), '"completion" is empty'),
        ({"prompt": "a", "response": " "}, '"response" is empty'),
        ({"prompt": "a"}, 'there is no "completion": expected .*"messages"'),
        ({"completion": "a"}, 'there is no "prompt"'),
        ({"text": "a"}, 'there is no "prompt"'),
        (pair(3, "a"), '"prompt" is not a string'),
        ([1, 2], 'expected .*"prompt"'),
        ("{not json}", "not JSON"),
    ],
)
def test_an_unfit_line_is_an_error_at_the_start_with_its_number(conversations, record, message):
    with pytest.raises(UserError, match=r"chat\.jsonl, line 4: .*" + message):
        conversations(pair("a", "b"), "", pair("c", "d"), record, pair("e", "f"))


def test_files_without_conversations_are_an_error(conversations):
    with pytest.raises(UserError, match="no document"):
        conversations(name="empty.jsonl")
    with pytest.raises(UserError, match=r"chat\.txt is a JSON object, which is read as a line of a file .* \.jsonl"):
        conversations(pair("a", "b"), name="chat.txt")
    with pytest.raises(UserError, match=r"dataset_path: .*chat\.txt is not a \.jsonl file"):
        conversations("text", name="chat.txt")


# ---- Through rows


def sft(config, **changes):
    return config(**{"use_sft": True, "max_target_length": 8, **changes})


def take(config, source, rows, steps, position=None):
    batches = train_batches(config, alone(source), ByteTokenizer(), rows, B, position=position)
    taken = list(itertools.islice(batches, steps))
    batches.close()
    return taken


def test_rows_of_a_hand_computed_layout(config, conversations):
    source = conversations(pair("abc", "defghij"))  # b a b c d e f g h i j e: 11 pairs, the last 8 count
    bos, eos = 256, 257
    for packing in (True, False):
        batches = take(sft(config, packing=packing), source, [0], 2)
        assert [batch["tokens"][0].tolist() for batch in batches] == [[bos, *b"abcdefg"], [*b"hij", 0, 0, 0, 0, 0]]
        assert [batch["targets"][0].tolist() for batch in batches] == [[*b"abcdefgh"], [*b"ij", eos, 0, 0, 0, 0, 0]]
        masks = [batch["loss_mask"][0].tolist() for batch in batches]
        assert masks == [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]]
        assert [batch["segment_ids"][0].tolist() for batch in batches] == [[1] * 8, [1] * 3 + [0] * 5]
    everything = take(sft(config, sft_train_on_completion_only=False), source, [0], 2)
    assert all((batch["loss_mask"] == (batch["segment_ids"] > 0)).all() for batch in everything)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=4, max_size=40),
    length=st.integers(4, 24),
    stops=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_packed_conversations_are_the_same_however_often_a_run_stops_and_on_however_many_hosts(
    config, tmp_path_factory, sizes, length, stops
):
    file = tmp_path_factory.mktemp("data") / "chat.jsonl"
    file.write_text("\n".join(json.dumps(pair("p" * prompt, "c" * answer)) for prompt, answer in sizes))
    run = sft(config, max_target_length=length)
    source = ConversationSource(str(file), "dataset_path", InputSpec.of(run, ByteTokenizer()))
    assume(sum(prompt + answer + 1 for prompt, answer in sizes) >= length)
    expected = take(run, source, range(B), sum(steps for _, steps in stops))
    position, made = None, []
    for hosts, steps in stops:
        parts = [
            take(run, source, rows, steps, None if position is None else position[rows])
            for rows in np.split(np.arange(B), hosts)
        ]
        made += [
            {name: np.concatenate([part[k][name] for part in parts]) for name in parts[0][k]} for k in range(steps)
        ]
        position = made[-1]["data_position"] if made else None
    for batch, other in zip(made, expected, strict=True):
        assert all(batch[name].tobytes() == other[name].tobytes() for name in other)
    for batch in expected:
        begins = np.diff(batch["segment_ids"], prepend=0) > 0
        assert (batch["positions"][begins] == 0).all()
        fits = {prompt + answer + 1 for prompt, answer in sizes if prompt + answer + 1 <= length}
        if all(prompt + answer + 1 <= length for prompt, answer in sizes):
            assert (batch["tokens"][begins] == ByteTokenizer.bos).all()
            lengths = [np.bincount(row)[1:] for row in batch["segment_ids"]]
            assert set(np.concatenate(lengths).tolist()) <= fits


@pytest.fixture
def many(conversations):
    """Pairs whose completions are upper-case words, each another, and whose prompts are lower-case."""
    return conversations(*(pair("p" * (n % 7), chr(65 + n) * (1 + n % 11)) for n in range(23)))


def counted(batches):
    """How often each character is a target that counts."""
    targets = np.concatenate([batch["targets"][batch["loss_mask"] == 1] for batch in batches])
    return Counter(targets.tolist())


def expected(epochs):
    """Each completion's bytes and an eos for it, and not one byte of a prompt."""
    return Counter({**{65 + n: epochs * (1 + n % 11) for n in range(23)}, ByteTokenizer.eos: epochs * 23})


@pytest.mark.parametrize("packing", [True, False])
def test_one_epoch_of_evaluation_counts_each_completion_once(config, many, packing):
    for rows in (1, 3, 8):
        evaluation = eval_batches(sft(config, packing=packing), held_out(many), ByteTokenizer(), range(rows), rows)
        assert counted(evaluation) == expected(1)


@pytest.mark.parametrize("packing", [True, False])
def test_hosts_and_resuming_change_no_mask(config, many, packing):
    settings = sft(config, packing=packing)
    whole = take(settings, many, range(B), 12)
    first = take(settings, many, range(B), 5)
    halves = [take(settings, many, rows, 7, first[-1]["data_position"][rows]) for rows in ([0, 1], [2, 3])]
    for k, batch in enumerate(whole):
        for name, array in batch.items():
            other = first[k][name] if k < 5 else np.concatenate([half[k - 5][name] for half in halves])
            assert array.tobytes() == other.tobytes(), name


def test_a_rolling_evaluation_knows_the_positions_of_all_hosts(config, many, monkeypatch):
    found = []
    monkeypatch.setattr("src.data.eval_batches.max_over_hosts", lambda streams: found.append(streams) or streams)
    settings = sft(config, eval_mode="rolling", eval_steps=2, max_target_length=20)
    for rows in (range(B), [0, 1], [2, 3]):
        evaluation = eval_batches(settings, EvalSet("", many, 2), ByteTokenizer(), rows, B)
        list(evaluation)
        evaluation.position()
    whole, *hosts = found
    assert (whole[:, 1] < 0).any()  # something is placed out of order
    assert np.max(hosts, axis=0).tolist() == whole.tolist()


def test_conversations_are_not_cut_and_split_whole(config, write):
    path = write("long.jsonl", "\n".join(json.dumps(pair("a" * 500, f"{n}" * 500)) for n in range(20)))
    data, (evaluation,) = open_sources(sft(config, dataset_path=str(path), max_document_bytes=64), ByteTokenizer())
    parts = (data.sources[0], evaluation.source)
    assert sum(map(len, parts)) == 20
    assert min(map(len, parts)) >= 1
    sizes = {len(encode_conversation(ByteTokenizer(), part[0], True)[0].ids) for part in parts}
    assert min(sizes) >= 1002


def test_the_fingerprint_tells_masks_and_templates_apart(config, many, chat_tokenizer):
    def prints(settings, tokenizer):
        return data_fingerprint(settings, alone(many), tokenizer, B)

    first, second = chat_tokenizer(CHAT_ML)[0], chat_tokenizer(INSTRUCT)[0]
    one, other = prints(sft(config), first), prints(sft(config), second)
    assert json.loads(json.dumps(one)) == one
    assert {name for name in one if one[name] != other[name]} == {"chat template"}
    all_tokens = prints(sft(config, sft_train_on_completion_only=False), first)
    assert {name for name in one if one[name] != all_tokens[name]} == {"sft_train_on_completion_only"}
    assert not {"chat template", "sft_train_on_completion_only"} & prints(config(), first).keys()
    # A run from before conversations were kept whole in rows is not gone on with in silence.
    assert one["packing of conversations"] == "whole"
    assert "packing of conversations" not in prints(sft(config, packing=False), first)
