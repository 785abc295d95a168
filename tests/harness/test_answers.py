"""What a harness is answered, against transformers' own log-probabilities and texts of the same tiny model."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from src.data.tokenizer import ByteTokenizer
from src.extras.evaluation.answers import Answers, read_keywords, rolling_windows, split_ids
from src.extras.generation.generate import Sampling
from src.extras.generation.loaded_model import load_model
from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer
from src.run.resolve_config import load
from src.system.errors import UserError
from tests.runs import BASE, TINY
from tests.test_scoring import log_probs

T = 32
BYTES = ByteTokenizer()
PAIRS = [
    ("Which colour?", " red"),
    ("Which colour? ", "blue"),  # its space is the continuation's
    ("", "abc"),
    ("a context that does not fit into a row, " * 2, "of which the end is left"),
    ("x", "y" * T),  # no context is left
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """transformers' model, and its folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 257, "bos_token_id": 256}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes, **heads, initializer_range=0.3))
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def answers(reference):
    folder = reference[1]
    keys = {"model_name": folder, "load_parameters_path": folder, "dtype": "float32", "max_target_length": T}
    keys |= {"per_device_batch_size": 1, "ici_data_parallelism": -1, "ici_fsdp_parallelism": 1}
    # The limit of src.decode's prompts has no effect.
    keys |= {"jax_cache_dir": TINY["jax_cache_dir"], "max_prefill_predict_length": 2}
    config = load([BASE, *(f"{key}={value}" for key, value in keys.items())], uses_weights=True)
    plan, weights = load_model(config, BYTES)
    return Answers(config.evaluation, config.batch, config.decoding, plan, weights, BYTES)


def ids_of(text):
    return [256, *text.encode()]


# ---- Log-likelihoods


def test_continuations_have_the_log_probabilities_that_transformers_gives_them(answers, reference):
    answers.truncated = 0
    found = answers.log_likelihoods(PAIRS)
    for (context, continuation), (log_likelihood, _) in zip(PAIRS, found, strict=True):
        counted = len(continuation) + len(context) - len(context.rstrip())
        ids = ids_of(context + continuation)[-(T + 1) :]
        assert log_likelihood == pytest.approx(log_probs(reference[0], ids)[-counted:].sum(), abs=1e-4)
    assert answers.truncated == 2


def test_what_the_model_would_say_is_greedy_and_nothing_else(answers, reference):
    said = answers.completions([("Which colour?", {"max_gen_toks": 6, "until": []})])[0]
    ids = torch.tensor([ids_of("Which colour?")])
    drawn = reference[0].generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
    assert said == BYTES.decode(drawn.numpy())
    greedy = bytes(itertools.takewhile(lambda token: token < 128, drawn.tolist())).decode()
    assert greedy
    pairs = [("Which colour?", greedy), ("Which colour?", greedy[:-1] + "~!"[greedy[-1] == "~"])]
    assert [is_greedy for _, is_greedy in answers.log_likelihoods(pairs)] == [True, False]


def test_a_text_counts_once_in_windows_with_what_context_they_have(answers, reference):
    """As the harness's `LM.loglikelihood_rolling` says; bos, which the tokenizer adds, is predicted after bos."""
    texts = ["short", "a" * (T - 1), "of several windows, the last of which is full too. " * 3, ""]
    expected = []
    for text in texts:
        ids, total = [256, *ids_of(text)], 0.0
        for first in range(1, len(ids), T):
            end = min(first + T, len(ids))
            total += log_probs(reference[0], ids[max(end - T - 1, 0) : end])[-(end - first) :].sum()
        expected.append(total)
    assert answers.rolling_log_likelihoods(texts) == pytest.approx(expected, abs=1e-4)


