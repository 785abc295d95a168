"""Commands and names of MaxText and Pax: each works here or is answered."""

import re
import shlex
from pathlib import Path

import pytest

from src.config import load
from src.config_yaml import Plain, base, parse_argument
from src.errors import UserError
from src.foreign_keys import PROGRAMS, answer, document, example_arguments, table

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs" / "base.yml")

# Arguments of commands as MaxText's and its users' scripts have them, after `train.py configs/base.yml`.
WORKING = [
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
    ("quantization=int8", "quantisation"),
    ("quantization=fp8", "quantisation"),
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
    ("scale=3", "global_parameter_scale"),
    ("base_num_heads=8", "base_num_query_heads=8 base_num_kv_heads=8"),
    ("save_period=100", "checkpoint_period=100"),
    ("warmup_steps=100", "warmup_steps_fraction"),
    ("enable_dropout=False", "dropout_rate=0"),
    ("use_dpo=true", "fine-tuning"),
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
    ("--exp=tasks.lm.params.c4.C4Spmd1BAdam4Replicas", "model_name"),
    ("--job_log_dir=gs://bucket", "base_output_directory=gs://bucket"),
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


def test_accepted_keys_are_noted():
    notes = []
    load([BASE, "use_iota_embed=true", "ici_sequence_parallelism=1"], notes)
    assert [note.partition(",")[0] for note in notes] == ["use_iota_embed", "ici_sequence_parallelism=1"]


def test_a_secret_is_not_printed():
    notes = []
    load([BASE, "hf_access_token=hf_secret"], notes)
    assert "hf_secret" not in "".join(notes)


def names_of(program):
    section = table()[program]
    return [
        *section["renamed"],
        *(name for part in ("absent", "no_effect") for group in section[part] for name in group["keys"]),
    ]


def test_no_name_stands_twice_or_is_a_key_here():
    names = [name for program in PROGRAMS for name in names_of(program)]
    assert len(names) == len(set(names))
    assert not set(names) & set(base().defaults)


def test_values_are_of_keys_that_are_here():
    assert set(table()["MaxText"]["values"]) <= set(base().defaults)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_to_be_typed_can_be_typed(program):
    """Every key=value that an answer says to type is of a key in base.yml."""
    texts = []
    for template in table()[program]["renamed"].values():
        texts += template.values() if isinstance(template, dict) else [template]
    for text in texts:
        keys = re.findall(r"(\w+)[\w.]*=", text)
        assert set(keys) <= {*base().defaults, "key"}, text


def test_a_mistyped_key_is_not_taken_for_another_programs():
    for key in base().defaults:
        typos = {key[:i] + key[i + 1 :] for i in range(len(key))}
        typos |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
        for typo in typos - {*base().defaults, "scale"}:  # MaxText has mscale too, and had scale
            assert answer(typo, Plain("1")) is None, f"{typo}, for {key}"


def test_paxs_experiment_is_translated():
    config = load([BASE, *example_arguments()])
    # The README of Pax gives this experiment's sizes, mesh and batch.
    assert (config.base_num_decoder_layers, config.base_emb_dim, config.base_mlp_dim) == (48, 6144, 24576)
    assert (config.base_num_query_heads, config.head_dim, config.vocab_size) == (24, 256, 32768)
    assert (config.ici_fsdp_parallelism, config.dcn_data_parallelism) == (64, 2)
    assert (config.per_device_batch_size, config.max_target_length) == (16, 1024)
    weights = 48 * (4 * 6144 * 24 * 256 + 2 * 6144 * 24576)
    assert round(weights / 1e9) == 22


def test_values_typed_on_a_command_line_fill_templates():
    value = parse_argument("[1, 64, 1]", None, "ICI_MESH_SHAPE")
    assert "ici_fsdp_parallelism=64" in answer("ICI_MESH_SHAPE", value).sentence


def test_the_page_is_current():
    page = (ROOT / "docs" / "from_maxtext_and_pax.md").read_text()
    assert page == document(), "run: python -m src.foreign_keys > docs/from_maxtext_and_pax.md"
