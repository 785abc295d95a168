"""A user's setting that nothing reads is refused, but for one that a later source made idle."""

import importlib
import inspect
import re

import pytest

from src.config.requirements import OF_TRAIN, REQUIREMENTS
from src.config.schema import KEYS
from src.config.unread_keys import UNREAD
from src.config.usage import TRAIN
from src.run.resolve_config import load
from src.system.errors import UserError
from tests.tiny import BASE

WINDOW = "sliding_window_size=8 (on the command line) has no effect: it needs attention_type=local_sliding"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("sliding_window_size=8", WINDOW),
        ("rope_factor=8", "rope_type=linear or llama3.1 or yarn"),
        ("rope_type=llama3.1", "rope_factor=a number above 1"),
        ("num_experts_per_tok=2", "num_experts=2 or more"),
        ("load_balance_loss_weight=0.01", "num_experts=2 or more"),
        ("num_experts=4 base_moe_mlp_dim=64 base_mlp_dim=128", "num_experts=1 or base_moe_mlp_dim=0"),
        ("opt_type=sgd mu_dtype=bfloat16", "it needs opt_type=adamw or "),
        (
            "opt_type=sgd adam_b1=0.8 optimizer_rules=[{match: output}]",
            "or optimizer_rules=[{opt_type: adamw or muon}]",
        ),
        ("muon_beta=0.8 optimizer_rules=[{match: output, opt_type: sgd}]", "optimizer_rules=[{opt_type: muon}]"),
        ("wsd_decay_steps_fraction=0.2", "lr_schedule_type=wsd"),
        ("dataset_name=c4/en:3.0.1", "dataset_type=tfds"),
        ("dataset_path=books eval_dataset_name=c4", "dataset_type=tfds"),
        ("dataset_type=tfds dataset_name=c4/en eval_split=test", "eval_dataset_path=... or eval_dataset_name=..."),
        ("dataset_type=custom dataset_factory=my_data:documents eval_split=test", "needs eval_dataset_path=..."),
        ("model_name=deepseek3-671b head_dim=64", "attention_type=global or local_sliding or chunk"),
        ("decoder_segments=[{repeats: -1, pattern: [{qk_nope_head_dim: 8}]}]", "attention_type=mla"),
        ("base_mlp_dim=64 decoder_segments=[{repeats: -1, pattern: [{base_mlp_dim: 32}]}]", "add decoder_segments=[]"),
        ("eval_datasets=[{name: a, dataset_path: x}] eval_dataset_path=b", "add eval_datasets=[]"),
        ("datasets=[{name: a, dataset_path: x}] train_split=a", "dataset_type=tfds or hf or custom"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(typed, says):
    words = re.split(r" (?=\w+=)", typed)
    with pytest.raises(UserError) as error:
        load([BASE, *words])
    assert says in str(error.value)
    assert "problems" not in str(error.value)


_SETS = "eval_datasets=[{name: a, dataset_path: x, eval_steps: 2}]"
_YARN = "rope_type=yarn rope_factor=4"
_HF = "dataset_type=hf dataset_path=x"
_TFDS = "dataset_type=tfds dataset_path=x datasets=[{name: a, dataset_name: b, dataset_path: y}]"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (f"{_HF} eval_dataset_name=b", "eval_dataset_name=b .*: it needs dataset_type=tfds or eval_dataset_path="),
        ("eval_dataset_path=x eval_fraction=0.5", "eval_fraction=0.5 .*: it needs eval_dataset_path=.empty"),
        (f"{_SETS} eval_fraction=0.5", "it needs eval_datasets=.empty"),
        (f"{_SETS} eval_steps=3", "eval_steps=3 .*: it needs eval_datasets=.an entry without eval_steps"),
        ("dataset_type=synthetic dataset_path=x", "dataset_path=x .*: it needs dataset_type=text or"),
        ("dataset_type=synthetic sample_length=9 tokenizer_path=x", "sample_length=9, tokenizer_path=x .* have no"),
        ("dataset_path=x use_sft=true dataset_column=a", "dataset_column=a .*: it needs use_sft=false"),
        ("dataset_path=x use_sft=true max_document_bytes=99", "max_document_bytes=99 .*: it needs use_sft=false"),
        (
            "dataset_type=array_record dataset_path=x array_record_format=text dataset_column=a",
            "dataset_column=a .* or array_record_format=example or json",
        ),
        ("enable_checkpointing=false checkpoint_period=9", "checkpoint_period=9 .* needs enable_checkpointing=true"),
        ("decode_sampling_strategy=greedy decode_seed=3", "decode_seed=3 .*: it needs decode_sampling_strategy="),
        ("decode_sampling_temperature=0 decode_seed=3", "it needs decode_sampling_temperature=a positive number"),
        ("trust_tasks=true tasks=arc_easy", "trust_tasks=true .*: it needs include_path=... or tasks=FILE.yaml"),
        (
            "rope_type=dynamic rope_factor=2",
            r"rope_factor=2.0 .*=.not dynamic. or max_target_length=.more than original",
        ),
        ("rope_type=proportional", "rope_type=proportional .* or partial_rotary_factor=a number below 1"),
        (
            "lr_schedule_type=wsd wsd_decay_steps_fraction=0 learning_rate_final_fraction=0.5",
            "=0.5 .*: it needs lr_schedule_type=.not wsd. or wsd_decay_steps_fraction=a positive number",
        ),
        (
            "warmup_steps_fraction=1 lr_schedule_type=exponential",
            "=exponential .*: it needs warmup_steps_fraction=a num",
        ),
        (f"{_YARN} mscale=0.5", "mscale=0.5 .*: it needs mscale_all_dim=a positive number"),
        (
            f"{_YARN} mscale_all_dim=0.5",
            "mscale_all_dim=0.5 .*: it needs mscale=a positive number or attention_type=mla",
        ),
        (
            "num_experts=8 num_experts_per_tok=2 n_routing_groups=2 topk_routing_group=2",
            "they need n_routing_groups=.more",
        ),
        (
            "dataset_type=synthetic packing=false long_documents=truncate",
            "long_documents=truncate .* needs dataset_type=",
        ),
        ("attention_type=gated_delta position_type=none", "position_type=none .*: it needs attention_type=global or"),
        ("attention_type=gated_delta attention=blocked", "attention=blocked .*: it needs attention_type=global or"),
        ("quiet=true log_period=5", "log_period=5 .*: it needs quiet=false or weight_dtype=bfloat16"),
        (
            "load_parameters_path=x init_weights_seed=5",
            "init_weights_seed=5 .*: it needs load_parameters_path=.empty. or",
        ),
        (
            "load_full_state_path=x init_weights_seed=5",
            "init_weights_seed=5 .*: it needs load_full_state_path=.empty. or",
        ),
        # Settings of a layer or a dataset in a list.
        (
            "decoder_segments=[{repeats: -1, pattern: [{rope_type: proportional}]}]",
            "^rope_type=proportional .decoder_segments, segment 1. has",
        ),
        ("datasets=[{name: a, dataset_path: x, split: b}]", r"^split=b .datasets, a. has no effect: .*=tfds or hf"),
        ("eval_datasets=[{name: a, dataset_path: x, array_record_format: text}]", r"=text .eval_datasets, a. has"),
        ("datasets=[{name: a, dataset_type: synthetic, dataset_path: x}]", r"^dataset_path=x .datasets, a. has"),
    ],
)
def test_a_setting_that_earlier_versions_accepted_is_listed(typed, says):
    notes = []
    load([BASE, *re.split(r" (?=\w+=)", typed)], notes, command="")
    (note,) = notes
    assert re.search(says, note)
    assert " no effect: " in note


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("", ""),
        ("src.train", "eval_interval=5 eval_fraction=0.5 eval_mode=rolling eval_steps=2"),
        ("src.train", "sample_length=5 decode_seed=3"),
        ("src.train", "decode_metrics=a:b eval_interval=5 decode_seed=3 decode_prompt_tokens=8 decode_num_prompts=2"),
        ("", "rope_type=dynamic original_max_position_embeddings=1024"),
        ("", "rope_type=proportional partial_rotary_factor=0.5"),
        ("", "attention_type=gated_delta position_type=learned"),
        ("", f"{_YARN} mscale=0.5 mscale_all_dim=0.5"),
        ("", "num_experts=8 num_experts_per_tok=2 n_routing_groups=4 topk_routing_group=2 routing_group_score=top2"),
        ("", "quiet=true log_period=5 weight_dtype=bfloat16 adam_b1=0.9 adam_b2=0.9"),
        ("", "load_parameters_path=x init_weights_seed=5 dropout_rate=0.1"),
        # The final norm, embeddings and evaluation data read what each layer or dataset sets for itself.
        ("", "normalization=layer decoder_segments=[{repeats: -1, pattern: [{normalization: rms}]}]"),
        ("", "dropout_rate=0.1 decoder_segments=[{repeats: -1, pattern: [{dropout_rate: 0.0}]}]"),
        ("", "position_type=learned decoder_segments=[{repeats: -1, pattern: [{position_type: none}]}]"),
        ("src.train", f"{_TFDS} eval_interval=5 eval_dataset_name=c"),
        ("src.train", f"{_TFDS} eval_interval=5 eval_datasets=[{{name: b, dataset_name: c}}]"),
        ("", f"{_HF} eval_dataset_path=y eval_dataset_name=b"),
        ("", "dataset_type=synthetic datasets=[{name: a, dataset_type: text, dataset_path: x}] sample_length=9"),
        # They lack the tokenizer that a text needs, which is an error, and that logits can do without.
        ("src.decode", "dataset_type=synthetic"),
        ("src.evaluate", "dataset_type=synthetic tokens_path=a logits_path=b"),
        # Without them, checks would refuse these types.
        ("src.evaluate", "dataset_type=tfds dataset_name=a eval_dataset_name=b"),
        ("src.evaluate", "dataset_type=parquet dataset_path=a eval_dataset_path=b"),
    ],
)
def test_settings_with_an_effect_are_not_listed(command, typed):
    notes = []
    load([BASE, *re.split(r" (?=\w+=)", typed)] if typed else [BASE], notes, command=command)
    assert notes == []


