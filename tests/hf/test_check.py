"""`python -m src.convert check`: equal weights agree, others do not, and the figures are what they are called."""

import builtins

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from src.extras.hf import convert
from src.extras.hf.convert import agreement, compare
from src.system.errors import UserError


def tiny_llama(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_converted_checkpoint_agrees_and_another_models_does_not(tmp_path, capsys):
    one, other = (tiny_llama(tmp_path / f"hf{seed}", seed) for seed in (0, 1))
    convert.main(["from-hf", str(one), str(tmp_path / "ours")])
    convert.main(["check", str(one), str(tmp_path / "ours")])
    assert "same likeliest id   100.0% of positions" in capsys.readouterr().out
    assert compare(one, tmp_path / "ours" / "checkpoint").largest_difference < 2e-4
    found = compare(other, tmp_path / "ours" / "checkpoint")
    assert found.largest_difference > 1
    assert found.kl_divergence > 0.1
    assert found.top_1 < 0.5


def test_the_figures():
    theirs = np.array([[[0.0, np.log(3.0)], [2.0, 0.0]]])
    ours = np.array([[[np.log(3.0), 0.0], [2.0, 0.0]]])
    found = agreement(ours, theirs)
    assert found.largest_difference == pytest.approx(np.log(3.0) / theirs.std())
    assert found.mean_difference == pytest.approx(np.log(3.0) / theirs.std() / 2)
    # Of (1/4, 3/4) from (3/4, 1/4): half of ln 3; at the other position none; a mean of the two.
    assert found.kl_divergence == pytest.approx(np.log(3.0) / 4, rel=1e-5)
    assert found.top_1 == 0.5


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def no_torch(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(UserError, match=r"No module named .torch.*pip install both"):
        compare(tmp_path, tmp_path)
