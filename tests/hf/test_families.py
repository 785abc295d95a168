import json
import re

import pytest
import transformers

from src.config.schema import Config, defaults
from src.config.yaml import CONFIGS
from src.extras.hf import fields
from src.extras.hf.families import FAMILIES
from src.extras.hf.model_keys import find_family, read_model_keys
from src.extras.hf.sections import section_of
from src.run import resolve_config
from src.system.errors import UserError
from tests.hf import saved
from tests.tiny import BASE, spec_of

# How the names of a family's model files begin.
FILES_OF = {
    "llama": ("llama2-", "llama3", "mistral-small3-", "phi4-14b"),  # of one kind, but for tensors' names
    "mistral": ("mistral-", "phi3-mini"),
    "mixtral": ("mixtral-",),
    "qwen2": ("qwen2.5-",),
    "qwen3": ("qwen3-",),
    "qwen3_moe": ("qwen3-",),
    "qwen3_next": ("qwen3-next-",),
    "olmo2": ("olmo2-",),
    "olmo3": ("olmo3-",),
    "gemma": ("gemma-",),
    "gemma2": ("gemma2-",),
    "gemma3_text": ("gemma3-",),
    "gemma4_text": ("gemma4-",),
    "llama4_text": ("llama4-",),
    "deepseek_v2": ("deepseek2-",),
    "deepseek_v3": ("deepseek3-", "kimi-k2"),
    "gpt_oss": ("gpt-oss-",),
    "gpt2": ("gpt3-",),  # of one shape
    "phi3": ("phi3-", "phi4-"),
    "smollm3": ("smollm3-",),
    "granite": ("granite3",),
    "glm4": ("glm4-",),
    "glm4_moe": ("glm4.5-",),
}


def facts(hf):
    """The model that a config.json describes, as far as nothing but its keys says."""
    family = next(family for family in FAMILIES if family.model_type == hf["model_type"])
    return spec_of(Config.of(family.read_config(hf)))


SMALL = {**saved.SIZES, **saved.HEAD}
LLAMA31 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_old_and_new_config_json_describe_the_same_positions():
    old = facts({**LLAMA31, "rope_theta": 5e5, "rope_scaling": {**SCALING, "rope_type": "llama3"}})
    new = facts({**LLAMA31, "rope_parameters": {**SCALING, "rope_theta": 5e5, "rope_type": "llama3"}})
    assert old == new
    layer = old.layers[0]
    assert (layer.rope_type, layer.rope_max_timescale) == ("llama3.1", 5e5)
    assert (layer.rope_factor, layer.original_max_position_embeddings) == (8.0, 8192)
    assert facts({**LLAMA31, "rope_scaling": {"type": "linear", "factor": 4.0}}).layers[0].rope_factor == 4.0


def test_yarns_original_length_is_that_of_the_positions_where_nothing_else_says():
    layer = facts({**LLAMA31, "rope_scaling": {"type": "yarn", "factor": 2.0}}).layers[0]
    assert layer.original_max_position_embeddings == 131_072


