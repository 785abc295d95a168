"""Commands and names of MaxText, Pax and other trainers: each works here or is answered."""

import functools
import re
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from scripts.names_page import page
from src.config.schema import KEYS
from src.config.yaml import Plain, convert, dump, parse_argument
from src.extras.migration_hints import (
    RETIRED_FLAGS,
    Explained,
    Renamed,
    is_maxtext_default,
    known_names,
    migration_hint,
    own_value,
    read_table,
)
from src.model.flops import count_params
from src.run.resolve_config import load
from src.step.trace import trace_train_step
from src.system.errors import UserError, from_here
from tests.tiny import spec_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_maxtext_and_pax.md"
NAMES = Path(__file__).parent / "names"
BASE = str(ROOT / "configs" / "base.yml")

# Arguments of commands as MaxText's and its users' scripts have them, after `train.py configs/base.yml`.
WORKING = [
    "--globally_use_hardware_rng --jax_array_in_pax=true",
    "run_name=my_first_run",
    "run_name=r base_output_directory=gs://my-bucket steps=10 log_period=5",
    "steps=15 per_device_batch_size=6 enable_checkpointing=false remat_policy=full global_parameter_scale=16"
    " max_target_length=2048 base_output_directory=gs://b dataset_path=gs://d use_iota_embed=true reuse_example_batch=1"
    " dataset_type=synthetic attention='flash' gcs_metrics=true",
    "steps=15 per_device_batch_size=1 enable_checkpointing=False remat_policy=minimal global_parameter_scale=128"
    " ici_fsdp_parallelism=-1 ici_tensor_parallelism=8 dataset_type=synthetic attention='flash' quantization=\"\"",
    "global_parameter_scale=16 per_device_batch_size=4 steps=10000 learning_rate=1e-3",
    "run_name=r dcn_data_parallelism=16 ici_fsdp_parallelism=8 profiler=xplane hardware=gpu model_name=llama2-7b",
    "collect_stack_trace=True stack_trace_to_cloud=True stack_trace_interval_seconds=60",
    "model_name=default async_checkpointing=false checkpoint_period=20 max_num_checkpoints_to_keep=2",
    "ici_context_parallelism=1 dcn_pipeline_parallelism=1 num_experts=1 compile_topology=",
    "enable_goodput_recording=False monitor_goodput=False dump_hlo=True use_vertex_tensorboard=False",
    "load_parameters_path=gs://b/0/items scan_layers=false weight_dtype=bfloat16 megablox=False sa_block_q=1024",
    "mlp_activations=['gelu','linear'] logits_via_embedding=True decoder_block=llama2 enable_dropout=True",
    "adam_b1=0.9 adam_b2=0.95 adam_eps=1.e-8 adam_weight_decay=0.1 gradient_clipping_threshold=1. mu_dtype=bfloat16",
    "lr_schedule_type=wsd wsd_decay_steps_fraction=0.2 wsd_decay_style=linear learning_rate_final_fraction=0.0",
    "init_weights_seed=1 data_shuffle_seed=2 enable_data_shuffling=True z_loss_multiplier=1e-4",
]

