"""A user's setting that nothing reads is refused, but for one that a later source made idle."""

import importlib
import inspect
import re

import pytest

from src.config.requirements import REQUIREMENTS
from src.config.schema import KEYS
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


def test_what_a_later_source_makes_idle_is_not(write):
    moe = write("moe.yml", "base_config: base.yml\nnum_experts: 8\nnum_experts_per_tok: 2\nadam_b1: 0.8\n")
    assert load([str(moe), "num_experts=1", "opt_type=adafactor"]).model.num_experts_per_tok == 2
    assert load([BASE, "model_name=mixtral-8x7b", "num_experts=1"]).model.num_experts_per_tok == 2
    below = write("below.yml", "base_config: moe.yml\nnum_experts: 1\n")
    assert load([str(below), "steps=3"]).model.num_experts == 1
    with pytest.raises(UserError, match=r"num_experts_per_tok=3 .on the command line. has no effect"):
        load([str(below), "num_experts_per_tok=3"])


def test_what_the_optimizer_of_a_rule_reads_is_not():
    rules = "optimizer_rules=[{match: output, opt_type: muon}]"
    config = load([BASE, "opt_type=sgd", "muon_beta=0.8", "adam_b1=0.8", rules])  # muon leaves vectors to adamw
    assert (config.step.muon_beta, config.step.adam_b1) == (0.8, 0.8)


def test_needs_are_of_keys_that_are_there():
    for need in REQUIREMENTS:
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
        ("prompt: a", "src.evaluate", "", ""),  # of a run's sample too
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
