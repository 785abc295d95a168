"""What each mistake in a configuration is answered with."""

import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.config.dataset_spec import eval_specs
from src.config.keys import Range
from src.config.schema import KEYS
from src.run.resolve_config import load
from src.system.errors import UserError, from_here

BASE = str(Path(__file__).parents[2] / "configs" / "base.yml")


def error_of(*arguments, config=BASE):
    """The message that a command line is answered with."""
    with pytest.raises(UserError) as error:
        load([str(config), *arguments])
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["stpes=3"], ["unknown key stpes", "steps"]),
        (["device_batch_size=3"], ["unknown key device_batch_size", "per_device_batch_size"]),
        (["steps"], ["steps", "key=value"]),
        (["--steps=3"], ["steps=3"]),
        (["steps=many"], ["steps", "an integer", "a string (many)"]),
        (["steps=1.5"], ["steps", "an integer", "a number (1.5)"]),
        (["steps=true"], ["steps", "an integer", "true"]),
        (["steps=None"], ["steps", "an integer", "nothing"]),
        (["steps=0"], ["steps=0", "1 or more, or -1"]),
        (["steps=1:30"], ["steps", "an integer"]),
        (["steps=-1"], ["learning_rate_schedule_steps"]),
        (["checkpoint_period=None"], ["one is also saved at the end"]),
        (["learning_rate=fast"], ["learning_rate", "a number", "a string (fast)"]),
        (["learning_rate=nan"], ["learning_rate", "expected a number, got a number that is not finite (.nan)"]),
        (["learning_rate=0"], ["learning_rate", "positive"]),
        (["packing=yes"], ["packing", "true or false", "a string ('yes')"]),
        (["packing=1"], ["packing", "true or false", "an integer (1)"]),
        (["mlp_activations=silu"], ["mlp_activations", "a list", "a string (silu)"]),
        (
            ["mlp_activations=[swish]"],
            ["swish", "silu, gelu, gelu_exact, quick_gelu, relu, squared_relu, linear, plus_one"],
        ),
        (["mlp_activations=[]"], ["mlp_activations", "empty"]),
        (["mlp_activations=[a"], ["mlp_activations", "line 1, column 3"]),
        (["remat_custom=3"], ["remat_custom", "a mapping", "an integer (3)"]),
        (["steps.x=3"], ["steps.x", "not a mapping"]),
        (["dtype=float16"], ["dtype=float16", "bfloat16, float32"]),
        (["attention=magic"], ["attention=magic", "cudnn_flash"]),
        (["hardware=quantum"], ["hardware=quantum", "(empty), cpu, gpu, tpu"]),
        (["remat_policy=save"], ["remat_policy=save", "save_qkv_proj"]),
        (["remat_policy=custom"], ["remat_custom"]),
        (
            ["rope_type=longrope", "head_dim=2", "rope_short_factor=[1e400]", "rope_long_factor=[2]"],
            ["rope_short_factor"],
        ),
        (["rope_type=yarn", "rope_factor=4", "rope_max_timescale=1"], ["rope_max_timescale=1", "2 or more"]),
        (["weight_dtype=bfloat16", "adam_b2=0.999"], ["adam_b2=0.999", "never decay", "weight_dtype=float32"]),
        (["mu_dtype=bfloat16", "adam_b1=0.997"], ["adam_b1=0.997", "mu_dtype=float32"]),
        (["remat_custom.out_proj=device"], ["remat_policy=custom"]),
        (["remat_policy=custom", "remat_custom.out=device"], ["no array out", "out_proj"]),
        (["remat_policy=custom", "remat_custom.out_proj=disk"], ["remat_custom.out_proj=disk", "offload"]),
        (["global_parameter_scale=3"], ["global_parameter_scale=3", "power of two"]),
        (["global_parameter_scale=0"], ["global_parameter_scale=0", "power of two"]),
        (["base_num_kv_heads=3"], ["base_num_query_heads=16", "base_num_kv_heads=3"]),
        (["head_dim=7"], ["head_dim=7", "even"]),
        (["adam_b2=1"], ["adam_b2=1.0", "less than 1"]),
        (["warmup_steps_fraction=1.5"], ["warmup_steps_fraction=1.5", "from 0 to 1"]),
        (["profiler=xplane", "steps=5"], ["steps 2 to 6, but steps=5"]),
        (["lr_schedule_type=wsd", "warmup_steps_fraction=0.6", "wsd_decay_steps_fraction=0.6"], ["exceeds 1"]),
        (["per_device_batch_size=0"], ["per_device_batch_size=0.0", "positive"]),
        (["ici_data_parallelism=-1"], ["ici_data_parallelism and ici_fsdp_parallelism"]),
        (["dcn_fsdp_parallelism=0"], ["dcn_fsdp_parallelism=0", "1 or more, or -1"]),
        (["mesh_axes=[data, model]"], ["mesh_axes=[data, model]", "data, stage, fsdp, context, expert, tensor"]),
        (["logical_axis_rules.mpl=[]"], ["no mpl", "mlp"]),
        (
            ["logical_axis_rules.mlp=[model]"],
            ["logical_axis_rules.mlp=[model]", "data, stage, fsdp, context, expert, tensor"],
        ),
        (["logical_axis_rules.mlp=[tensr]"], ["data, stage, fsdp, context, expert, tensor, or [].", "mean tensor?"]),
        (["logical_axis_rules={mlp: []}"], ["lacks batch", "logical_axis_rules.batch=[]"]),
        (["trainable_position_size=2048"], ["position_type=learned"]),
        (["position_type=learned", "trainable_position_size=512"], ["trainable_position_size=512", "2048"]),
        (["num_vocab_tiling=3"], ["max_target_length=2048", "num_vocab_tiling=3"]),
        (["tokenizer_type=sentencepiece"], ["tokenizer_path"]),
        (["tokenizer_type=huggingface"], ["tokenizer_path", "tokenizer.json"]),
        (["tokenizer_path=a.model"], ["tokenizer_type=sentencepiece", "tokenizer_type=huggingface"]),
        (["use_sft=true"], ["use_sft=true", ".jsonl", "dataset_path"]),
        (["trainable_parameters=[*norm.scale]"], ["not valid YAML", "needs quotes: '*norm.scale'"]),
        (["trainable_parameters=[attention.key, *norm*]"], ["needs quotes: '*norm*'"]),
        (["use_sft=true", "dataset_path=x", "dataset_type=synthetic"], ["use_sft=true", "dataset_type=text"]),
        (["eval_interval=5", "eval_fraction=0"], ["eval_dataset_path", "eval_fraction"]),
        (["load_parameters_path=a", "load_full_state_path=b"], ["exclude each other"]),
        (["coordinator_address=a:1"], ["num_processes", "process_id"]),
        (["coordinator_address=a:1", "num_processes=2", "process_id=2"], ["process_id=2", "num_processes=2"]),
        (["coordinator_address=localhost", "num_processes=2", "process_id=0"], ["=localhost must be HOST:PORT"]),
        (["coordinator_address=a:99999", "num_processes=2", "process_id=0"], ["=a:99999 must be", "1 to 65535"]),
        (["accept_changes=[vocab]"], ["vocab", "vocab_size"]),
        (["accept_changes=[data_rule]"], ["data_rule", "data_rules"]),
        (["model_name=lama2"], ["model_name=lama2", "llama2-7b"]),
        (["model_name=zzz"], ["There are ", " more. A name ending in .yml is a path"]),
        (["decoder_segments=3"], ["decoder_segments", "a list"]),
        (["decoder_segments=[{repeats: 2}]"], ["segment 1", "pattern"]),
        (["decoder_segments=[{pattern: 3}]"], ["segment 1", "pattern must be a list"]),
        (["decoder_segments=[{repeats: 0, pattern: [{}]}]"], ["segment 1", "repeats=0"]),
        (["decoder_segments=[{repeats: x, pattern: [{}]}]"], ["segment 1: repeats", "an integer", "x"]),
        (["decoder_segments=[{shared: 1, pattern: [{}]}]"], ["segment 1: shared", "true or false", "(1)"]),
        (["decoder_segments=[{repeats: 5, pattern: [{}]}]"], ["5 layers", "the model has 16"]),
        (["decoder_segments=[{repeats: -1, pattern: [{}, {}, {}]}]"], ["16 of 16 layers", "3"]),
        (["decoder_segments=[{repeats: -1, pattern: [{}]}, {repeats: -1, pattern: [{}]}]"], ["only one segment"]),
        (["decoder_segments=[{repeats: 16, pattern: [{base_emb_dim: 3}]}]"], ["base_emb_dim cannot differ by layer"]),
        (["decoder_segments=[{repeats: 16, pattern: [{head_dm: 3}]}]"], ["head_dm", "Did you mean head_dim"]),
        (["decoder_segments=[{repeats: 16, pattern: [{mlp_bias: 3}]}]"], ["mlp_bias", "true or false"]),
        (["decoder_segments=[{repeats: 16, pattern: [{normalization: z}]}]"], ["segment 1", "rms, layer"]),
        (["decoder_segments=[{repeats: 16, pattern: [{position_type: learned}]}]"], ["only rope or none"]),
        (["decoder_segments=[{repeats: 16, pattern: [{base_num_kv_heads: 5}]}]"], ["segment 1", "kv_heads=5"]),
    ],
)
def test_mistakes(arguments, parts):
    message = error_of(*arguments)
    assert "problems" not in message, "one mistake is one problem"
    for part in parts:
        assert part in message