def test_a_factor_of_rotated_heads_replaces_the_two_keys_that_yarn_computes_it_from():
    notes = []
    load([BASE, *f"{_YARN} rope_attention_factor=2 mscale=1 mscale_all_dim=0.5".split()], notes, command="")
    assert [re.sub(" .*needs", "", note) for note in notes] == [
        "mscale=1.0 rope_attention_factor=0.0",
        "mscale_all_dim=0.5 rope_attention_factor=0.0 or attention_type=mla",
    ]


def test_a_key_does_not_depend_on_keys_that_the_command_does_not_read():
    """Tasks say how to sample; the seed is the command's."""
    notes = []
    load([BASE, "tasks=a", "decode_sampling_strategy=greedy", "decode_seed=3"], notes, command="src.evaluate")
    (note,) = notes
    assert note.startswith("decode_sampling_strategy=greedy (on the command line) has no effect: it is for src.train")


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("src.evaluate", "eval_mode=rolling eval_steps=-1"),
        ("src.evaluate", "steps=-1"),
        ("src.decode", "remat_policy=custom"),
        ("src.train", "eval_mode=rolling"),
    ],
)
def test_a_key_that_is_not_read_is_not_checked_against_others(command, typed):
    notes = []
    load([BASE, *typed.split()], notes, command=command)
    (note,) = notes
    assert note.startswith(typed.split()[0])


