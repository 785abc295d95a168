"""No entry of config.json changes the logits without a word: each is read as transformers reads it, or refused."""

import collections
import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from src.config.schema import Config
from src.extras.hf import convert
from src.extras.hf.families import FAMILIES
from src.extras.hf.load import load_weights
from src.extras.hf.model_keys import read_model_keys
from src.model.forward_context import ForwardContext
from src.model.params import Weights
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.trace import plan_step
from src.system.errors import UserError
from tests.hf import saved
from tests.tiny import BASE, spec_of

torch.set_num_threads(1)
LENGTH = 13
TOKENS = np.random.default_rng(0).integers(0, 50, (1, LENGTH))
TOLERANCE = 2e-4  # of the logits' standard deviation, as in test_parity.py

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {**saved.LATENT, **SIZES, "num_key_value_heads": 4}
MODELS = {
    "llama": {**SIZES, **HEAD},
    "mistral": {**SIZES, **HEAD, "sliding_window": 5},
    "mixtral": {**SIZES, **HEAD, **EXPERTS},
    "qwen2": SIZES,
    "qwen3": {**SIZES, **HEAD},
    "qwen3_moe": {**SIZES, **HEAD, **EXPERTS, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
    "olmo2": SIZES,
    "olmo3": {**SIZES, **WINDOWS},
    "phi3": {**SIZES, **saved.NO_PADDING, "sliding_window": 5},
    "smollm3": {**SIZES, **saved.NO_PADDING, "no_rope_layer_interval": 2},
    "granite": {**SIZES, **saved.MULTIPLIERS},
    "glm": {**SIZES, **HEAD, **saved.NO_PADDING},
    "glm4": {**SIZES, **HEAD, **saved.NO_PADDING},
    "glm4_moe": {**SIZES, **HEAD, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "gemma": {**SIZES, **HEAD},
    "gemma2": {**SIZES, **HEAD, **WINDOWS, "query_pre_attn_scalar": 7},
    "gemma3_text": {**SIZES, **HEAD, **WINDOWS, "query_pre_attn_scalar": 7},
    "gemma4_text": {**SIZES, **HEAD, **WINDOWS, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.5}
    | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "llama4_text": {**SIZES, **HEAD, **EXPERTS, "intermediate_size_mlp": 28, "attention_chunk_size": 4}
    | {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2, "floor_scale": 4},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "gpt_oss": {**SIZES, **HEAD, **EXPERTS, **WINDOWS},
    "gpt2": {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def our_model(folder):
    """The spec of the model in a folder, and a function that computes its logits, mostly without compiling them."""
    settings = {"dtype": "float32", "matmul_precision": "highest", "remat_policy": "none", "max_target_length": LENGTH}
    config = Config.of({**read_model_keys(folder), **settings})
    spec = spec_of(config)

    def logits():
        plan = plan_step(config, make_layout(config.mesh, jax.devices()[:1]))
        shapes = jax.tree.map(
            lambda shape, at: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=at), plan.shapes, plan.shardings
        )
        weights = load_weights(folder, shapes)

        def forward(weights):
            ones, positions = jnp.ones((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None]
            context = ForwardContext(positions, ones, plan.layout, plan.kernel, packed=False)
            decoder = plan.decoder(Weights(weights))
            hidden_BTD, _, _ = decoder(jnp.asarray(TOKENS), context, plan.execution)
            return decoder.logits(hidden_BTD, context)[..., : spec.vocab_size]

        if spec.has_experts:  # whose maps over devices compile each operation anew
            return np.asarray(jax.jit(forward)(weights))
        with jax.disable_jit():
            return np.asarray(forward(weights))

    return spec, logits


def their_logits(folder):
    """transformers' logits of the model in a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def agree(ours, theirs):
    return np.max(np.abs(ours - theirs)) <= TOLERANCE * np.std(theirs)


class Model:
    """A tiny random model that transformers saved, and its logits with other entries in its config.json."""

    def __init__(self, folder, model_type):
        config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
        self.folder = saved.save_config(folder, config)
        self.config_class = type(config)
        self.entries = json.loads(config.to_json_string(use_diff=False))
        self.logits_of_spec = {}
        self.spec = self.ours({})[0]
        assert self.agrees({})

    def write(self, entries):
        (self.folder / "config.json").write_text(json.dumps({**self.entries, **entries}))

    def ours(self, entries):
        """The model's spec and its logits here, or UserError."""
        self.write(entries)
        spec, logits = our_model(self.folder)
        if spec not in self.logits_of_spec:
            self.logits_of_spec[spec] = logits()
        return spec, self.logits_of_spec[spec]

    def agrees(self, entries):
        """Whether transformers computes the same."""
        ours = self.ours(entries)[1]
        try:
            return agree(ours, their_logits(self.folder))
        except Exception:  # it has a config of these entries, but no model
            return False


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A family's name -> its model."""
    return functools.cache(lambda name: Model(tmp_path_factory.mktemp(name), name))


# ---- Each entry by itself

QUICK = ("llama",)

YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25}
LINEAR = {"rope_type": "linear", "factor": 3.0}
ACTIVATIONS = ["silu", "relu", "gelu", "gelu_new"]
# Other values of entries, where none follows from their type.
VALUES = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "layer_types": [
        ["full_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention", "chunked_attention"],
        ["chunked_attention", "full_attention"],
        ["full_attention"],
        [],
    ],
    "rope_parameters": [{}, {"rope_type": "default"}, {"rope_theta": 50.0}, YARN],
    "rope_scaling": [{}, LINEAR],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", "x"],
    "mlp_only_layers": [[0], [0, 1], []],
    "moe_layers": [[0], [0, 1], []],
    "no_rope_layers": [[0, 1], [1, 0, 1], [0, 0], [1, 1], [1]],
    "architectures": [["Other"]],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "dtype": ["float16"],
    **{f"{kind}_pdrop": [0.3] for kind in ("attn", "embd", "resid")},
    "problem_type": ["regression"],
    "use_bidirectional_attention": ["vision", "all"],
}
# What transformers reads of config.json beside the fields of a class.
OTHERS = {
    "_sliding_window_pattern": [2],
    "attention_chunk_size": [3],
    "global_head_dim": [8, 6],
    "head_dim": [6],
    "is_causal": [False],
    "layer_types": VALUES["layer_types"],
    "mlp_bias": [True],
    "moe_layer_freq": [2],
    "norm_topk_prob": [True],
    "num_global_key_value_heads": [2],
    "num_nextn_predict_layers": [1],
    "original_max_position_embeddings": [8],
    "partial_rotary_factor": [0.5, 1.0],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}, {"1": {"head_dim": 16}}, {"01": {"head_dim": 12}}],
    "rope_interleave": [False],
    "rope_local_base_freq": [50.0],
    "rope_scaling": VALUES["rope_scaling"],
    "rope_theta": [50.0],
    "scoring_func": ["sigmoid", "softmax"],
    "sliding_window": [3],
    "sliding_window_pattern": [1, 2, 0],
}
# What says how a folder is read, or what a model returns beside its logits.
NOT_OF_THE_MODEL = {"model_type", "return_dict", "text_config", "auto_map"}