# Commands that ask for something that is not here, or has another name, and what the answer says.
ANSWERED = [
    ("dataset_type=c4_mlperf", "dataset_type=tfds dataset_name=c4/en:3.0.1"),
    ("dataset_type=hf hf_path=allenai/c4", "JSONL"),
    ("dataset_type=grain grain_train_files=/data/*.array_record", "dataset_type=array_record dataset_path=/data/*"),
    ("grain_train_mixture_config_path=mix.json", "datasets=[{name: a, weight: 7"),
    ("tfds_data_dir=/data", "dataset_path=/data"),
    ("model_name=llama5-7b", "llama2-7b"),
    ("interleave_moe_layer_step=2", "decoder_segments"),
    ("quantization=nvfp4", "no 4-bit matmuls, because jax.nn computes their gradients in 16 bits: quantization=mxfp8"),
    ("quantization=fp8_full", "quantization=fp8"),
    ("attention=cudnn_flash_te", "attention=cudnn_flash"),
    ("hardware=gpu_multiprocess", "hardware=gpu"),
    ("opt_type=adam_pax", "opt_type=adamw"),
    ("ici_sequence_parallelism=4", "ici_context_parallelism"),
    ("ici_tensor_sequence_parallelism=4", "logical_axis_rules.norm_length=[context, tensor]"),
    ("num_layers_per_pipeline_stage=1", "num_pipeline_repeats=-1"),
    ("dcn_fsdp_transpose_parallelism=2", "context, expert and tensor"),
    ("remat_policy=save_dot_except_mlp", "remat_policy=custom"),
    ("query_proj=offload", "remat_custom.query_proj=offload"),
    ("cosine_learning_rate_final_fraction=0.2", "learning_rate_final_fraction=0.2"),
    ("enable_profiler=true", "profiler=xplane"),
    ("enable_wandb=true", "type report_to=[wandb] instead"),
    ("scale=3", "global_parameter_scale"),
    ("base_num_heads=8", "base_num_query_heads=8 base_num_kv_heads=8"),
    ("save_period=100", "checkpoint_period=100"),
    ("warmup_steps=100", "warmup_steps_fraction"),
    ("enable_dropout=False", "dropout_rate=0"),
    ("use_dpo=true", "python -m src.train_dpo"),
    ("use_qk_norm=true", "qk_norm=head"),
    ("decoder_block=gpt3", "position_type=learned"),
    ("NUM_LAYERS=48", "base_num_decoder_layers=48"),
    ("ICI_MESH_SHAPE=[1,64,1]", "ici_data_parallelism=1 ici_fsdp_parallelism=64 ici_tensor_parallelism=1"),
    ("ICI_MESH_SHAPE=[1,2,3,4]", "ici_fsdp_parallelism=..."),
    ("DCN_MESH_SHAPE='[2, 1, 1]'", "dcn_data_parallelism=2"),
    ("FPROP_DTYPE=jnp.bfloat16", "dtype=bfloat16"),
    ("CHECKPOINT_POLICY=layers.AutodiffCheckpointType.SAVE_NOTHING", "remat_policy=full"),
    ("TRAINABLE_POSITION_EMB=False", "type position_type=sinusoidal instead"),
    ("PERCORE_BATCH_SIZE=16", "per_device_batch_size=16"),
    ("LR_COS_WARMUP=265", "warmup_steps_fraction"),
    ("--exp=tasks.lm.params.c4.C4Spmd1BAdam4Replicas", "type configs/recipes/pax-c4-1b-v4-8.yml instead"),
    ("--exp=C4Spmd22BAdam2xv4_128", "configs/recipes/pax-22b-v4-128.yml dcn_data_parallelism=2"),
    ("NORM_POLICY=primer_hybrid", "normalization_placement=both"),
    ("ATTEN_LOGIT_CAP=50", "attn_logits_soft_cap=50"),
    ("restore_checkpoint_step=500", "load_full_state_path"),
    ("--server_addr=10.0.0.1:1234", "coordinator_address=10.0.0.1:1234"),
    ("lora.lora_rank=8", "lora_rank=8"),
    ("--exp=tasks.lm.params.mine.Mine", "model_name=NAME"),
    ("--job_log_dir=gs://bucket", "base_output_directory=gs://bucket"),
    ("--exp tasks.lm.params.c4.C4Spmd1BAdam4Replicas --mode decode_once", "mode is a Pax name; type prompt=TEXT"),
    ("--exp tasks.lm.params.c4.C4Spmd1BAdam4Replicas --mode decode_once", "configs/recipes/pax-c4-1b-v4-8.yml"),
    ("block_size=1024", "type max_target_length=1024 instead"),
    ("n_embd=768", "base_emb_dim=768"),
    ("max_iters=5000", "steps=5000"),
    ("num_train_epochs=3", "steps says how long"),
    ("init_from=resume", "type run_name=NAME instead"),
    ("resume_from_checkpoint=true", "type the run_name of the run"),
    ("hidden_size=512", "base_emb_dim=512"),
    ("lr=1e-3", "learning_rate=1e-3"),
    ("max_grad_norm=1.0", "gradient_clipping_threshold=1.0"),
    ("gradient_checkpointing=true", "remat_policy=full"),
    ("batch_size=8", "per_device_batch_size=8"),
    ("num_samples=3", "decode_samples=3 decode_path=FILE"),
    ("--training.seq_len=4096", "max_target_length=4096"),
    ("--optimizer.lr=3e-4", "learning_rate=3e-4"),
    ("--parallelism.data_parallel_shard_degree=8", "ici_fsdp_parallelism=8"),
    ("enable_lora=true", "lora_rank=8"),
    ("use_indexer=true", "Sparse attention is not in this version"),
]


@pytest.mark.parametrize("command", WORKING)
def test_a_maxtext_command_works(command):
    notes = []
    load([BASE, *shlex.split(command)], notes)
    assert len(notes) == len(set(notes)), "each key without effect has one line"