def test_the_windows_of_the_harness_example():
    """Its docstring's: ten tokens after a prefix, four at a time."""

    class Numbers(ByteTokenizer):
        def encode_default(self, text):
            return np.array([int(digit) for digit in text], np.int32)

    windows = [(ids.tolist(), counted) for ids, counted in rolling_windows(Numbers(), "0123456789", 4)]
    assert windows == [([256, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert list(rolling_windows(Numbers(), "", 4)) == []


@pytest.mark.parametrize(("pair", "counted"), [(("a", ""), 0), (("a", "b" * (T + 1)), T + 1)])
def test_a_continuation_that_can_not_be_scored_is_refused(pair, counted, answers):
    with pytest.raises(UserError, match=f"has {counted} tokens after its context: expected 1 to max_target_length={T}"):
        answers.log_likelihoods([pair])


# ---- Which ids


def words(folder, adds_bos):
    """A tokenizer.json of whole words, whose post-processor adds bos or nothing."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return HuggingFaceTokenizer(folder / "tokenizer.json", 5)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_context_begins_with_bos_where_the_tokenizer_adds_it_and_an_empty_one_always(adds_bos, tmp_path):
    tokenizer, first = words(tmp_path, adds_bos), [0] * adds_bos
    cases = [("a b", " a", [*first, 2, 3, 2], 1), ("", "a b", [0, 2, 3], 2), ("", "<s> a", [0, 2], 1)]
    cases += [("<s> a", " b", [0, 2, 3], 1), (" ", "a", [0, 2], 1)]
    for context, continuation, ids, counted in cases:
        found, of_continuation = split_ids(tokenizer, context, continuation)
        assert (found.tolist(), of_continuation) == (ids, counted)


# ---- Texts


@pytest.mark.parametrize("until", [[], ["e"], "e", ["\n\n", "zz"]])
def test_texts_are_those_of_transformers_up_to_a_stop(until, answers, reference):
    contexts = ["Which colour?", "def f(x):", "a context that is longer than there is room for"]
    answers.truncated = 0
    found = answers.completions([(context, {"until": until, "max_gen_toks": 12}) for context in contexts])
    for context, text in zip(contexts, found, strict=True):
        ids = torch.tensor([ids_of(context)[-(T - 12) :]])
        drawn = reference[0].generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        expected = BYTES.decode(drawn.numpy())
        for stop in [until] if isinstance(until, str) else until:
            expected = expected.split(stop)[0]
        assert text == expected
    assert answers.truncated == 1


@pytest.mark.parametrize("until", [("bc", "ab"), ("ab", "bc"), ("c", "abc", "xa"), ("\n\nQ", "\n"), ("\n", "a\n")])
def test_stops_that_overlap_cut_a_text_as_the_harness_cuts_it(until, answers):
    """A token may bring several at once."""
    utils = pytest.importorskip("lm_eval.models.utils", reason="bash setup.sh eval installs it")
    for text in ("xabc", "xxaba\n\nQ: abc", "no stop"):
        drawn = SimpleNamespace(sampled=[(token, 0.0) for token in text.encode()])
        assert answers._text(drawn, until) == utils.postprocess_generated_text(text, list(until), None)


def test_samples_differ_and_come_again(answers):
    requests = [("a", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8})] * 4
    found = answers.completions(requests)
    assert len(set(found)) > 1
    assert answers.completions(requests) == found


@pytest.mark.parametrize(
    ("keywords", "sampling", "most", "until"),
    [
        ({}, Sampling(0.0, 0, 1.0), 256, ()),
        ({"until": "a", "max_tokens": 3, "max_gen_toks": 5}, Sampling(0.0, 0, 1.0), 5, ("a",)),
        ({"until": ["a", ""], "temperature": 0.5}, Sampling(0.5, 0, 1.0), 256, ("a",)),
        ({"do_sample": False, "temperature": 0.5, "num_beams": 1}, Sampling(0.0, 0, 1.0), 256, ()),
        ({"do_sample": True, "top_k": 3, "top_p": 0.9}, Sampling(1.0, 3, 0.9), 256, ()),
        ({"do_sample": True, "temperature": 0.0, "until": None}, Sampling(0.0, 0, 1.0), 256, ()),
    ],
)
def test_keywords_of_generation(keywords, sampling, most, until):
    assert read_keywords(keywords) == (sampling, most, until)


def test_keywords_that_would_be_ignored_are_refused(answers):
    with pytest.raises(UserError, match=r"num_beams, penalty_alpha is not one of do_sample, temperature, top_k"):
        read_keywords({"num_beams": 4, "penalty_alpha": 0.6, "until": []})
    for keywords in ({"max_gen_toks": 0}, {"max_new_tokens": -1}, {"temperature": -0.5}, {"top_k": -1}, {"top_p": 0.0}):
        with pytest.raises(UserError, match=r"generation_kwargs: .*expected 1 or more"):
            read_keywords(keywords)
    with pytest.raises(UserError, match=f"a task's max_gen_toks=256 leaves no room .* max_target_length={T}"):
        answers.completions([("a", {})])


def test_a_conversation_ends_where_the_model_is_to_go_on(answers):
    class Chat(ByteTokenizer):
        def render_chat(self, messages, add_generation_prompt, now=None):
            turns = "".join(f"[{message['role']}] {message['content'].strip()}[end]" for message in messages)
            return turns + "[assistant]" * add_generation_prompt

    chat = object.__new__(Answers)
    chat.tokenizer = Chat()
    question = {"role": "user", "content": "2 + 2?"}
    assert chat.render_chat([question], True) == "[user] 2 + 2?[end][assistant]"
    prefill = [question, {"role": "assistant", "content": "It is 2 + 2? No, "}]
    assert chat.render_chat(prefill, False) == "[user] 2 + 2?[end][assistant] It is 2 + 2? No,"


def test_a_text_to_continue_that_the_template_changes_is_refused(answers):
    class Chat(ByteTokenizer):
        def render_chat(self, messages, add_generation_prompt, now=None):
            return "".join(message["content"].split("</think>")[-1] for message in messages)

    chat = object.__new__(Answers)
    chat.tokenizer = Chat()
    thought = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>easy</think>It is"}]
    with pytest.raises(
        UserError, match="the chat template changes the text that the model is to continue: <think>easy"
    ):
        chat.render_chat(thought, False)