def test_a_runs_keys_for_training_do_not_restrict_its_evaluation(tmp_path):
    keys = "enable_rampup_batch_size: true\nper_device_batch_size: 8\nper_device_batch_size_start: 4\n"
    (tmp_path / "config.yml").write_text(f"{keys}eval_mode: rolling\neval_steps: 4\n")
    argv = [str(tmp_path), "per_device_batch_size=1", "eval_steps=-1"]
    assert load(argv, [], uses_weights=True, command="src.evaluate").evaluation.eval_steps == -1
    with pytest.raises(UserError, match=r"^enable_rampup_batch_size: .* does not grow"):
        load(argv, [], command="src.train")


def test_a_key_that_is_not_read_may_be_one_that_another_needs():
    """A run's folder has dataset_type=tfds, of which src.decode reads nothing."""
    notes = []
    load([BASE, "dataset_type=tfds", "dataset_name=a"], notes, command="src.decode")
    assert [note.partition(" ")[0] for note in notes] == ["dataset_type=tfds", "dataset_name=a"]
    with pytest.raises(UserError, match=r"^dataset_type=tfds needs dataset_name$"):
        load([BASE, "dataset_type=tfds", "decode_path=x", "decode_prompt_tokens=4"], command="src.decode")


def test_what_is_not_read_must_still_be_valid():
    with pytest.raises(UserError, match=r"eval_mode=new is none of reset, rolling"):
        load([BASE, "eval_mode=new"], command="src.evaluate")


def test_a_number_is_compared_only_with_a_valid_one():
    with pytest.raises(UserError, match=r"^original_max_position_embeddings .on the command line.: "):
        load([BASE, "rope_type=dynamic", "original_max_position_embeddings=many"])