@pytest.mark.parametrize(("command", "says"), ANSWERED)
def test_a_command_is_answered(command, says):
    with pytest.raises(UserError) as error:
        load([BASE, *shlex.split(command)])
    assert says in str(error.value)
    assert "unknown key" not in str(error.value)


def test_maxtexts_own_base_yml_is_ours_in_the_command_to_paste():
    with pytest.raises(UserError) as error:
        load(["src/maxtext/configs/base.yml", "steps=7", "base_num_heads=8"])
    words = "configs/base.yml steps=7 base_num_query_heads=8 base_num_kv_heads=8"
    assert str(error.value).endswith(f"Type: {from_here(sys.executable)} -m src.train {words}")


@pytest.mark.parametrize("word", ["init_from=resume", "num_samples=3"])
def test_a_name_that_only_the_user_knows_is_in_no_command_to_paste(word):
    with pytest.raises(UserError) as error:
        load([BASE, word])
    assert "Type:" not in str(error.value)


def test_accepted_keys_are_noted():
    notes = []
    load([BASE, "use_iota_embed=true", "ici_sequence_parallelism=1"], notes)
    assert [note.split()[1] for note in notes] == ["use_iota_embed", "ici_sequence_parallelism=1"]


def test_a_secret_is_not_printed():
    notes = []
    load([BASE, "hf_access_token=hf_secret"], notes)
    assert "hf_secret" not in "".join(notes)


def typed_names(file):
    """The keys of MaxText's base.yml, those that its types.py has beside them, or the flags of Pax's main.py, of 2026.

    Each is `name=value`, with its default there.
    """
    return shlex.split((NAMES / f"{file}.txt").read_text())


@pytest.mark.parametrize(("file", "count"), [("maxtext", 684), ("maxtext_types", 137), ("pax", 36)])
def test_all_their_names_are_answered(file, count):
    """Each is taken with its default, or the error says why; with another value too."""
    words = typed_names(file)
    assert len(words) == len(set(words)) == count
    for name, _, default in (word.partition("=") for word in words):
        error = refusal(f"{name}={default}")
        assert not error or (name in error and "unknown key" not in error)
        assert name in KEYS or migration_hint(name, Plain("7"))


@functools.cache
def refusal(*words):
    """The error with which a command is refused; "" where it is not."""
    try:
        load([BASE, *words])
    except UserError as error:
        return str(error)
    return ""


# Of MaxText's base.yml, what is not taken with its own default: MinText does not do it, or has another key for it.
NOT_TAKEN = {
    *("save_checkpoint_on_start", "normalize_embedding_logits", "num_layers_per_pipeline_stage", "grain_worker_count"),
    *("muon_weight_decay", "muon_consistent_rms", "mesh_axes", "logical_axis_rules"),
}
BESIDE = {  # which MaxText has by default, and a path that nothing can have by default
    "dataset_type": "dataset_path=x dataset_name=c4",
    "dataset_name": "dataset_path=x dataset_type=tfds",
    "eval_dataset_name": "dataset_path=x dataset_type=tfds dataset_name=c4",
    "tokenizer_type": "tokenizer_path=x",
}


def test_maxtexts_own_defaults_are_taken():
    words = {word.partition("=")[0]: word for word in typed_names("maxtext")}
    refused = {key for key, word in words.items() if refusal(word, *BESIDE.get(key, "").split())}
    assert refused == NOT_TAKEN


def test_a_step_is_made_with_all_of_maxtexts_own_defaults_on_one_command():
    """All that are taken, but for the data, of a model that is small."""
    own = "dataset_type=synthetic steps=2 per_device_batch_size=1 max_target_length=128 vocab_size=64 head_dim=8"
    own += " base_emb_dim=16 base_mlp_dim=32 base_num_query_heads=2 base_num_kv_heads=2 base_num_decoder_layers=2"
    left_out = {*NOT_TAKEN, *BESIDE, *(word.partition("=")[0] for word in own.split())}
    words = [word for word in typed_names("maxtext") if word.partition("=")[0] not in left_out]
    config = load([BASE, *words, *own.split()])
    loss = trace_train_step(config, jax.devices(), {}).jax_traced.out_info[1]["loss"]
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("max_num_checkpoints_to_keep=None", -1), ("compile_topology_num_slices=-1", 1)],
        *[("routed_score_func=", "softmax"), ("mlp_activations_limit=-1.0", 0)],
        ("attention=cudnn_flash_jax", "cudnn_flash"),
    ],
)
def test_their_value_is_taken_for_ours(word, value):
    assert load([BASE, word])[word.partition("=")[0]] == value


