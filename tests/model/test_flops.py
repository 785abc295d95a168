"""Parameters and operations against published counts and closed forms."""

import pytest
from tiny import BASE, load

from src import config as configuration
from src.model.flops import count_params, flops_per_token
from src.model.spec import model_spec


def published(name):
    return model_spec(configuration.load([BASE, f"model_name={name}"]))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),  # meta-llama/Llama-2-7b-hf
        ("gpt3-125m", 124_439_808 + 1024 * 768),  # openai-community/gpt2, with 2,048 positions in place of 1,024
        # 4096 wide and 32 deep: two tables, then 12 D^2 weights, 9 D biases and 4 D of LayerNorm a layer, the last norm
        ("gpt3-6.7b", (50_257 + 2048) * 4096 + 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096),
    ],
)
def test_published_parameter_counts(name, parameters):
    assert count_params(published(name)) == parameters


def test_base_yml_is_a_model_of_about_1b_at_scale_1_and_of_about_its_scale_above():
    for scale in (1, 2, 4, 8, 16):
        parameters = count_params(model_spec(configuration.load([BASE, f"global_parameter_scale={scale}"])))
        assert 0.8 < parameters / scale / 1.1e9 < 1.25


def test_shared_layers_are_parameters_once_and_operations_each_time():
    once = load(base_num_decoder_layers=1)
    shared = load(base_num_decoder_layers=3, decoder_segments="[{repeats: 3, shared: true, pattern: [{}]}]")
    apart = load(base_num_decoder_layers=3)
    assert count_params(model_spec(shared)) == count_params(model_spec(once))
    assert flops_per_token(model_spec(shared), 16) == flops_per_token(model_spec(apart), 16)


def test_operations_of_llama_2_7b():
    """6 N + 12 L H Q T of PaLM's appendix B, N without the embedding, which is looked up."""
    spec = published("llama2-7b")
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008) + 4096 * 32_000
    flops = flops_per_token(spec, 4096)
    assert flops.palm == 6 * weights + 12 * 32 * 32 * 128 * 4096
    # A causal query sees 1, 2, ... 4096 keys.
    seen = sum(range(1, 4097)) / 4096
    assert flops.causal == 6 * weights + 12 * 32 * 32 * 128 * seen


def test_operations_with_grouped_queries():
    weights = 2 * (32 * 8 * (4 + 2 + 2 + 4) + 32 * 64 * 3) + 32 * 97
    assert flops_per_token(model_spec(load()), 16).palm == 6 * weights + 12 * 2 * 4 * 8 * 16