def other_values(name, value):
    """Values that an entry does not have, null among them."""
    if name in VALUES:
        values = VALUES[name]
    elif isinstance(value, bool):
        values = [not value]
    elif isinstance(value, int):
        values = [value + 1, 2 * value, 0, -1]
    elif isinstance(value, float):
        values = [3 * value + 0.1, 0.0, -1.0]
    elif isinstance(value, str):
        values = [value + "x"]
    else:
        values = [3, True, 0.5, []]
    return [other for other in [*values, None] if other != value]


def names_read(model):
    """What transformers asks a config for, as it makes the model and computes its logits, that no class has."""
    read, config = set(), transformers.PreTrainedConfig
    with pytest.MonkeyPatch.context() as patch:
        found = config.__getattribute__
        patch.setattr(config, "__getattribute__", lambda self, name: read.add(name) or found(self, name))
        model.agrees({})
    return {name for name in read if not name.startswith("_") and not hasattr(model.config_class, name)}


def all_changes(model):
    """Every entry that a class's fields, its other names for them and the code of the model read, with other values."""
    fields, names = {field.name for field in dataclasses.fields(model.config_class)}, model.config_class.attribute_map
    changes = {name: [True, 3] for name in names_read(model)} | OTHERS
    for name in sorted(fields | set(names) | set(model.entries)):
        changes[name] = changes.get(name, []) + other_values(name, model.entries.get(names.get(name, name)))
    return {name: values for name, values in changes.items() if name not in NOT_OF_THE_MODEL}


def exists(model, entries):
    """Whether transformers has a config of such entries."""
    try:
        model.config_class.from_dict({**model.entries, **entries})
    except Exception:
        return False
    return True


# Families that share their rows with those before them: what each test makes of them takes minutes in all.
LATER = ("qwen2", "olmo3", "phi3", "smollm3", "granite", "glm", "glm4", "glm4_moe")
# All together take minutes.
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS]


