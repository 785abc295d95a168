"""Text drawn from a model, against transformers' generation."""

import jax
import numpy as np
import pytest
import torch
from references import llama, llama_tree, random_sizes
from tiny import make

from src.data.tokenizer import ByteTokenizer
from src.decode import encode_prompt, sample
from src.errors import UserError

TOKENIZER = ByteTokenizer()
SETTINGS = {"vocab_size": TOKENIZER.vocab_size, "max_target_length": 32, "prompt": "def ", "sample_length": 20}


def test_at_temperature_zero_the_text_is_that_of_greedy_generation():
    sizes = {**random_sizes(0), **{key: SETTINGS[key] for key in ("vocab_size", "max_target_length")}}
    reference = llama(sizes, tied=False)
    config, plan = make(**{**sizes, **SETTINGS}, decode_sampling_temperature=0)
    parameters = dict(reference.named_parameters())
    text = sample(
        config, plan, parts(plan, llama_tree(lambda name: parameters[name].detach().numpy(), plan)), TOKENIZER
    )

    prompt = torch.tensor(encode_prompt(config, TOKENIZER)[None].astype(np.int64))
    generated = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=TOKENIZER.eos,
        pad_token_id=TOKENIZER.eos,
    )[0].numpy()
    assert text == TOKENIZER.decode(generated)
    assert text.startswith("def ")
    assert len(set(generated[5:])) > 3


def parts(plan, weights):
    return tuple(plan.by_part(weights).values())


def weights_that_favour(plan, tokens):
    """Logits of 30 for these tokens whatever came before, and of 0 for others."""
    weights = jax.tree.map(lambda weight: np.zeros(weight.shape, weight.dtype), plan.shapes)
    weights["embedding"][:] = 1.0
    weights["final_norm"]["scale"][:] = 1.0
    weights["output"][:, tokens] = 30.0 / plan.spec.emb_dim
    return weights


def test_the_text_ends_where_the_document_does():
    config, plan = make(**SETTINGS)
    assert sample(config, plan, parts(plan, weights_that_favour(plan, [TOKENIZER.eos])), TOKENIZER) == "def "


def test_at_a_temperature_likely_tokens_are_drawn_each_by_its_share_on_any_mesh():
    texts = []
    settings = {**SETTINGS, "max_target_length": 256, "sample_length": 250, "decode_sampling_temperature": 1.0}
    for devices in (1, 8):
        config, plan = make(devices, **settings)
        texts.append(sample(config, plan, parts(plan, weights_that_favour(plan, [ord("a"), ord("b")])), TOKENIZER))
    assert texts[0] == texts[1]
    drawn = texts[0].removeprefix("def ")
    assert set(drawn) == {"a", "b"}
    assert abs(drawn.count("a") - 125) < 40  # five standard deviations


def test_a_prompt_that_leaves_no_room_is_an_error():
    config, _ = make(**{**SETTINGS, "sample_length": 28})
    with pytest.raises(UserError, match="prompt's 5 tokens and sample_length=28 are more than max_target_length=32"):
        encode_prompt(config, TOKENIZER)