def test_a_default_of_maxtexts_without_effect_is_noted_and_another_value_is_refused():
    notes = []
    load([BASE, "rope_factor=40"], notes)
    assert notes == [
        "rope_factor=40.0 (on the command line) has no effect: it needs rope_type=linear or llama3.1 or yarn or "
        "dynamic or longrope or proportional"
    ]
    with pytest.raises(UserError, match="has no effect"):
        load([BASE, "rope_factor=8"])
    assert load([BASE, "rope_factor=40", "rope_type=yarn"]).model.rope_factor == 40


def test_other_defaults_are_listed():
    """A key whose default is not MaxText's stands in the page, with both."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().partition("## Other defaults")[2].splitlines()]
    listed = {row[0]: row[1:] for row in rows if len(row) == 3 and row[0] in KEYS}
    for key, _, text in (word.partition("=") for word in typed_names("maxtext")):
        if key in KEYS and key not in ("mesh_axes", "logical_axis_rules"):
            default = KEYS[key].default
            theirs = convert(own_value(key, parse_argument(text, default, key)), default)
            if theirs == default or is_maxtext_default(key, theirs):
                assert key not in listed
            else:
                assert listed[key] == [text or "empty", dump(default)], key


def test_keys_in_the_environment_are_said(monkeypatch):
    for name in ("M_STEPS", "M_HF_ACCESS_TOKEN", "M_PATH", "m_steps", "M_ENABLE_GOODPUT_RECORDING"):
        monkeypatch.setenv(name, "secret")
    notes = []
    assert load([BASE], notes).run.steps == KEYS["steps"].default
    assert [note.split()[0] for note in notes] == ["M_ENABLE_GOODPUT_RECORDING", "M_HF_ACCESS_TOKEN", "M_STEPS"]
    assert "type steps=..." in notes[-1]
    assert "secret" not in "".join(notes)


def test_keys_in_the_environment_are_said_where_one_of_them_is_missed(monkeypatch):
    monkeypatch.setenv("M_DATASET_PATH", "gs://bucket")
    with pytest.raises(UserError, match=r"needs dataset_path\nM_DATASET_PATH in the environment"):
        load([BASE, "dataset_type=array_record"])


def test_a_command_without_a_file_is_of_base_yml():
    """As MaxText's of 2026 are."""
    assert load(["steps=7", "learning_rate=1e-3"]) == load([BASE, "steps=7", "learning_rate=1e-3"])


def test_the_pages_tables_are_made_from_ours():
    text = PAGE.read_text()
    assert text == page(text), "run: python scripts/names_page.py"
    left_out = re.sub(r"(?m)^\| `.*\n", "", text)
    assert len(left_out) < len(text) / 4
    assert text == page(left_out)


