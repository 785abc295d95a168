"""Fields of chats beside role and content: what a template and the loss make of them, as transformers does."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.conversations import encode_conversation
from src.extras.generation.completion import encode_prompt
from src.extras.generation.decode import read_prompts
from src.extras.preferences.pairs import PairRows, PairSource
from src.run import resolve_config
from src.system.errors import UserError
from tests.data.one_source import alone, train_batches
from tests.data.test_conversations import CHAT_ML, INSTRUCT, MISTRAL, chat_tokenizer, conversations, learned_text, pair  # noqa: F401
from tests.tiny import BASE

# As Hermes 2's: tools are listed after the system message, a call is JSON in a tag, and each turn ends alike.
CALLING = """{%- if tools is not none or messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
    {%- for tool in tools or [] %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
    {%- if message.content %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function is defined %}
            {%- set call = call.function %}
        {%- endif %}
        {{- '<call>' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}"""
# As Llama 3.1's: bos, roles in headers, a date, and tools in the first question, indented.
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- "<|start|>system<|start|>\\n\\nToday: " + date_string + "<|end|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start|>ipython<|start|>\\n\\n" + (message.content | tojson) + "<|end|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant<|start|>\\n\\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|end|>' }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|start|>\\n\\n" }}
        {%- if loop.first and tools is not none %}
            {%- for tool in tools %}
                {{- tool | tojson(indent=4) + "\\n\\n" }}
            {%- endfor %}
        {%- endif %}
        {{- message.content | trim + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant<|start|>\\n\\n" }}
{%- endif %}"""
# As Qwen 3's: thoughts of earlier questions are left out, and enable_thinking=false writes an empty one to the prompt.
THINKING = """{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|start|>system\\n' + (tools | map('tojson') | join('\\n')) + '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>user\\n<response>' + message.content + '</response><|end|>\\n' }}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' and loop.index0 > last.question %}
            {{- '<think>' + (message.reasoning_content if message.reasoning_content is string else '') + '</think>' }}
        {%- endif %}
        {{- message.content if message.content is string else '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '<call>' + call.function.name + ' ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '</call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""
STYLES = {"calling": CALLING, "headers": HEADERS, "thinking": THINKING}

WEATHER = {"type": "object", "properties": {"city": {"type": "string", "description": "where <é>"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("rain", "wind")]
CALL = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": {"city": "Ulm"}}}
QUESTION, ANSWER = {"role": "user", "content": "rain?"}, {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be brief"}
CALLS = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
    {"role": "tool", "tool_call_id": "c1", "name": "rain", "content": '{"mm": 3}'},
    {"role": "assistant", "content": "3 mm", "reasoning_content": "it says 3", "tool_calls": None},
]
RECORDS = {
    "tools": {"messages": CALLS, "tools": TOOLS},
    "tools in a string": {"messages": CALLS, "tools": json.dumps(TOOLS)},
    "no tools": {"messages": CALLS, "tools": None},
    "an empty list of tools": {"messages": [QUESTION, ANSWER], "tools": []},
    "system": {"messages": [QUESTION, ANSWER], "system": "be brief"},
    "a pair with tools": {**pair("rain?", "yes"), "tools": TOOLS, "system": "be brief"},
    "arguments": {
        "messages": [QUESTION, ANSWER],
        "chat_template_kwargs": {"date_string": "1 May", "bos_token": "<|eos|>"},
    },
    "no thoughts": {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
    "thoughts": {
        "messages": [QUESTION, {**ANSWER, "thinking": "it pours"}, QUESTION, {**ANSWER, "reasoning": "still"}]
    },
}


def theirs(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)


def as_arguments(record):
    """What a user of transformers passes for a record: messages and keywords."""
    messages = record.get("messages") or [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record["completion"]},
    ]
    tools = json.loads(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools")
    before = [{"role": "system", "content": record["system"]}] if "system" in record else []
    return [*before, *messages], {"tools": tools, **record.get("chat_template_kwargs", {})}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("record", RECORDS)
def test_the_text_is_that_of_transformers(conversations, chat_tokenizer, style, record):  # noqa: F811
    tokenizer, folder = chat_tokenizer(STYLES[style])
    messages, keywords = as_arguments(RECORDS[record])
    ids = theirs(folder).apply_chat_template(messages, **keywords)["input_ids"]
    source = conversations(RECORDS[record], tokenizer=tokenizer, sft_train_on_completion_only=False)
    (document,) = encode_conversation(tokenizer, source[0], False)
    assert document.ids.tolist() == ids


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("record", ["tools", "no thoughts"])
def test_a_prompt_is_that_of_transformers(write, config, chat_tokenizer, style, record):  # noqa: F811
    """Of a file of prompts, as of the documents that evaluations complete."""
    tokenizer, folder = chat_tokenizer(STYLES[style])
    messages, keywords = as_arguments(RECORDS[record])
    prompt = {**RECORDS[record], "messages": messages[:-1]}
    expected = theirs(folder).apply_chat_template(messages[:-1], add_generation_prompt=True, **keywords)["input_ids"]
    path = write("prompts.jsonl", json.dumps(prompt))
    decoding = resolve_config.load([BASE, f"prompt_path={path}"]).decoding
    (read,) = read_prompts(decoding, InputSpec.of(config(), tokenizer))
    assert encode_prompt(decoding, 999, tokenizer, read).tolist() == expected


def test_a_prompt_with_tools_is_a_users_and_without_them_a_text(write, config, chat_tokenizer):  # noqa: F811
    tokenizer, folder = chat_tokenizer(CALLING)
    path = write("prompts.jsonl", "\n".join(map(json.dumps, [{"prompt": "a"}, {"prompt": "a", "tools": TOOLS}])))
    decoding = resolve_config.load([BASE, f"prompt_path={path}"]).decoding
    text, chat = read_prompts(decoding, InputSpec.of(config(), tokenizer))
    assert text == "a"
    expected = theirs(folder).apply_chat_template(
        [{"role": "user", "content": "a"}], tools=TOOLS, add_generation_prompt=True
    )["input_ids"]
    assert encode_prompt(decoding, 999, tokenizer, chat).tolist() == expected


@pytest.mark.parametrize("style", STYLES)
def test_a_call_of_a_tool_is_learned_as_the_template_writes_it(conversations, chat_tokenizer, style):  # noqa: F811
    tokenizer, folder = chat_tokenizer(STYLES[style])
    source = conversations(RECORDS["tools"], tokenizer=tokenizer)
    documents = encode_conversation(tokenizer, source[0], True)
    call = {
        "calling": '<call>{"name": "rain", "arguments": {"city": "Ulm"}}</call><|end|>',
        "headers": '{"name": "rain", "parameters": {"city": "Ulm"}}<|end|>',
        "thinking": '<think></think><call>rain {"city": "Ulm"}</call><|end|>',
    }[style]
    said = "<think>it says 3</think>3 mm<|end|>" if style == "thinking" else "3 mm<|end|>"
    assert [text for document in documents for text in learned_text(folder, document)] == [call, said]


LEFT_OUT = [{"weight": 0}, {"train": False}, {"weight": 0, "train": True}]


@pytest.mark.parametrize("fields", LEFT_OUT)
@pytest.mark.parametrize("template", [CHAT_ML, INSTRUCT, MISTRAL])
def test_an_answer_that_is_left_out_is_read_and_not_learned(
    conversations,  # noqa: F811
    chat_tokenizer,  # noqa: F811
    template,
    fields,
):
    tokenizer, folder = chat_tokenizer(template)
    turns = [QUESTION, {**ANSWER, **fields}, QUESTION, {**ANSWER, "content": "no", "weight": 1, "train": True}]
    source = conversations({"messages": turns}, {"messages": [QUESTION, ANSWER, QUESTION, turns[3]]})
    documents = encode_conversation(tokenizer, source[0], True)
    assert [len(learned_text(folder, document)) for document in documents] == [1]
    assert "no" in learned_text(folder, documents[-1])[0]
    whole = encode_conversation(tokenizer, source[1], True)
    assert sum(len(learned_text(folder, document)) for document in whole) == 2
    assert documents[-1].ids.tolist() == whole[-1].ids.tolist()


METADATA = {
    "id": 7,
    "source": "web",
    "url": "https://x/é",
    "tags": ["a"],
    "\x1b]0;name": 1,
    "parallel_tool_calls": True,
}


def test_what_has_no_effect_is_listed_once_and_has_none(conversations, chat_tokenizer, config, capsys):  # noqa: F811
    tokenizer, _ = chat_tokenizer(CHAT_ML)
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "tools": TOOLS}
    noted = [{**message, "id": "m", "name": "n"} for message in CALLS[:1] + CALLS[3:]]
    plain = [CALLS[0], {"role": "assistant", "content": "3 mm"}]
    with_them = [{"messages": noted, **METADATA, **kwargs}] * 3 + [{**pair("a", "b"), "messages": noted}]
    said = "dataset_path: these fields have no effect: "
    names = "completion, enable_thinking, id, name, parallel_tool_calls, prompt, reasoning_content, source, tags, tools"
    source = conversations(*with_them, tokenizer=tokenizer)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(said)
    assert {*line.removeprefix(said).split(", ")} == {*names.split(", "), "url", "\ufffd]0;name"}
    bare = conversations(*[{"messages": plain}] * 4, name="bare.jsonl", tokenizer=tokenizer)
    assert capsys.readouterr().out == ""
    batches = [
        train_batches(config(use_sft=True, vocab_size=300), alone(each), tokenizer, [0, 1], 2)
        for each in (source, bare)
    ]
    for _ in range(4):
        one, other = map(next, batches)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    for each in batches:
        each.close()


WRONG = [
    (
        {"conversations": [{"from": "human", "value": "a"}]},
        '"conversations" is not read here: write all turns in "messages"',
    ),
    ({"functions": [{"name": "a"}]}, '"functions" is not read.*"tools"'),
    ({"documents": [{"text": "a"}]}, '"documents" is not read.*"chat_template_kwargs"'),
    ({"images": ["a.png"]}, '"images" is not read here: write conversations of text only'),
    ({"weight": 0.5}, '"weight" is not read here: .*in messages not to be learned'),
    ({"train": False}, '"train" is not read here: .*in messages not to be learned'),
    ({"tools": {"name": "a"}}, '"tools" as a list'),
    ({"tools": "[{"}, '"tools" as a list'),
    ({"tools": '{"a": 1}'}, '"tools" as a list'),
    ({"chat_template_kwargs": [1]}, '"chat_template_kwargs" as an object'),
    ({"system": ["a"]}, '"system" as a string'),
]
WRONG_IN_MESSAGES = [
    ({"weight": 0.5}, r'"weight" and "train" may be 0 .*: one of the assistant has \[0.5, None\]'),
    ({"train": "no"}, r"one of the assistant has \[None, 'no'\]"),
    (
        {"train_detail": [{"begin_offset": 0}]},
        '"train_detail" is not read here: write "train": false in messages not to be learned',
    ),
    ({"loss": False}, '"loss" is not read here'),
    ({"function_call": {"name": "a"}}, '"function_call" is not read here: write "tools", and "tool_calls"'),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_field_that_other_trainers_heed_is_an_error_everywhere(
    conversations,  # noqa: F811
    config,
    write,
    fields,
    message,
):
    inputs = InputSpec.of(config(), ByteTokenizer())
    with pytest.raises(UserError, match=rf"chat\.jsonl, line 2: .*{message}"):
        conversations(pair("a", "b"), {**pair("a", "b"), **fields})
    answers = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(UserError, match=rf"pairs\.jsonl, line 1: .*{message}"):
        PairSource(str(write("pairs.jsonl", json.dumps({**answers, **fields}))), "dataset_path", inputs)
    path = write("prompts.jsonl", json.dumps({"prompt": "a", **fields}))
    with pytest.raises(UserError, match=rf"prompts\.jsonl, line 1: .*{message}"):
        read_prompts(resolve_config.load([BASE, f"prompt_path={path}"]).decoding, inputs)


@pytest.mark.parametrize(("fields", "message"), WRONG_IN_MESSAGES)
def test_a_field_of_a_message_that_other_trainers_heed_is_an_error(conversations, fields, message):  # noqa: F811
    with pytest.raises(UserError, match=rf"chat\.jsonl, line 1: .*{message}"):
        conversations({"messages": [QUESTION, {**ANSWER, **fields}]})


def test_what_would_be_learned_against_its_field_is_an_error(conversations):  # noqa: F811
    for field, value in (("weight", 1), ("train", True)):
        with pytest.raises(UserError, match=rf"one of the user has .*{value}"):
            conversations({"messages": [{**QUESTION, field: value}, ANSWER]})
        with pytest.raises(UserError, match="there is nothing to learn"):
            conversations({"messages": [QUESTION, {**ANSWER, field: 0}]})
        two = {"messages": [QUESTION, {**ANSWER, field: 0}, ANSWER]}
        with pytest.raises(UserError, match="need sft_train_on_completion_only=true"):
            conversations(two, sft_train_on_completion_only=False)


def test_sharegpt_is_told_what_to_write(conversations):  # noqa: F811
    with pytest.raises(
        UserError,
        match=r'line 1: there is no "prompt": .*"messages".* ShareGPT.*"from" \(human: user, gpt: assistant\)',
    ):
        conversations({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})


def test_pairs_show_their_tools_and_system_and_compare_whole_answers(write, config, chat_tokenizer, capsys):  # noqa: F811
    tokenizer, folder = chat_tokenizer(CALLING)
    inputs = InputSpec.of(config(use_sft=True, max_target_length=1000), tokenizer)
    record = {"prompt": [QUESTION], "chosen": CALLS[1:], "rejected": [ANSWER], "system": "be brief", "tools": TOOLS}
    chat, text = {**record, "score_chosen": 3}, {**record, **{"prompt": "a", "chosen": "b", "rejected": "c"}}
    path = write("pairs.jsonl", "\n".join(map(json.dumps, (chat, text))))
    rows = PairRows(inputs, PairSource(str(path), "dataset_path", inputs))
    assert (
        "dataset_path: these fields have no effect: reasoning_content, score_chosen, tool_call_id\n"
        in capsys.readouterr().out
    )
    expected = [[SYSTEM, QUESTION, *CALLS[1:]], [SYSTEM, QUESTION, ANSWER]]
    for row, conversations_of in ((0, expected), (1, [[SYSTEM, *as_arguments(pair("a", each))[0]] for each in "bc"])):
        for document, messages in zip(rows.row(row), conversations_of, strict=True):
            assert document.ids.tolist() == theirs(folder).apply_chat_template(messages, tools=TOOLS)["input_ids"]
            assert [each.endswith("<|end|>") for each in learned_text(folder, document)] == [True] * (
                2 if len(messages) > 3 else 1
            )
    write("pairs.jsonl", json.dumps({**record, "rejected": [{**ANSWER, "weight": 0}]}))
    with pytest.raises(UserError, match="whole answers are compared"):
        PairSource(str(path), "dataset_path", inputs)