@pytest.mark.parametrize("model_type", EACH)
def test_an_entry_of_another_value_is_read_as_transformers_reads_it_or_refused(models, model_type):
    model = models(model_type)
    without_effect, wrong = collections.defaultdict(dict), []
    for name, values in all_changes(model).items():
        for count, value in enumerate(values):
            try:
                spec = model.ours({name: value})[0]
            except UserError:
                continue
            if not exists(model, {name: value}):
                continue
            if spec == model.spec:
                without_effect[count][name] = value
            elif not model.agrees({name: value}):
                wrong.append({name: value})
    for entries in without_effect.values():  # at once what changes nothing here; it is told which does there
        if not model.agrees(entries):
            found = [{name: value} for name, value in entries.items() if not model.agrees({name: value})]
            wrong += found or [entries]
    assert not wrong


@pytest.mark.parametrize("model_type", MODELS)
def test_every_field_of_a_class_is_mapped_inert_or_of_one_value(model_type):
    family = next(family for family in FAMILIES if family.model_type == model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    assert {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map) <= family.known
    for name, value in family.only.items():
        assert getattr(config_class(), name, value) in (value, None)


# ---- Several together, and what lies beside them

LONG = {"rope_parameters": None, "rope_theta": 50.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NESTED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    "full_attention": {"rope_type": "default", "rope_theta": 50.0},
}
ROPES = {
    "scaling beside parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "rope_scaling": YARN,
    },
    "scaling without theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_scaling": LINEAR},
    "yarn of no factor": {**LONG, "rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 16}},
    "yarn of no original length": {**LONG, "rope_scaling": YARN},
    "yarn of a length in which nothing turns": {
        **LONG,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 1, "truncate": False},
    },
    "yarn of bounds the wrong way round": {**LONG, "rope_scaling": {**YARN, "beta_fast": 0.25, "beta_slow": 2.0}},
    "yarn's original length at the top": {**LONG, "rope_scaling": YARN, "original_max_position_embeddings": 16},
    "yarn truncated by null": {**LONG, "rope_scaling": {**YARN, "truncate": None}},
    "llama3 of no original length": {**LONG, "rope_scaling": LLAMA3},
    "llama3's original length at the top": {**LONG, "rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    "two original lengths": {
        **LONG,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 16,
    },
}
TOGETHER = {
    **{f"llama, {name}": ("llama", entries) for name, entries in ROPES.items()},
    "qwen3, scaling beside parameters": ("qwen3", ROPES["scaling beside parameters"]),
    "gemma3, scaling beside parameters": ("gemma3_text", {"rope_parameters": NESTED, "rope_scaling": LINEAR}),
    "gemma3, old style": (
        "gemma3_text",
        {"rope_parameters": None, "rope_theta": 50.0, "rope_local_base_freq": 30.0, "rope_scaling": LINEAR},
    ),
    "gemma3, windows in yarn of its own": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {**YARN, "rope_theta": 30.0, "original_max_position_embeddings": 16},
                "full_attention": {**YARN, "attention_factor": 0.7, "original_max_position_embeddings": 8},
            }
        },
    ),
    "olmo3, proportional beside windows that are not": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
            }
        },
    ),
    "gemma3, a final cap": ("gemma3_text", {"final_logit_softcapping": 1.5}),
    "gemma3, pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3, another name of the pattern": ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 2}),
    "gemma4, as published": ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}}),
    "gemma4, positions of both kinds": (
        "gemma4_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "proportional", "rope_theta": 30.0, "factor": 2.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 9.0, "partial_rotary_factor": 0.4},
            }
        },
    ),
    "gemma, silu": ("gemma", {"hidden_act": "silu"}),
    "gemma, relu": ("gemma", {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}),
    "mistral, layers": ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "llama4, layers": ("llama4_text", {"layer_types": ["full_attention", "chunked_attention"]}),
    "llama4, positions": ("llama4_text", {"layer_types": None, "no_rope_layers": [0, 1]}),
    "gpt_oss, null": ("gpt_oss", {"rope_parameters": None, "rope_scaling": None}),
    "gpt_oss, plain": ("gpt_oss", {"rope_parameters": None, "rope_scaling": {"rope_type": "default"}}),
    "gpt_oss, empty": ("gpt_oss", {"rope_parameters": {}}),
    "deepseek_v2, normalised": ("deepseek_v2", {"norm_topk_prob": True}),
    "deepseek_v2, greedy and normalised": ("deepseek_v2", {"topk_method": "greedy", "norm_topk_prob": True}),
    "deepseek_v2, halves": ("deepseek_v2", {"rope_interleave": False}),
    "deepseek_v2, latents": ("deepseek_v2", {"rms_norm_eps": 0.3}),
    "deepseek_v3, halves": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3, no interleaving": ("deepseek_v3", {"rope_interleave": None}),
    "deepseek_v3, latents": ("deepseek_v3", {"rms_norm_eps": 0.3}),
    "deepseek_v3, yarn": ("deepseek_v3", {**LONG, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.6}}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_entries_together_are_read_as_transformers_reads_them(models, case):
    model_type, entries = TOGETHER[case]
    model = models(model_type)
    assert model.agrees(entries)


