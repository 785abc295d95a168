"""Every family's logits, gradients and cached decoding equal those of transformers, from the files it saves."""

import functools

import jax
import numpy as np
import pytest
import torch

from tests.model.families import (
    BUFFERS,
    CONFIGS,
    LENGTH,
    greedy,
    logits_of,
    plan_of,
    reference,
    routing_gaps,
    weights_of,
)
from tests.tiny import assert_close

MESH = {"devices": 8, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
UNROLLED = {"scan_layers": "false"}
# Each config as it is; a pattern, rings and latents unrolled too; and experts, groups and latents on a mesh.
RUNS = {
    **{name: (name, {}) for name in CONFIGS},
    **{f"{name}-unrolled": (name, UNROLLED) for name in ("gemma3", "deepseek3")},
    **{f"{name}-mesh": (name, MESH) for name in ("mixtral", "deepseek3", "qwen3-next", "gemma4")},
}
# What another run has too: latents and experts otherwise chosen, biases, and the facts of families that differ in
# little. Unrolled layers: tests/test_decode.py; experts and latents on a mesh: test_expert_axis.py.
LONG = (
    *("mixtral-mesh", "deepseek3-mesh", "deepseek3-unrolled", "gemma3-unrolled", "deepseek2-lite", "llama4-maverick"),
    *("qwen3-next-mesh", "gemma4-mesh", "gemma4-values", "llama-biases", "mistral-small3", "phi3", "glm", "kimi-k2"),
)
# Decoded on a mesh and unrolled: tests/test_decode.py. The rest as families with more in their caches: of Llama 3.1, of
# Gemma 3 and GPT-OSS, which have windows and experts too, and of DeepSeek 3.
LONG_DECODED = (
    *(*LONG, "qwen2", "smollm3", "granite", "glm4", "glm4.5", "llama2", "gemma", "mistral", "qwen3"),
    *("gemma2", "mixtral", "qwen3-moe", "deepseek2", "olmo2", "olmo3"),
)
# tests/hf/test_config_entries.py compares each family's logits, of one document without packing. With packing the
# families that are not here have what positions and segments go into: windows, chunks, latents, experts, recurrence.
LONG_LOGITS = tuple(name for name in LONG_DECODED if name != "gemma2")


def runs(names, long=LONG):
    """The names of runs for a test's parameters, some of them marked as long."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


# Four texts: three fill a row each, the last row is packed with two documents of these lengths and padding.
DOCUMENTS = (15, 10)
PROMPTS, STEPS = (9, 3, 14, 1), 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A config's name -> transformers' model and the folder it is saved in."""

    @functools.cache
    def save(name):
        model, folder = reference(name), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture(scope="module")
def loaded(saved):
    """A run's name -> transformers' model, and the plan and the weights of the same model here."""

    @functools.cache
    def load(run):
        name, settings = RUNS[run]
        model, folder = saved(name)
        plan = plan_of(folder, **settings)
        return model, plan, weights_of(folder, plan)

    return load


def rows(vocab_size):
    """Tokens, segments and positions of the four rows, [4, LENGTH] each."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (4, LENGTH))
    segment_ids, positions = np.ones_like(tokens), np.tile(np.arange(LENGTH), (4, 1))
    segment_ids[-1], positions[-1] = 0, 0
    for index, (start, end) in enumerate(document_places(), start=1):
        segment_ids[-1, start:end], positions[-1, start:end] = index, np.arange(end - start)
    return tokens, segment_ids, positions


def document_places():
    ends = np.cumsum(DOCUMENTS)
    return list(zip(ends - DOCUMENTS, ends, strict=True))


def expected_logits(model, tokens):
    """transformers' logits of the rows: of the last one's documents each by itself, and none of its padding."""
    rows = [model(torch.tensor(tokens[:-1])).logits.reshape(-1, model.config.vocab_size)]
    rows += [model(torch.tensor(tokens[-1:, start:end])).logits[0] for start, end in document_places()]
    return torch.cat(rows)


def real(logits_BTV):
    """The same of ours, [tokens, V]."""
    return logits_BTV.reshape(-1, logits_BTV.shape[-1])[: 3 * LENGTH + sum(DOCUMENTS)]


def assert_equal_to(expected, actual, tolerance):
    """To this many standard deviations of the logits, at every position."""
    assert actual.shape == expected.shape
    assert np.max(np.abs(actual - expected)) <= tolerance * np.std(expected)


@pytest.mark.parametrize("run", runs(RUNS, LONG_LOGITS))
def test_logits(loaded, run):
    model, plan, weights = loaded(run)
    batch = rows(model.config.vocab_size)
    with torch.no_grad(), routing_gaps() as gaps:
        expected = expected_logits(model, batch[0]).numpy()
    assert min(gaps, default=1.0) > 1e-4, "choose another seed"
    logits = jax.jit(functools.partial(logits_of, plan))(weights, *batch)
    assert_equal_to(expected, real(np.asarray(logits)), 2e-4)


@pytest.mark.parametrize("run", runs(RUNS, LONG_DECODED))
def test_cached_decoding(loaded, run):
    """Past windows, chunks and the length before positions were stretched; prompts of different lengths together."""
    model, plan, weights = loaded(run)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, length) for length in PROMPTS]
    tokens, logits = greedy(plan, weights, prompts, STEPS)
    for prompt, row_tokens, row_logits in zip(prompts, tokens, logits, strict=True):
        text = np.concatenate([prompt, row_tokens[:-1]])
        with torch.no_grad(), routing_gaps() as gaps:
            expected = model(torch.tensor(text[None])).logits[0, len(prompt) - 1 :].numpy()
        assert min(gaps, default=1.0) > 1e-5, "choose another seed"
        assert_equal_to(expected, row_logits, 1e-4)
        assert list(row_tokens) == list(np.argmax(expected, axis=-1))


@pytest.mark.parametrize(
    "name",
    [
        *("gpt3", "gemma2", "deepseek3"),
        # Sinks' gradients: test_kernels.py.
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("gpt-oss", "llama-biases", "llama4-scout", "mixtral", "qwen3-next", "gemma4")
        ),
    ],
)
def test_gradients(loaded, name, tmp_path):
    """Of a random linear function of the logits; transformers' are saved in the weights' place and read as they are."""
    model, plan, weights = loaded(name)
    batch = rows(model.config.vocab_size)
    size = (3 * LENGTH + sum(DOCUMENTS), model.config.vocab_size)
    direction = np.random.default_rng(2).normal(size=size).astype(np.float32)
    model.zero_grad()
    (expected_logits(model, batch[0]) * torch.tensor(direction)).sum().backward()
    gradients = reference(name)
    with torch.no_grad():
        for theirs, weight in zip(gradients.parameters(), model.parameters(), strict=True):
            theirs.copy_(weight.grad)
        for path, buffer in gradients.named_buffers():
            if path.endswith(BUFFERS):
                buffer.zero_()
    gradients.save_pretrained(tmp_path)

    linear = jax.grad(lambda weights: (real(logits_of(plan, weights, *batch)) * direction).sum())
    assert_close(jax.jit(linear)(weights), weights_of(tmp_path, plan), 1e-4)