def test_all_problems_of_an_entry_are_reported_together():
    message = error_of(
        "optimizer_rules=[{mach: a, learning_rate_scale: -1, opt_type: adam}, {match: b, weight_decay: x}]"
    )
    for problem in (
        "entry 1: no setting mach. Did you mean match?",
        "learning_rate_scale=-1.0 must be 0 or more",
        "opt_type=adam is none of",
        "it needs match",
        "entry 2: weight_decay: expected a number",
    ):
        assert problem in message, message


def test_a_colon_without_a_blank_is_named():
    message = error_of("datasets=[{name:web, weight: 7}]")
    assert "no setting name:web. YAML needs a space after the colon" in message


def test_all_problems_are_reported_together():
    wrong = ("stpes=3", "steps=many", "capacity_factor=2", "dtype=int8", "base_num_kv_heads=3")
    message = error_of(*wrong, config="nope.yml")
    assert message.startswith("6 problems")
    for part in ("no file nope.yml", "stpes", "many", "capacity_factor", "dtype=int8", "base_num_kv_heads=3"):
        assert part in message


def test_what_depends_on_a_wrong_key_is_not_reported():
    message = error_of("base_num_kv_heads=x", "base_num_query_heads=9")
    assert message.startswith("base_num_kv_heads")
    assert "problems" not in message