def test_gemma_3s_two_kinds_of_positions_in_old_and_new_config_json():
    sizes = {**saved.SIZES, **saved.HEAD, "num_hidden_layers": 7, "model_type": "gemma3_text", "sliding_window": 5}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = facts({**sizes, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear})
    by_kind = {
        "full_attention": {**linear, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert old == facts({**sizes, "rope_parameters": by_kind})
    assert [layer.sliding_window_size for layer in old.layers] == [5, 5, 5, 5, 5, 0, 5]
    assert [layer.rope_max_timescale for layer in old.layers] == [1e4] * 5 + [1e6, 1e4]
    assert [layer.rope_type for layer in old.layers] == ["default"] * 5 + ["linear", "default"]


@pytest.mark.parametrize("name", saved.CONFIGS)
def test_what_transformers_5_writes_and_what_is_written_here_describe_the_same_model(name):
    """`write_config`'s older style is read by transformers 5 as what it was made from."""
    kind, entries = saved.CONFIGS[name]
    config = getattr(transformers, kind)(**entries)
    hf = {**json.loads(config.to_json_string()), "num_nextn_predict_layers": 0}
    family = next(family for family in FAMILIES if family.model_type == hf["model_type"])
    keys = {**defaults(), **family.read_config(hf)}
    layers = [{**keys, **layer} for entry in keys["decoder_segments"] for layer in entry["pattern"]]
    layers = layers or [keys] * keys["base_num_decoder_layers"]
    layers = [{**layer, "base_moe_mlp_dim": layer["base_moe_mlp_dim"] or layer["base_mlp_dim"]} for layer in layers]
    written = family.write_config([section_of("model", layer) for layer in layers], keys["max_target_length"])
    again = json.loads(type(config)(**written).to_json_string())
    assert facts({**again, "num_nextn_predict_layers": 0}) == facts(hf)


DENSE = {"hidden_size_per_layer_input": 0}  # Gemma 4's config is of its smallest model where nothing else is said


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_an_entry_that_is_absent_has_transformers_value_or_is_an_error(family):
    config = transformers.CONFIG_MAPPING[family.model_type]
    # The entries whose value in transformers is none, which no published model has.
    given = {"deepseek_v2": {"num_experts_per_tok": 6}, "gemma4_text": DENSE}.get(family.model_type, {})
    whole = {**json.loads(config(**given).to_json_string(use_diff=False)), "model_type": family.model_type}
    for absent in set(whole) - {"model_type", *given}:
        rest = {name: value for name, value in whole.items() if name != absent}
        try:
            found = family.read_config(rest)
        except UserError:
            continue
        completed = json.loads(config.from_dict(rest).to_json_string(use_diff=False))
        assert found == family.read_config(completed), f"without {absent}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_number_in_quotes_is_refused_by_name_wherever_one_is_read(family):
    grouped = {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    given = {"deepseek_v2": grouped, "gemma4_text": DENSE}.get(family.model_type, {})
    config = transformers.CONFIG_MAPPING[family.model_type](**given)
    whole = {**json.loads(config.to_json_string(use_diff=False)), "model_type": family.model_type}

    def read(**entries):
        try:
            return family.read_config({**whole, **entries})
        except UserError as error:
            return str(error)

    numbers = {name: value for name, value in whole.items() if type(value) in (int, float)}
    found = {name: read(**{name: str(value)}) for name, value in numbers.items()}
    refused = [name for name, read_as in found.items() if read_as != read()]
    assert len(refused) >= 6
    for name in refused:
        names = f"({name}|{family.aliases.get(name, name)})"
        assert re.match(rf"config\.json has {names} [\"']{numbers[name]}[\"'].*: expected", found[name])


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"hidden_size": "24"}, 'hidden_size "24": expected an integer'), ({"vocab_size": None}, "lacks vocab_size")],
)
def test_the_folder_is_named_whose_config_json_is_wrong(tmp_path, entries, message):
    folder = saved.save(tmp_path, "llama")
    saved.edit_config(folder, **entries)
    with pytest.raises(UserError, match=f"{folder}: config.json (has )?{message}"):
        read_model_keys(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5, which"),
        ({"hidden_act": "tanh"}, "hidden_act tanh: expected one of silu"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rotary positions of type ntk"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}}, "attention_factor 0.0, which"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": 1}}, "lacks long_factor"),
        ({"rope_theta": None}, "rope_theta null: expected a number"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta null: expected a number"),
        ({"num_attention_heads": None}, "config.json lacks num_attention_heads"),
        ({"num_hidden_layers": 32.5}, "num_hidden_layers 32.5: expected an integer"),
        ({"attention_bias": "false"}, 'attention_bias "false": expected true or false'),
        ({"rope_scaling": "yarn"}, 'rope_scaling "yarn": expected a mapping'),
        ({"rope_scaling": {**SCALING, "rope_type": "llama3", "factor": "8.0"}}, 'factor "8.0": expected a number'),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(entries, message):
    with pytest.raises(UserError, match=message):
        facts({**LLAMA31, **entries})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "smollm3"])
@pytest.mark.parametrize("window", [None, 8, "absent"])
@pytest.mark.parametrize("first", [0, 2, 3, "absent"])
def test_windows_are_taken_where_no_layer_of_transformers_has_one(kind, window, first):
    hf = json.loads(transformers.CONFIG_MAPPING[kind](**SMALL, pad_token_id=None).to_json_string(use_diff=False))
    plain = facts(hf | {"model_type": kind})
    switched = {name: value for name, value in hf.items() if name not in ("layer_types", "sliding_window")}
    entries = {"sliding_window": window, "max_window_layers": first}
    switched |= {"use_sliding_window": True, **{name: value for name, value in entries.items() if value != "absent"}}
    theirs = transformers.CONFIG_MAPPING[kind].from_dict(switched)
    layers = getattr(theirs, "layer_types", None) or ["sliding_attention"] * SMALL["num_hidden_layers"]
    if theirs.sliding_window is None or "sliding_attention" not in layers:
        assert facts(switched) == plain
    else:
        with pytest.raises(UserError, match="layer_types sliding_attention: expected full_attention"):
            facts(switched)


def test_a_layer_of_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="layer_types linear_attention"):
        fields.read_windowed_layers(
            {"layer_types": ["linear_attention"]}, {"base_num_decoder_layers": 1}, global_every=2
        )


def test_kimi_k2s_folder_is_deepseek_v3s(tmp_path):
    folder = saved.save(tmp_path, "deepseek_v3")
    keys = read_model_keys(folder)
    saved.edit_config(folder, model_type="kimi_k2")
    assert read_model_keys(folder) == keys