def test_an_invalid_key_that_others_depend_on_is_one_problem():
    with pytest.raises(UserError, match=r"^decode_prompt_tokens .on the command line.: "):
        load([BASE, "dataset_path=x", "decode_prompt_tokens=many"], command="src.decode")


def test_samples_without_a_file_to_write_them_to_are_refused_if_typed(write):
    says = "decode_samples=3 .* has no effect: src.decode reads it only with decode_path="
    with pytest.raises(UserError, match=says):
        load([BASE, "decode_samples=3"], command="src.decode")
    notes, file = [], write("of_train.yml", "decode_samples: 3\ndecode_metrics: a:b\neval_interval: 5\n")
    load([str(file)], notes, command="src.decode")
    assert re.search(says, "".join(notes))


@pytest.mark.parametrize(
    ("command", "typed", "says"),
    [
        (
            "src.decode",
            "learning_rate=1 steps=3",
            "learning_rate=1.0, steps=3 .* have no effect: they are for src.train",
        ),
        ("src.evaluate", "remat_policy=none", "remat_policy=none .* has no effect: it is for src.train"),
        ("src.decode", "dataset_path=x", "src.decode reads it only with decode_prompt_tokens=a positive number"),
        ("src.decode", "prompt=a prompt_path=b", "prompt=a .*src.decode reads it only with prompt_path=.empty"),
        ("src.evaluate", "sample_length=3", "sample_length=3 .*: it is for src.train"),
        ("src.evaluate", "tasks=a eval_steps=3 dataset_path=x", "src.evaluate reads them only with tasks=.empty"),
        (
            "src.evaluate",
            "eval_dataset_path=x dataset_path=y",
            "^dataset_path=y .* only with dataset_type=tfds or .* or tokens or eval_dataset_path=.empty",
        ),
        ("src.evaluate", "eval_mode=rolling", "eval_mode=rolling .*: it is for src.train"),
        ("src.decode", "base_output_directory=x", "base_output_directory=x .*: it is for src.train"),
        ("src.decode", "num_vocab_tiling=2", "num_vocab_tiling=2 .*: it is for src.train"),
        (
            "src.train",
            "eval_steps=3 eval_mode=rolling",
            "eval_steps=3, eval_mode=rolling .*: they need eval_interval=1",
        ),
        ("src.train", "eval_dataset_path=x", "eval_dataset_path=x .*: it needs eval_interval=1 or more"),
        ("src.train", "decode_seed=3", "decode_seed=3 .*: it needs sample_length=1 or more or decode_metrics="),
        ("src.train", _TFDS, "^dataset_path=x .* or datasets=.an entry without dataset_path. or eval_dataset_name="),
        ("src.train_dpo", "eval_steps=3", "eval_steps=3 .* src.train_dpo reads it only with eval_interval=1 or more"),
        ("src.train_dpo", "decode_seed=3", "decode_seed=3 .*: it is for src.train"),
    ],
)
def test_what_a_command_does_not_read_is_listed(command, typed, says, write):
    notes = []
    words = re.split(r" (?=\w+=)", typed)
    load([BASE, *words], notes, command=command)
    assert re.search(says, "".join(notes))
    assert len(notes) == 1
    file = write("mine.yml", "base_config: base.yml\n" + "".join(f"{word.replace('=', ': ', 1)}\n" for word in words))
    assert load([str(file)], notes, command=command)
    assert notes[1] == notes[0].replace("on the command line", f"in {file}")


def test_what_a_later_source_makes_idle_is_not(write):
    moe = write("moe.yml", "base_config: base.yml\nnum_experts: 8\nnum_experts_per_tok: 2\nadam_b1: 0.8\n")
    assert load([str(moe), "num_experts=1", "opt_type=adafactor"]).model.num_experts_per_tok == 2
    assert load([BASE, "model_name=mixtral-8x7b", "num_experts=1"]).model.num_experts_per_tok == 2
    below = write("below.yml", "base_config: moe.yml\nnum_experts: 1\n")
    assert load([str(below), "steps=3"]).model.num_experts == 1
    with pytest.raises(UserError, match=r"num_experts_per_tok=3 .on the command line. has no effect"):
        load([str(below), "num_experts_per_tok=3"])


def test_what_entries_of_a_later_source_replace_is_not(write):
    file = write("columns.yml", "dataset_column: a\n")
    entry = "[{name: x, dataset_path: y, dataset_column: b}]"
    assert load([str(file), f"datasets={entry}", f"eval_datasets={entry}"]).data.dataset_column == "a"
    with pytest.raises(UserError, match=r"dataset_column=a .* datasets and eval_datasets sets it for each entry"):
        load([BASE, "dataset_column=a", f"datasets={entry}", f"eval_datasets={entry}"])