def test_a_command_without_a_yaml_file_is_of_base():
    assert load(["steps=3"]) == load([BASE, "steps=3"])
    with pytest.raises(UserError, match=r"first argument is a YAML file .*configs/quickstart\.yml"):
        load([])


def test_blanks_around_the_equals_sign_are_one_problem():
    with pytest.raises(UserError) as error:
        load([BASE, "steps", "=", "20", "eval_interval=-1"])
    assert str(error.value).startswith("steps = 20 eval_interval=-1: type key=value without spaces around =")


@pytest.mark.parametrize("words", [["steps", "20"], ["quiet=true", "steps", "20"]])
def test_a_blank_instead_of_the_equals_sign_is_one_problem(words):
    with pytest.raises(UserError) as error:
        load([BASE, *words, "eval_interval=-1"])
    assert str(error.value) == "steps 20: type key=value, as in steps=20"


@pytest.mark.parametrize("argv", ["steps=3", {}, {"steps": 3}, [BASE, 3]])
def test_what_is_no_command_line_is_told_what_is(argv):
    with pytest.raises(UserError, match=r'a list of words, such as \["configs/base.yml"'):
        load(argv)


@pytest.mark.parametrize(
    ("unreadable", "other", "said"),
    [
        ("ici_fsdp_parallelism=x", "logical_axis_rules.nope=[data]", "logical_axis_rules has no nope"),
        ("num_vocab_tiling=x", "enable_rampup_batch_size=true per_device_batch_size_start=99", "does not grow to"),
        ("use_sft=maybe", "dataset_type=hf", "dataset_type=hf needs dataset_path"),
    ],
)
def test_a_value_that_cannot_be_read_hides_no_other_mistake(unreadable, other, said):
    message = error_of(unreadable, *other.split())
    assert "expected" in message
    assert said in message