# What published folders have beside a class's fields: of GPT-2 medium and its large sizes, SmolLM 2, Falcon 3, Llama 4
# Maverick, and any folder that transformers 4.46 to 4.52 saved.
BESIDE = {
    "gpt2": {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
    "llama": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4f16"},
        "activation": "swiglu",
    },
    "llama4_text": {"_attn_implementation_autoset": True, "for_llm_compressor": False},
    "qwen3": {"_attn_implementation_autoset": True},
}


@pytest.mark.parametrize("model_type", BESIDE)
def test_what_published_folders_have_beside_the_model_is_read_over(models, model_type):
    assert models(model_type).agrees(BESIDE[model_type])


def test_llama_4s_temperature_is_on_as_its_first_folders_say(models):
    """Whose 4 transformers 4.51 took for true; later versions refuse it."""
    model = models("llama4_text")
    by_value = {value: model.ours({"attn_temperature_tuning": value})[0] for value in (4, 0, False)}
    assert by_value[4] == model.spec
    assert by_value[0] == by_value[False] != model.spec


REFUSED = {
    **{
        f"{name}, not causal": (name, {"is_causal": False}, "is_causal False, which is not supported")
        for name in MODELS
    },
    "a router of one expert": ("mixtral", {"num_local_experts": 1}, "num_local_experts 1, which is not supported"),
    "scores' cap": (
        "gemma3_text",
        {"attn_logit_softcapping": 2.5},
        "attn_logit_softcapping 2.5, which is not supported",
    ),
    "another rotated part": ("deepseek_v3", {"head_dim": 2}, "head_dim 2, which is not supported: expected 4"),
    "no rotated part": ("deepseek_v3", {"head_dim": None}, "head_dim None, which is not supported: expected 4"),
    "linear mscale_all_dim": (
        "deepseek_v2",
        {**LONG, "rope_scaling": {**LINEAR, "mscale_all_dim": 0.7}},
        "mscale_all_dim for rotary positions of type linear",
    ),
    "sparse step 0": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0: expected 1 or more"),
    "dense step 0": ("llama4_text", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step 0: expected 1"),
    "no rope interval 0": (
        "llama4_text",
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
        "no_rope_layer_interval 0: expected 1",
    ),
    "no heads": ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads 0: .*1 or more"),
    "no heads of gpt2": ("gpt2", {"n_head": 0}, "n_head 0: .*1 or more"),
    "no groups": ("deepseek_v3", {"n_group": 0}, "n_group 0: .*1 or more"),
    "negative epsilon": ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps -1.0: .*positive"),
    "epsilon NaN": ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps NaN: .*positive"),
    "theta 0": ("qwen3", {"rope_parameters": None, "rope_theta": 0.0}, "rope_max_timescale=0.*positive"),
    "no vocabulary": ("olmo2", {"vocab_size": 0}, "vocab_size 0: .*1 or more"),
    "no window": ("gemma2", {"sliding_window": 0}, "sliding_window 0, which is not supported"),
    "what nobody knows": ("llama", {"residual_multiplier": 0.5}, "residual_multiplier 0.5, which is not supported"),
    "two names of one entry": (
        "mixtral",
        {"num_experts": 8},
        "num_local_experts 4, which is not supported: expected 8",
    ),
    "yarn without a factor": ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "lacks factor"),
    "a window of none": (
        "mistral",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        "needs sliding",
    ),
    "tied, but not": ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if REFUSED[case][0] in LATER else case for case in REFUSED]
)
def test_what_is_not_here_is_refused_by_name_by_every_command(models, case, tmp_path):
    model_type, entries, message = REFUSED[case]
    model = models(model_type)
    model.write(entries)
    with pytest.raises(UserError, match=message):
        convert.from_hf(model.folder, tmp_path / "out")
    if "tied" not in case:  # which the tensors tell
        with pytest.raises(UserError, match=message):
            resolve_config.load([BASE, f"model_name={model.folder}", "dataset_type=synthetic"])


def test_a_multi_modal_folder_is_tied_as_its_top_says(tmp_path):
    text = {**MODELS["gemma3_text"], "tie_word_embeddings": True}
    vision = {**saved.VISION, "intermediate_size": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, tie_word_embeddings=False
    )
    folder = saved.save_config(tmp_path, config, auto=transformers.AutoModelForImageTextToText)
    assert agree(our_model(folder)[1](), their_logits(folder))
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, "tie_word_embeddings": None}))
    with pytest.raises(UserError, match="lacks tie_word_embeddings"):  # to transformers it is false
        read_model_keys(folder)
