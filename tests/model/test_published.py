"""The files of configs/models describe the published models: parameters, active parameters, and every other fact.

Nothing here allocates a weight. Counts are exact: those of transformers' model of the published config.json, built on
torch's meta device. A router's correction bias and a layer's scalar, which transformers keeps as buffers, count on
both sides.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from src.config.schema import Config
from src.extras.hf.families import FAMILIES
from src.model.flops import count_active_params, count_params
from src.run import resolve_config
from tests.model.families import BUFFERS
from tests.model.published import PUBLISHED
from tests.tiny import BASE, spec_of

# Of each size of GPT-3: layers, D, heads, head size (arXiv:2005.14165, table 2.1), parameters in millions (table D.1).
# The 1.3B's heads and the 13B's width are those that fit together; in table 2.1 they do not.
GPT3 = {
    "gpt3-125m": (12, 768, 12, 64, 125),
    "gpt3-350m": (24, 1024, 16, 64, 356),
    "gpt3-760m": (24, 1536, 16, 96, 760),
    "gpt3-1.3b": (24, 2048, 16, 128, 1_320),
    "gpt3-2.7b": (32, 2560, 32, 80, 2_650),
    "gpt3-6.7b": (32, 4096, 32, 128, 6_660),
    "gpt3-13b": (40, 5120, 40, 128, 12_850),
    "gpt3-175b": (96, 12_288, 96, 128, 174_600),
}

# Billions of active parameters as papers and model cards give them, with the decimals they give, and whether they count
# the embedding, which is looked up.
ACTIVE = {
    "llama4-17b-16e": (17, 0, True),  # huggingface.co/meta-llama/Llama-4-Scout-17B-16E
    "llama4-17b-128e": (17, 0, True),
    "mixtral-8x7b": (12.9, 1, True),  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": (39, 0, True),  # mistral.ai/news/mixtral-8x22b
    "deepseek2-16b": (2.4, 1, False),  # arXiv:2405.04434, appendix B
    "deepseek2-236b": (21, 0, False),
    "deepseek3-671b": (36.6, 1, False),  # huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md
    "qwen3-30b-a3b": (3.3, 1, True),  # huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": (22, 0, True),
    "qwen3-next-80b-a3b": (3, 0, False),  # huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct
    "gpt-oss-20b": (3.61, 2, False),  # arXiv:2508.10925, table 1
    "gpt-oss-120b": (5.13, 2, False),
}


def published(name, **overrides):
    """The spec of configs/models/NAME.yml."""
    return spec_of(resolve_config.load([BASE, f"model_name={name}", *(f"{k}={v}" for k, v in overrides.items())]))


def test_every_model_file_is_tested():
    files = {path.stem for path in (Path(BASE).parent / "models").glob("*.yml")}
    known = PUBLISHED.keys() | GPT3.keys()
    assert files == known, f"in one of configs/models and PUBLISHED (tests/model/published.py) alone: {files ^ known}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED[name]))
    buffers = [buffer for path, buffer in model.named_buffers() if path.endswith(BUFFERS)]
    assert count_params(published(name)) == sum(weight.numel() for weight in [*model.parameters(), *buffers])


@pytest.mark.parametrize("name", PUBLISHED)
def test_facts_are_those_of_config_json(name):
    """All facts, layer by layer: windows, positions, caps, norms, experts."""
    config_json = PUBLISHED[name]
    family = next(family for family in FAMILIES if family.model_type == config_json["model_type"])
    predicted = config_json.get("num_nextn_predict_layers", 0)  # The file leaves these out of training by default.
    expected = spec_of(Config.of(family.read_config(config_json)))
    assert published(name, mtp_num_layers=predicted) == expected


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_has_the_papers_sizes(name):
    layers, D, heads, head_dim, millions = GPT3[name]
    spec = published(name)
    sizes = {(layer.num_query_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers}
    assert (len(spec.layers), spec.emb_dim) == (layers, D)
    assert sizes == {(heads, heads, head_dim)}
    # Two tables; a layer's 12 D^2 weights, 9 D biases and 4 D of LayerNorm; the last LayerNorm.
    parameters = count_params(spec)
    assert parameters == (50_257 + 2048) * D + layers * (12 * D**2 + 13 * D) + 2 * D
    assert parameters == pytest.approx(millions * 1e6, rel=5e-3)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_figure(name):
    """To its last decimal, which some papers round and some cut."""
    billions, decimals, counts_embedding = ACTIVE[name]
    spec = published(name)
    counted = count_active_params(spec) - (0 if counts_embedding else spec.vocab_size * spec.emb_dim)
    assert abs(counted / 1e9 - billions) < 10**-decimals


def test_deepseek_3_with_its_prediction_layer_is_the_685b_of_its_card():
    """Of which the main model has 671B."""
    name = "deepseek3-671b"
    assert round(count_params(published(name)) / 1e9) == 671
    further = published(name, mtp_num_layers=1)
    # The files repeat embedding and output projection in that layer, and have a scale a block of 128 x 128 weights.
    in_files = count_params(further) + 2 * further.vocab_size * further.emb_dim
    assert round(in_files * (1 + 1 / 128**2) / 1e9) == 685


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-125m"])
def test_a_model_without_experts_is_all_active(name):
    assert count_active_params(published(name)) == count_params(published(name))