@pytest.mark.parametrize(
    ("words", "corrected"),
    [
        ("configs/base.yml --steps=3", "configs/base.yml steps=3"),
        ("--steps 3 --lr 1e-3", "steps=3 learning_rate=1e-3"),
        ("steps=3 configs/base.yml", "configs/base.yml steps=3"),
        (
            "configs/base.yml block_size=128 wandb_log=true 'prompt=a b'",
            "configs/base.yml max_target_length=128 'prompt=a b'",
        ),
        (
            "--exp=a.C4Spmd1BAdam4Replicas --job_log_dir=/x",
            "configs/recipes/pax-c4-1b-v4-8.yml base_output_directory=/x",
        ),
        ("configs/base.yml learning_rat=1e-3", "configs/base.yml learning_rate=1e-3"),
        ("configs/base.yml lr=1e-3 num_train_epochs=3", ""),  # which nobody can translate
        ("configs/base.yml lr=fast", ""),
        ("configs/base.yml stpes=3", ""),  # it may be two keys
    ],
)
def test_the_corrected_command_stands_last(words, corrected):
    with pytest.raises(UserError) as error:
        load(shlex.split(words))
    *message, last = str(error.value).splitlines()
    assert last == f"Type: {from_here(sys.executable)} -m src.train {corrected}" if corrected else "Type:" not in last
    assert message or not corrected


def test_a_model_of_the_hub_is_to_be_downloaded():
    message = error_of("model_name=Qwen/Qwen3-0.6B")
    assert "type hf://Qwen/Qwen3-0.6B" in message
    assert "Did you mean" not in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps: 3\nsteps: 4\n", ["line 2", "steps is given twice"]),
        ("steps: [1\n", ["not valid YAML", "line 2, column 1"]),
        ("\tsteps: 3\n", ["not valid YAML", "line 1, column 1"]),
        ("steps: 3\nlora_parameters:\n  - *wi\n", ["line 3, column 5", "needs quotes: '*wi'"]),
        ("- steps\n", ["a list", "key: value"]),
        ("steps\n", ["a string", "key: value"]),
        ("steps: '3'\n", ["steps", "an integer", "a string"]),
        ("steps: !!python/name:os.system\n", ["not valid YAML", "line 1"]),
        ("base_config: nowhere.yml\n", ["no file", "nowhere.yml"]),
        ("base_config: mine.yml\n", ["circle"]),
    ],
)
def test_mistakes_in_a_yaml_file(write, text, parts):
    message = error_of(config=write("mine.yml", text))
    assert "mine.yml" in message or "nowhere.yml" in message
    for part in parts:
        assert part in message


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00\x01")
    assert "binary.yml" in error_of(config=tmp_path / "binary.yml")


def test_an_empty_file_is_base(write):
    assert load([str(write("empty.yml", "# nothing\n"))]) == load([BASE])


def test_a_model_file_describes_a_model_alone(write):
    model = write("model.yml", "base_emb_dim: 64\nlearning_rate: 1\n")
    assert "learning_rate does not describe a model" in error_of(f"model_name={model}")


def test_maxtexts_path_of_base_yml_is_answered():
    assert "configs/base.yml" in error_of(config="MaxText/configs/base.yml")


def test_every_number_of_base_has_one_range():
    for key in KEYS.values():
        assert isinstance(key.allowed, Range) == (type(key.default) in (int, float)), key.name


def test_choices_are_of_words():
    chosen = [key for key in KEYS.values() if key.allowed and not isinstance(key.allowed, Range)]
    assert len(chosen) > 20
    assert all(key.default in (*key.allowed, ()) for key in chosen)


SCALARS = st.sampled_from(["", "a", "'a'", "-1", "0", "3", "1e400", "1e-3", "true", "None", "[", "a: b", "data"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(st.sampled_from(["pattern", "repeats", "mlp", "head_dim", "[a]"]), inner).map(
            "{{{0[0]}: {0[1]}}}".format
        ),
    ),
    max_leaves=4,
)


ODD_VALUES = (
    "[{pattern: }]",
    "[{}]",
    "[[{a: 1}]]",
    "[[a]]",
    "{a: {b: c}}",
    "{~: 1}",
    "[~]",
    "[2001-01-01]",
    "!!binary aGk=",
)


@pytest.mark.parametrize("text", ODD_VALUES)
def test_an_odd_value_of_every_key_is_taken_or_answered(text):
    for key in KEYS:
        try:
            load([BASE, f"{key}={text}"])
        except UserError as error:
            assert key in str(error)  # noqa: PT017  some are taken