@pytest.mark.parametrize("multiplier", [0.0078125, 0.1, 0.3, 1 / 7])
def test_granites_multiplier_of_scores_comes_back(multiplier):
    hf = {**LLAMA31, "model_type": "granite", "attention_multiplier": multiplier}
    spec = facts(hf)
    assert spec.layers[0].query_pre_attn_scalar ** -0.5 == pytest.approx(multiplier, rel=1e-11)
    family = next(family for family in FAMILIES if family.model_type == "granite")
    written = family.write_config([section_of("model", {**defaults(), **family.read_config(hf)})], 64)
    assert facts({**hf, **written}) == spec
    with pytest.raises(UserError, match=r"attention_multiplier -0\.1: expected a positive"):
        facts({**hf, "attention_multiplier": -0.1})


def test_a_phi_of_another_kind_of_positions_is_refused():
    """Its own class in transformers takes yarn for longrope, and has no others."""
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    with pytest.raises(UserError, match="positions of type yarn: expected one of default, longrope"):
        facts({**LLAMA31, "model_type": "phi3", "rope_scaling": yarn})


def test_su_of_phi_3s_first_folders_is_longrope_as_in_transformers():
    scaling = {"short_factor": 64 * [1.0], "long_factor": 64 * [2.0], "original_max_position_embeddings": 4096}
    phi = {**LLAMA31, "model_type": "phi3", "num_key_value_heads": 32}
    old, new = ({**phi, "rope_scaling": {"type": kind, **scaling}} for kind in ("su", "longrope"))
    assert facts(old) == facts(new)
    theirs = transformers.Phi3Config(**old, pad_token_id=0).rope_parameters
    assert (theirs["rope_type"], theirs["long_factor"]) == ("longrope", 64 * [2.0])


ROPES = ("full_attention", "sliding_attention")
GEMMA4 = {"model_type": "gemma4_text", **saved.CONFIGS["gemma4"][1]}


def test_gemma_4s_layers_as_published_and_as_transformers_5_writes_them():
    spec = facts(GEMMA4)
    of_layer = ("head_dim", "num_kv_heads", "share_kv_projections", "rope_type", "partial_rotary_factor")
    windowed, full = (10, 2, False, "default", 1.0), (16, 1, True, "proportional", 0.25)
    found = [tuple(getattr(layer, name) for name in of_layer) for layer in spec.layers]
    assert found == [windowed] * 5 + [full, windowed, full]  # the last one too, as in transformers
    rest = {name: value for name, value in GEMMA4.items() if "global" not in name}
    own = {"head_dim": 16, "num_key_value_heads": 1}
    assert facts({**rest, "per_layer_config": {"05": own, "07": own}}) == spec
    assert facts({**GEMMA4, "per_layer_config": None}).layers[5].head_dim == 10


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256, which is not supported: expected 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2, which is not supported: expected 0"),
        ({"enable_moe_block": True}, "enable_moe_block True, which is not supported: expected False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all', which is not supported"),
        ({"per_layer_config": {"5": {"rms_norm_eps": 0.5}}}, "rms_norm_eps 0.5, which is not supported"),
        ({"per_layer_config": {"8": {"head_dim": 6}}}, '8 {"head_dim": 6}, which is not supported'),
        ({"rope_parameters": {"full_attention": {}}}, "no rope_parameters of sliding_attention"),
        ({"rope_scaling": {}}, "no rope_parameters of full_attention, sliding_attention"),
        (
            {"rope_parameters": {kind: {"rope_type": "yarn"} for kind in ROPES}},
            "type yarn: expected one of default, prop",
        ),
    ],
)
def test_gemma_4s_other_models_are_refused_by_the_entry(entries, message):
    with pytest.raises(UserError, match=message):
        facts({**GEMMA4, **entries})


def test_a_gemma_4_that_does_not_say_which_is_refused():
    """transformers would have the smallest model's embeddings of each layer."""
    rest = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
    with pytest.raises(UserError, match="hidden_size_per_layer_input 256"):
        facts(rest)


def test_layers_that_repeat_are_one_pattern(tmp_path):
    keys = read_model_keys(saved.save(tmp_path, "gemma3"))
    assert [(entry["repeats"], len(entry["pattern"])) for entry in keys["decoder_segments"]] == [(5, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("file", sorted((CONFIGS / "models").glob("*.yml")), ids=lambda file: file.stem)
def test_every_model_file_describes_a_model_that_can_be_written(file):
    config = resolve_config.load([BASE, f"model_name={file}", "dataset_type=synthetic", "max_target_length=16"])
    family, hf = find_family(config.model, config.batch.max_target_length)
    begins = FILES_OF.get(family.model_type, ())
    assert file.stem.startswith(begins), (
        f"{file.name} is a model of {family.model_type}, the first of FAMILIES that describes it: expected a name that "
        f"begins with one of {begins}, or an entry of FILES_OF above"
    )
    assert config.model.base_emb_dim in (hf.get("hidden_size"), hf.get("n_embd"))