def test_no_name_stands_twice_or_is_a_key_here():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]*)`", row.split(" | ")[0])]
    tables = read_table()
    values = [by_value for table in tables.values() for by_value in table.get("values", {}).values()]
    sizes = [table["sizes"] for table in tables.values() if "sizes" in table]
    assert len(names) == len(set(names)) == sum(map(len, (known_names(), tables[RETIRED_FLAGS], *values, *sizes)))
    assert not set(known_names()) & set(KEYS)


def test_values_are_of_keys_that_are_here():
    assert {key for table in read_table().values() for key in table.get("values", ())} <= set(KEYS)


def typed_texts():
    for name, entry in known_names().items():
        if isinstance(entry, Renamed):
            for text in entry.template.values() if isinstance(entry.template, dict) else [entry.template]:
                if words := text.partition("  # ")[0]:
                    yield pytest.param(words, id=f"{entry.program} {name} {words}")


# What a hint leaves to the user.
LEFT_OPEN = {"NAME": "llama2-7b", "FOLDER": "llama2-7b", "FILE": "prompts.txt", "TEXT": "hi", "KEY=VALUE": "steps=1"}
# What a key needs beside it, which a command with the hinted name has already or is told next; and values it can have.
NEEDS = {
    "tokenizer_path": "tokenizer_type=sentencepiece",
    "trainable_position_size": "position_type=learned max_target_length=1",
    "lora_rank": "load_parameters_path=x",
    "remat_custom": "remat_policy=custom",
    "eval_dataset_path": "dataset_path=x",
    "eval_mode": "eval_steps=1",
    "dataset_type=tfds": "dataset_name=c4",
    "coordinator_address": "coordinator_address=a:1 num_processes=2 process_id=0",
    "num_processes": "coordinator_address=a:1 num_processes=2 process_id=0",
    "process_id": "coordinator_address=a:1 num_processes=2 process_id=0",
}
SAMPLES = {
    **{"decode_sampling_top_k": 3, "decode_sampling_nucleus_p": 0.5, "sliding_window_size": 8},
    **{"coordinator_address": "a:1", "num_processes": 2, "process_id": 1},
    "model_name": "llama2-7b",
}


@pytest.mark.parametrize("words", list(typed_texts()))
def test_what_is_to_be_typed_is_taken(words):
    """Each word is a file, or a key with a value that loads: nothing is renamed to what is not here."""
    for word, filler in LEFT_OPEN.items():
        words = words.replace(word, filler)
    file, *words = [BASE, *shlex.split(words)] if "=" in words.split()[0] else shlex.split(words)
    arguments = []
    for word in words:
        key, _, text = word.partition("=")
        sample = SAMPLES.get(key, KEYS[key.partition(".")[0]].default)
        text = re.sub(r"{[0-9]}|\.\.\.", dump("x" if sample == "" else sample), text)
        arguments.append(f"{key}={text}")
    needs = [need for word in arguments for need in NEEDS.get(word, NEEDS.get(re.match(r"\w+", word)[0], "")).split()]
    load([str(ROOT / file), *needs, *arguments])


def reasons():
    return {(entry.program, entry.why) for entry in known_names().values() if isinstance(entry, Explained)}


def test_nothing_that_is_missing_is_here():
    """What is said not to be in this version is found nowhere in base.yml."""
    here = Path(BASE).read_text()
    missing = [why.removesuffix(" is not in this version") for _, why in reasons() if "not in this version" in why]
    assert len(missing) >= 16
    for feature in missing:
        assert not re.search(rf"\b{feature}", here, re.IGNORECASE), feature


def test_reasons_name_keys_that_are_here():
    words = {"XLA_FLAGS", "xla_dump_to", "JAX_ENABLE_CHECKS"}
    for _, why in reasons():
        named = set(re.findall(r"(?<![\w./-])([A-Za-z]\w+)=", why)) - words
        assert named <= {*KEYS, *known_names()}, why


def test_a_mistyped_key_is_not_taken_for_another_programs():
    for key in KEYS:
        typos = {key[:i] + key[i + 1 :] for i in range(len(key))}
        typos |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
        for typo in typos - {*KEYS, "scale"}:  # MaxText has mscale too, and had scale
            assert migration_hint(typo, Plain("1")) is None, f"{typo}, for {key}"


def test_values_typed_on_a_command_line_fill_templates():
    value = parse_argument("[1, 64, 1]", None, "ICI_MESH_SHAPE")
    assert "ici_fsdp_parallelism=64" in migration_hint("ICI_MESH_SHAPE", value).sentence


@pytest.mark.parametrize(
    ("typed", "parameters"),
    [
        # nanoGPT's setting for a CPU: 12 D^2 weights a layer, the embedding (tied) and the positions, and its norms.
        (
            "--n_layer=4 --n_head=4 --n_embd=128 --block_size=64 vocab_size=256",
            4 * 12 * 128**2 + (256 + 64) * 128 + (2 * 4 + 1) * 2 * 128,
        ),
        # A Llama: queries and outputs D^2 each, keys and values of half as many heads, three matrices of D F.
        (
            "hidden_size=64 num_attention_heads=4 num_key_value_heads=2 intermediate_size=100 num_hidden_layers=2 "
            "vocab_size=256",
            2 * (3 * 64**2 + 3 * 64 * 100 + 2 * 64) + 2 * 256 * 64 + 64,
        ),
    ],
)
def test_the_corrected_command_trains_the_model_of_the_other_program(typed, parameters):
    with pytest.raises(UserError) as error:
        load([BASE, *typed.split(), "dataset_type=synthetic"])
    *_, command = str(error.value).splitlines()
    config = load(shlex.split(command.partition("src.train ")[2]))
    assert count_params(spec_of(config)) == parameters


@pytest.mark.parametrize("typed", ["--n_embd=128", "--n_head=3 --n_embd=128", "MODEL_DIMS=64", "hidden_size=64"])
def test_there_is_no_corrected_command_for_sizes_of_which_a_part_is_unknown(typed):
    with pytest.raises(UserError) as error:
        load([BASE, *typed.split()])
    assert "Type:" not in str(error.value)