@settings(deadline=None, max_examples=300)
@given(key=st.sampled_from([*KEYS, "remat_custom.a", "steps.b", "NUM_LAYERS", "context"]), text=VALUES)
def test_any_value_is_taken_or_answered(key, text):
    answer = ""
    try:
        load([BASE, f"{key}={text}"])
    except UserError as error:
        answer = str(error)
    assert not answer or key.partition(".")[0] in answer


@pytest.mark.parametrize(("given", "written"), [("texts_path", "scores_path"), ("tokens_path", "logits_path")])
def test_what_is_read_is_never_written_over(given, written, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "in")
    with pytest.raises(UserError, match=f"{written}=.*/link is the file that {given} names"):
        load([BASE, f"{given}={tmp_path}/in", f"{written}={tmp_path}/link"])


@pytest.mark.parametrize("key", ["tokenizer_path", "scores_path", "logits_path", "prompt_path"])
def test_a_path_that_only_this_machine_can_read_or_write_is_not_taken_for_a_folder_named_gs(key):
    said = error_of("tokenizer_type=sentencepiece", "texts_path=a", "tokens_path=b", f"{key}=gs://bucket/x")
    assert f"{key}=gs://bucket/x: expected a path on this machine" in said


@pytest.mark.parametrize("key", ["base_output_directory", "dataset_path", "load_parameters_path"])
@pytest.mark.parametrize("path", ["gs://", "gs:///runs", "s3://"])
def test_a_path_without_a_bucket_is_refused_before_a_store_is_asked(key, path):
    assert f"{key}={path} names no bucket" in error_of(f"{key}={path}")


def test_an_evaluation_set_shares_the_training_sets_folder_only_if_both_are_of_tfds():
    """TFDS keeps all its datasets in one folder, which is not the folder of texts."""
    tfds = ["dataset_type=tfds", "dataset_path=/tfds", "dataset_name=a"]
    (spec,) = eval_specs(load([BASE, *tfds, "eval_datasets=[{name: b, dataset_name: c}]"]).data)
    assert spec.dataset_path == "/tfds"
    text = "eval_datasets=[{name: b, dataset_type: text}]"
    assert "needs eval_datasets, b: dataset_path" in error_of(*tfds, text)
    other = "eval_datasets=[{name: b, dataset_type: tfds, dataset_name: c}]"
    (spec,) = eval_specs(load([BASE, "dataset_path=/texts", other]).data)
    assert spec.dataset_path == ""  # TFDS_DATA_DIR, or the home folder's


@pytest.mark.parametrize("nothing", ["null", "None", "", '""'])
def test_an_entry_whose_name_or_pattern_is_null_lacks_it(nothing):
    """A dataset without a name would be taken for the one that top-level keys describe."""
    for key in ("datasets", "eval_datasets"):
        assert "it needs a name" in error_of(f"{key}=[{{name: {nothing}, dataset_type: synthetic}}]")
    for key in ("optimizer_rules", "load_weights_rules"):
        assert "it needs match" in error_of(f"{key}=[{{match: {nothing}}}]")
    load([BASE, 'datasets=[{name: "null", dataset_type: synthetic}]'])  # a text


def test_a_synthetic_mixture_is_not_evaluated_on_data_that_nobody_named():
    """The top-level keys describe Python's own source, if they say nothing."""
    synthetic = "datasets=[{name: a, dataset_type: synthetic}]"
    assert "set eval_datasets" in error_of(synthetic, "eval_interval=5")
    data = load([BASE, synthetic, "dataset_type=synthetic", "eval_interval=5"]).data
    assert [spec.dataset_type for spec in eval_specs(data)] == ["synthetic"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("~no_user/run", "path=~no_user/run: ~no_user is not a user of this machine"),
        ("a" * 300, "is too long for a path"),
        ("gs://", "path=gs:// names no bucket"),
        ("ftp://host/run", "expected a path on this machine"),
    ],
)
def test_the_path_of_a_rule_is_checked_as_that_of_all_weights_is(path, problem):
    for key in (f"load_parameters_path={path}", f"load_weights_rules=[{{match: embedding, path: '{path}'}}]"):
        assert problem in error_of(key)


@pytest.mark.parametrize("increment", ["1e-320", "1e-300"])
def test_a_ramp_with_more_sizes_than_memory_can_list_is_refused(increment):
    keys = ("enable_rampup_batch_size=true", f"per_device_batch_size_increment={increment}")
    assert "does not grow to per_device_batch_size=12" in error_of(*keys)
