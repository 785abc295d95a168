"""A user's setting that nothing reads is refused, but for one that a later source made idle."""

import importlib
import inspect
import re

import pytest

from src.config.requirements import REQUIREMENTS
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
_HF = "dataset_type=hf dataset_path=x"


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
        # Settings of a dataset in a list.
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
        ("", "eval_interval=5 eval_fraction=0.5"),
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


def test_a_key_does_not_depend_on_keys_that_the_command_does_not_read():
    """Tasks say how to sample; the seed is the command's."""
    notes = []
    load([BASE, "tasks=a", "decode_sampling_strategy=greedy", "decode_seed=3"], notes, command="src.evaluate")
    (note,) = notes
    assert note.startswith("decode_sampling_strategy=greedy (on the command line) has no effect: it is for src.train")


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
    ],
)
def test_what_a_command_does_not_read_is_listed(command, typed, says, write):
    notes = []
    load([BASE, *typed.split()], notes, command=command)
    assert re.search(says, "".join(notes))
    assert len(notes) == 1
    file = write(
        "mine.yml", "base_config: base.yml\n" + "".join(f"{word.replace('=', ': ')}\n" for word in typed.split())
    )
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
    for need in (*REQUIREMENTS, *sum(UNREAD.values(), ())):
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
    assert named <= {f"src.{name}" for name in COMMANDS}
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