def test_what_the_optimizer_of_a_rule_reads_is_not():
    rules = "optimizer_rules=[{match: output, opt_type: muon}]"
    config = load([BASE, "opt_type=sgd", "muon_beta=0.8", "adam_b1=0.8", rules])  # muon leaves vectors to adamw
    assert (config.step.muon_beta, config.step.adam_b1) == (0.8, 0.8)


def test_muon_does_not_read_the_limit_of_adamws_updates():
    """Not even in the part that it leaves to adamw, so that its runs do not change."""
    with pytest.raises(UserError, match=r"adam_clip_threshold=1.0 .* has no effect: it needs opt_type=adamw or"):
        load([BASE, "opt_type=muon", "adam_clip_threshold=1"])


def test_needs_are_of_keys_that_are_there():
    for need in (*REQUIREMENTS, *OF_TRAIN, *sum(UNREAD.values(), ())):
        assert {*need.keys, *need.one_of} <= KEYS.keys()


COMMANDS = (
    *("train", "train_dpo", "train_compile", "evaluate", "decode"),
    *("inspect_data", "tokenize_dataset", "train_tokenizer"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_refuses_what_is_typed_for_another(name):
    """By its own `main`, before it does anything."""
    command = importlib.import_module(f"src.{name}")
    key = "texts_path=a scores_path=b" if name == "decode" else "quantize_weights=int8"
    with pytest.raises(UserError, match=rf"has no effect: it is for src.\w+, and this is src.{name}\b"):
        command.main([BASE, *key.split()])
    usage = TRAIN
    if name != "train":
        (module,) = set(re.findall(r"from (src\.extras\S+) import", inspect.getsource(command)))
        usage = importlib.import_module(module).USAGE
    assert usage.command == f"src.{name}"


def test_keys_are_of_commands_that_are_there():
    named = {name for key in KEYS.values() for name in key.commands}
    assert named <= {f"src.{name}" for name in (*COMMANDS, "verify")}
    # And base.yml says so in each such key's line.
    alone = {key.name: key.commands[0] for key in KEYS.values() if len(key.commands) == 1}
    told = {key.name: re.match(r"(src\.\w+): ", key.comment) for key in KEYS.values()}
    assert {name: found[1] for name, found in told.items() if found} == alone


@pytest.mark.parametrize(
    ("setting", "command", "typed", "in_file"),
    [
        ("quantize_weights: int8", "src.train", "refused", "refused"),  # a run in 8 bits is what it seems to ask for
        ("quantize_weights: int8", "src.decode", "", ""),
        ("process_count: 4", "src.train", "refused", "listed"),
        ("process_count: 4", "src.inspect_data", "", ""),
        ("tokenized_path: tokens", "src.train", "refused", "listed"),
        ("prompt_path: prompts.txt", "src.train", "refused", "listed"),
        ("interactive: true", "src.evaluate", "refused", "listed"),
        ("compile_topology: v5p-8", "src.train", "listed", "listed"),  # the same line is typed for both
        ("profiler: xplane", "src.decode", "refused", "listed"),
        ("profiler: xplane", "src.inspect_data", "", ""),
        ("compile_xla_flags: auto", "src.evaluate", "refused", "listed"),
        ("compile_xla_flags: auto", "src.train_compile", "", ""),
        ("prompt: a", "src.evaluate", "listed", "listed"),
        ("prompt: a", "src.train", "", ""),  # of its sample
    ],
)
def test_a_key_of_another_command(setting, command, typed, in_file, write):
    word, value = setting.split(": ")
    file = write("shared.yml", f"base_config: base.yml\n{setting}\n")
    for argv, expected in (([BASE, f"{word}={value}"], typed), ([str(file)], in_file)):
        notes = []
        if expected == "refused":
            with pytest.raises(UserError, match=rf"{word}={value} .* has no effect: it is for .*{command}$"):
                load(argv, notes, command=command)
        else:
            load(argv, notes, command=command)
        assert [bool(re.search(rf"{word}={value} .* has no effect: it is for", note)) for note in notes] == (
            [True] if expected == "listed" else []
        )
    # A file's value that the line takes back is nobody's.
    assert load([str(file), f"{word}={KEYS[word].default}"], command=command)[word] == KEYS[word].default
