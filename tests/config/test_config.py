"""Configuration: what a command line resolves to, and what each mistake in it is answered with."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.config import schema
from src.config.base_yml import base_yml, help_text
from src.config.keys import key as declare
from src.config.load import compare_runs, diff_from_base, from_yaml, to_yaml
from src.config.usage import Usage, help_for
from src.run.resolve_config import load
from src.system.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = str(CONFIGS / "base.yml")


def test_base_yml_is_written_from_the_schema():
    text = (CONFIGS / "base.yml").read_text()
    assert text == base_yml(), "run: python -m src.config.base_yml > configs/base.yml"


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS.rglob("*.yml") if path.parent.name not in ("models", "chips")],
    ids=lambda path: path.name,
)
def test_every_shipped_config_loads(path):
    notes = []
    load([str(path)], notes)
    assert notes == []


def test_a_key_that_is_typed_twice_is_said_and_the_last_counts():
    """As where a script ends its command with "$@"; the same value again is no line."""
    notes = []
    assert load([BASE, "steps=10", "log_period=5", "steps=20", "log_period=5"], notes).run.steps == 20
    assert notes == ["steps is given more than once; using the last value, steps=20"]


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("*.yml")), ids=lambda path: path.stem)
def test_every_shipped_model_loads_by_name_and_by_path(path):
    named, by_path = load([BASE, f"model_name={path.stem}"]), load([BASE, f"model_name={path}"])
    assert named.run.model_name == path.stem
    assert compare_runs(named, by_path)[1] == {}


def test_shipped_models_have_their_papers_sizes():
    llama = load([BASE, "model_name=llama2-7b"]).model
    assert (llama.base_emb_dim, llama.base_mlp_dim, llama.base_num_decoder_layers) == (4096, 11008, 32)
    # Llama 2's 7B has 6,738,415,616 weights, as its published checkpoint counts them.
    d, f, layers, v = llama.base_emb_dim, llama.base_mlp_dim, llama.base_num_decoder_layers, llama.vocab_size
    attention = 2 * d * llama.head_dim * (llama.base_num_query_heads + llama.base_num_kv_heads)
    assert layers * (attention + 3 * d * f + 2 * d) + 2 * v * d + d == 6_738_415_616
    # GPT-3 in table 2.1: width, layers, heads and head size.
    for name, sizes in {"gpt3-125m": (768, 12, 12, 64), "gpt3-6.7b": (4096, 32, 32, 128)}.items():
        gpt = load([BASE, f"model_name={name}"]).model
        assert (gpt.base_emb_dim, gpt.base_num_decoder_layers, gpt.base_num_query_heads, gpt.head_dim) == sizes
        assert gpt.base_mlp_dim == 4 * gpt.base_emb_dim
        assert (gpt.position_type, gpt.normalization, gpt.logits_via_embedding) == ("learned", "layer", True)


def test_base_is_maxtexts_one_billion_parameter_model():
    config = load([BASE])
    model = config.model
    assert (model.base_emb_dim, model.base_mlp_dim, model.base_num_decoder_layers) == (2048, 7168, 16)
    assert (model.base_num_query_heads, model.head_dim, model.vocab_size) == (16, 128, 32_000)


def test_precedence(write):
    model = write("model.yml", "base_emb_dim: 64\nhead_dim: 8\nvocab_size: 300\n")
    write("lower.yml", f"model_name: {model}\nsteps: 5\nlearning_rate: 1e-2\nhead_dim: 16\n")
    upper = write("upper.yml", "base_config: lower.yml\nsteps: 6\nlog_period: 7\n")
    config = load([str(upper), "log_period=8", "log_period=9"])
    assert config.model.base_emb_dim == 64, "the model file is above base.yml"
    assert config.model.head_dim == 16, "the YAML is above the model file"
    assert config.run.steps == 6, "a file is above its base_config"
    assert config.run.log_period == 9, "the command line is above all, its last word wins"
    assert config.step.learning_rate == 0.01
    assert config.checkpoint.checkpoint_period == 1_000, "the rest is base.yml's"


def test_the_last_model_name_wins(write):
    path = write("mine.yml", "model_name: gpt3-125m\n")
    assert load([str(path)]).model.base_emb_dim == 768
    assert load([str(path), "model_name=llama2-7b"]).model.base_emb_dim == 4096
    assert load([str(path), "model_name="]).model.base_emb_dim == 2048
    maxtexts_none = load([str(path), "model_name=default"])
    assert (maxtexts_none.model.base_emb_dim, maxtexts_none.run.model_name) == (2048, "")


def test_base_config_is_found_in_configs(write):
    path = write("mine.yml", "base_config: quickstart.yml\nsteps: 3\n")
    assert compare_runs(load([str(path)]), load([str(CONFIGS / "quickstart.yml")]))[1] == {}
    assert load([str(path)]).run.steps == 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("steps=10_000", 10_000),
        ("steps=1e3", 1_000),
        ("learning_rate=1e-3", 0.001),
        ("learning_rate=1", 1.0),
        ("per_device_batch_size=0.5", 0.5),
        ("per_device_batch_size=4", 4.0),
        ("packing=true", True),
        ("packing=False", False),
        ("run_name=123", "123"),
        ("run_name=007", "007"),
        ("run_name=1e3", "1e3"),
        ("run_name=None", ""),
        ("run_name=null", ""),
        ("run_name=", ""),
        ("run_name='None'", "None"),
        ("jax_cache_dir=None", ""),
        ("prompt=a=b: [c", "a=b: [c"),
        ('prompt=" x "', " x "),
        ("prompt='a' or 'b'", "'a' or 'b'"),
        ("base_output_directory=gs://bucket/dir", "gs://bucket/dir"),
        ("mlp_activations=['gelu', 'linear']", ("gelu", "linear")),
        ("mlp_activations=[relu]", ("relu",)),
        ("accept_changes=", ()),
    ],
)
def test_values(argument, value):
    loaded = load([BASE, argument])[argument.partition("=")[0]]
    assert loaded == value
    assert type(loaded) is type(value)


def test_dotted_keys_set_one_entry(write):
    config = load([BASE, "logical_axis_rules.mlp=[]", "remat_policy=custom", "remat_custom.query_proj=offload"])
    assert config.mesh.logical_axis_rules["mlp"] == ()
    assert config.mesh.logical_axis_rules["vocab"] == ("tensor", "stage")
    assert config.step.remat_custom == {"query_proj": "offload"}
    path = write("mine.yml", "logical_axis_rules.mlp: [tensor, fsdp]\n")
    assert load([str(path)]).mesh.logical_axis_rules["mlp"] == ("tensor", "fsdp")


def test_strings_of_a_yaml_file_keep_their_spelling(write):
    path = write("mine.yml", "run_name: 010\nprompt: '1e-3'\nbase_output_directory: 2026-01-01\n")
    config = load([str(path)])
    assert (config.run.run_name, config.decoding.prompt) == ("010", "1e-3")
    assert config.run.base_output_directory == "2026-01-01"


def test_decoder_segments():
    config = load(
        [
            BASE,
            "decoder_segments=[{repeats: 2, pattern: [{rope_max_timescale: 1e6, mlp_activations: [gelu]}, {}]},"
            " {repeats: -1, shared: true, pattern: [{}]}]",
        ]
    )
    first, second = config.model.decoder_segments
    assert (first["repeats"], first["shared"], len(first["pattern"])) == (2, False, 2)
    assert first["pattern"][0] == {"rope_max_timescale": 1_000_000, "mlp_activations": ("gelu",)}
    assert (second["repeats"], second["shared"]) == (-1, True)


# MaxText's published 16B to 128B models are scales 16 to 128 of base.yml: (emb, mlp, layers, heads).
@pytest.mark.parametrize(
    ("scale", "sizes"),
    [
        (1, (2048, 7168, 16, 16)),
        (2, (2048, 14336, 16, 32)),
        (4, (4096, 14336, 16, 32)),
        (8, (4096, 14336, 32, 32)),
        (16, (4096, 28672, 32, 64)),
        (32, (8192, 28672, 32, 64)),
        (64, (8192, 28672, 64, 64)),
        (128, (8192, 57344, 64, 128)),
    ],
)
def test_global_parameter_scale(scale, sizes):
    model = load([BASE, f"global_parameter_scale={scale}", "base_num_kv_heads=4"]).model
    assert (model.emb_dim, model.mlp_dim, model.num_decoder_layers, model.num_query_heads) == sizes
    assert model.num_query_heads == 4 * model.num_kv_heads
    heads = 2 * model.num_query_heads + 2 * model.num_kv_heads
    weights = model.num_decoder_layers * model.emb_dim * (3 * model.mlp_dim + 128 * heads)
    base_weights = 16 * 2048 * (3 * 7168 + 128 * (2 * 16 + 2 * 4))
    assert weights == scale * base_weights, "each doubling doubles the weights of the layers"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None, max_examples=40)
@given(
    column=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30),
    prompt=TEXTS,
    steps=st.integers(1, 2**30),
    learning_rate=st.floats(1e-30, 2**30),
    packing=st.booleans(),
    activations=st.lists(st.sampled_from(["silu", "gelu", "linear"]), min_size=1),
    repeats=st.integers(1, 15),
    theta=st.integers(1, 10**9),
)
def test_to_yaml_is_read_back(column, prompt, steps, learning_rate, packing, activations, repeats, theta):
    config = load(
        [
            BASE,
            *(f"steps={steps}", f"learning_rate={learning_rate!r}", f"packing={packing}"),
            *(f"mlp_activations={activations}", f"dataset_column={column}", f"prompt={prompt}"),
            f"decoder_segments=[{{repeats: {repeats}, pattern: [{{rope_max_timescale: {theta}}}]}},"
            " {repeats: -1, pattern: [{}]}]",
        ]
    )
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    "prompt", ["None", "null", "", "true", "1e-3", "'", '"', " x", "a: b", "# c", "\n", "\x00", "é\u2028"], ids=repr
)
def test_awkward_strings_are_read_back(prompt):
    assert from_yaml(to_yaml({**load([BASE]), "prompt": prompt}))["prompt"] == prompt


def test_a_file_of_another_model_is_refused_beside_a_typed_model_name(write):
    """The file's keys come after the model's: what was asked for would be trained as something else."""
    quickstart = str(CONFIGS / "quickstart.yml")
    with pytest.raises(UserError, match=r"would not be that model: in .*quickstart.yml, base_emb_dim=128 replaces"):
        load([quickstart, "model_name=gpt3-125m"])
    # Not so where the file says the same, where both are typed, or where the file itself names what it changes.
    assert load([str(write("same.yml", "base_emb_dim: 768\n")), "model_name=gpt3-125m"]).model.base_emb_dim == 768
    assert load([str(write("wide.yml", "base_emb_dim: 96\n")), "model_name=gpt3-125m", "base_emb_dim=64"])
    own = str(write("own.yml", "model_name: gpt3-125m\nbase_emb_dim: 64\n"))
    assert load([own]).model.base_emb_dim == 64
    assert load([own, f"model_name={CONFIGS}/models/gpt3-125m.yml"]).model.base_emb_dim == 64
    # Nor where a file takes back what its base_config says; a wrong type is told as ever.
    facts = "base_emb_dim: 768\nbase_mlp_dim: 3072\nbase_num_decoder_layers: 12\nhead_dim: 64\n"
    facts += "base_num_query_heads: 12\nbase_num_kv_heads: 12\n"
    assert load([str(write("back.yml", f"base_config: {quickstart}\n{facts}")), "model_name=gpt3-125m"])
    with pytest.raises(UserError, match=r"base_emb_dim \(in .*bad.yml\): expected an integer"):
        load([str(write("bad.yml", "base_emb_dim: wide\n")), "model_name=gpt3-125m"])


def test_a_file_below_the_one_that_names_the_model_does_not_change_it(write):
    """Such as base.yml of another checkout, which has every key of the model."""
    other = write("base.yml", Path(BASE).read_text())
    recipe = write("recipe.yml", f"base_config: {other}\nmodel_name: gpt3-125m\n")
    with pytest.raises(UserError, match=r"would not be that model: in .*base.yml, .*base_emb_dim=2048 replaces 768"):
        load([str(recipe)])
    sizes = write("sizes.yml", f"base_config: {recipe}\nbase_emb_dim: 64\n")
    with pytest.raises(UserError, match="would not be that model"):
        load([str(sizes)])
    # Between two files that name it, one for another model.
    ours = write("ours.yml", "model_name: gpt3-125m\n")
    another = write("another.yml", f"base_config: {ours}\nmodel_name: gpt3-52k\nbase_emb_dim: 64\n")
    with pytest.raises(UserError, match="base_emb_dim=64 replaces 768"):
        load([str(write("again.yml", f"base_config: {another}\nmodel_name: gpt3-125m\n"))])
    # A file that names the model may change it, and so may those above it.
    own = write("own.yml", "model_name: gpt3-125m\nbase_emb_dim: 64\n")
    assert load([str(own)]).model.base_emb_dim == 64
    assert load([str(write("above.yml", f"base_config: {own}\nbase_emb_dim: 96\n"))]).model.base_emb_dim == 96


def test_a_resolved_config_loads_to_itself(write):
    config = load(
        [
            str(CONFIGS / "base.yml"),
            *("model_name=gpt3-125m", "max_target_length=512", "logical_axis_rules.mlp=[]", "vocab_size=999"),
        ]
    )
    assert load([str(write("config.yml", to_yaml(config)))]) == config


def test_a_key_read_without_its_section_is_answered_with_it():
    with pytest.raises(UserError, match=r"config\.max_target_length: read config\.batch\.max_target_length"):
        getattr(load([BASE]), "max_target_length", 512)
    with pytest.raises(AttributeError, match=r"no attribute no_such_key$"):
        _ = load([BASE]).no_such_key


def test_the_config_is_frozen():
    config = load([BASE])
    with pytest.raises(AttributeError):
        config.steps = 3
    with pytest.raises(AttributeError):
        config.run.steps = 3
    with pytest.raises(TypeError):
        config.mesh.logical_axis_rules["mlp"] = ()


def test_diff_from_base():
    assert diff_from_base(load([BASE])) == []
    changed = load([BASE, "steps=3", "logical_axis_rules.mlp=[]", "remat_policy=custom", "remat_custom.mlpwo=device"])
    assert diff_from_base(changed) == [
        "steps: 3 (default 10000)",
        "remat_policy: custom (default full)",
        "remat_custom.mlpwo: device (default null)",
        "logical_axis_rules.mlp: [] (default [tensor])",
    ]


def test_compare_runs():
    old = from_yaml(to_yaml(load([BASE])))
    assert compare_runs(old, load([BASE])) == ({}, {})
    new = load([BASE, "steps=3", "per_device_batch_size=6", "head_dim=64", "data_shuffle_seed=1", "mu_dtype=bfloat16"])
    harmless, breaking = compare_runs(old, new)
    assert list(harmless.values()) == ["steps: 10000 -> 3", "per_device_batch_size: 12.0 -> 6.0"]
    assert breaking.keys() == {"head_dim", "data_shuffle_seed", "mu_dtype"}
    accepting = load([BASE, "head_dim=64", "accept_changes=[head_dim]"])
    harmless, breaking = compare_runs(old, accepting)
    assert breaking == {}
    assert harmless.keys() == {"head_dim"}  # what is accepted is no change itself


@pytest.mark.parametrize(
    "argument",
    [
        *("vocab_size=300", "base_emb_dim=64", "decoder_segments=[{repeats: 16, pattern: [{mlp_bias: true}]}]"),
        *("global_parameter_scale=2", "weight_dtype=bfloat16", "packing=false"),
        *("max_target_length=64", "dataset_path=x", "dataset_type=synthetic", "eval_fraction=0.5", "opt_type=sgd"),
    ],
)
def test_what_makes_another_run(argument):
    _, breaking = compare_runs(load([BASE]), load([BASE, argument]))
    assert list(breaking) == [argument.partition("=")[0]]


@pytest.mark.parametrize(
    "argument",
    ["learning_rate=1", "remat_policy=none", "gradient_accumulation_steps=2", "dtype=float32", "eval_interval=9"],
)
def test_what_a_run_may_change(argument):
    assert compare_runs(load([BASE]), load([BASE, argument]))[1] == {}


def test_a_run_of_another_version():
    old = from_yaml("steps: 7\nhead_dim: 64\nforgotten_key: [1]\n")
    harmless, breaking = compare_runs(old, load([BASE]))
    assert list(breaking.values()) == ["head_dim: 64 -> 128"], "a changed default is seen"
    assert harmless.keys() == {"steps", "forgotten_key"}, "an absent key had its default's effect"


def test_from_yaml_of_a_damaged_file():
    for text in ("steps: [1", "steps: x", "- 1"):
        with pytest.raises(UserError, match=r"config\.yml"):
            from_yaml(text)


def test_help():
    assert help_for([BASE, "steps=3"]) is None
    overview = help_for(["--help"])
    assert "python -m src.train" in overview
    assert "checkpoint_period" in overview
    decode = help_for(["--help"], Usage("python -m src.decode RUN", ("Decoding",)))
    assert decode.index("src.decode RUN") < decode.index("decode_seed: 0  ") < decode.index("All other keys")
    assert decode.index("All other keys") < decode.index("  checkpoint_period"), "named, and not explained"
    assert help_for(["--help", "steps"]) == help_text("steps")
    assert help_for([BASE, "steps=3", "-h", "steps"]) == help_text("steps")
    assert help_text("learning_rate").splitlines() == [
        "Optimizer",
        "learning_rate: 3.0e-4               # peak learning rate",
    ]
    remat = help_text("remat_policy")
    assert remat.index("save_out_proj") < remat.index("\nremat_policy:")
    assert "  vocab: [tensor, stage]" in help_text("logical_axis_rules")
    with pytest.raises(UserError, match=r"there is no key stpes\. Did you mean steps"):
        help_text("stpes")
    moments = [line.partition(":")[0] for line in help_text("Moment").splitlines() if not line.startswith("#")]
    assert {"adam_b1", "adam_b2", "mu_dtype"} <= set(moments), "no key has the word in its name"
    rates = [line.partition(":")[0] for line in help_text("rate").splitlines()]
    assert {"dropout_rate", "learning_rate"} <= set(rates)
    assert not {"dataset_factory", "eval_interval"} & set(rates), "separate is no rate"
    documents = [line.partition(":")[0] for line in help_text("document").splitlines()]
    assert {"long_documents", "max_document_bytes"} == set(documents[:2]), "names first"
    assert "packing" in documents[2:]
    assert "experts" in help_text("num_experts")


def test_every_key_of_base_is_explained():
    for line in (CONFIGS / "base.yml").read_text().splitlines():
        key = line.partition(":")[0]
        if key.isidentifier():
            assert help_text(key).partition("\n")[2].partition(" # ")[2], key


def test_configuration_needs_no_jax():
    """A command's first line comes before JAX is imported, which takes seconds."""
    code = (
        "import sys; from src.run.resolve_config import load; load(['configs/base.yml']); print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONFIGS.parent, check=True)
    assert run.stdout == "False\n"


@schema.group
class Gate:
    """Model: attention"""

    attention_gate: str = declare(
        "none", "a gate on attention's output: none or sigmoid", ("none", "sigmoid"), per_layer=True
    )


@dataclasses.dataclass(frozen=True)
class GatedModel(schema.Model, Gate):
    """A model with one more key."""


def test_a_key_is_added_by_its_declaration_alone(monkeypatch):
    monkeypatch.setitem(schema.SECTIONS, "model", GatedModel)
    for name, key in schema.collect(schema.SECTIONS).items():
        monkeypatch.setitem(schema.KEYS, name, key)
    line = "attention_gate: none                # a gate on attention's output: none or sigmoid"
    _, _, attention = base_yml().partition("# ---- Model: attention\n")
    assert line in attention.partition("# ----")[0]
    assert help_text("attention_gate") == f"Model: attention\n{line}"
    assert "attention_gate" in help_for(["--help"])
    segments = "decoder_segments=[{repeats: 15, pattern: [{}]}, {pattern: [{attention_gate: none}]}]"
    config = load([BASE, "attention_gate=sigmoid", segments])
    assert config.model.attention_gate == "sigmoid"
    assert config.model.decoder_segments[1]["pattern"] == ({"attention_gate": "none"},)
    assert from_yaml(to_yaml(config)) == config
    assert list(compare_runs(load([BASE]), load([BASE, "attention_gate=sigmoid"]))[1]) == ["attention_gate"]
    with pytest.raises(UserError, match="attention_gate=tanh is none of none, sigmoid"):
        load([BASE, "attention_gate=tanh"])
