"""`python -m src.evaluate RUN tasks=...` through lm-evaluation-harness, on tasks whose data are files."""

import importlib.util
import json

import numpy as np
import pytest

from src.extras.command_files import check_outputs
from src.extras.evaluation import evaluate
from src.system.errors import UserError
from tests import runs

LENGTH = 96
ROWS = [
    {"question": f"{a} or {b}", "choices": [a, b], "label": n % 2, "text": f"{a} is not {b}. " * (n + 1)}
    for n, (a, b) in enumerate([("red", "teal"), ("one", "seven"), ("gold", "tin"), ("up", "down")])
]
TASKS = {
    "my_choice": """
        output_type: multiple_choice
        doc_to_text: "{{question}}?"
        doc_to_choice: choices
        doc_to_target: label
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]""",
    "my_texts": """
        output_type: generate_until
        doc_to_text: "{{question}}:"
        doc_to_target: "{{choices[0]}}"
        generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]""",
    "my_bytes": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]""",
    "my_odd": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[0]}}"
        generation_kwargs: {num_beams: 4}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]""",
    "my_code": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[0]}}"
        unsafe_code: true
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tasks, one of which has no data."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, lines in {**TASKS, "my_lost": TASKS["my_choice"]}.items():
        file = "lost" if name == "my_lost" else "rows"
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/{file}.jsonl}}}}\n"
        text = "\n".join(line.strip() for line in lines.splitlines())
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: test\nfewshot_split: test{text}\n")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    corpus = runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")
    output = tmp_path_factory.mktemp("runs")
    keys = {"dataset_path": corpus, "steps": 3, "max_target_length": LENGTH}
    runs.run_here(base_output_directory=output, **keys)
    return output / "run"


def run(trained, folder, **keys):
    keys = {"include_path": folder, "trust_tasks": "true", **keys}
    return evaluate.main([str(trained), *(f"{key}={value}" for key, value in keys.items())])


def test_without_the_harness_its_command_is_named(trained, folder, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    with pytest.raises(UserError, match=r"lm-evaluation-harness, which is not installed: bash setup\.sh eval"):
        run(trained, folder, tasks="my_choice")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"limit": 2.5}, "limit=2.5 must be a whole number, or less than 1: a share"),
        ({"limit": -1}, "limit=-1.0 must be"),
        ({"limit": "many"}, "limit"),
        ({"num_fewshot": -2}, "num_fewshot=-2 must be 0 or more, or -1"),
        ({"num_fewshot": 1.5}, "num_fewshot"),
        ({"include_path": "s3://a"}, "include_path=s3://a: expected a path on this machine"),
        ({"trust_tasks": "false"}, "a task's .yaml file can run any code .* set trust_tasks=true"),
        ({"trust_tasks": "false", "include_path": "", "tasks": "arc_easy, my.yaml"}, "set trust_tasks=true"),
        ({"texts_path": "a", "scores_path": "b"}, "tasks and texts_path ask for different things"),
        ({"tasks": ""}, r"it needs tasks=\.\.\."),
    ],
)
def test_keys_are_checked_without_the_harness(keys, sentence, trained, folder):
    with pytest.raises(UserError, match=sentence):
        run(trained, folder, **{"tasks": "my_choice", "limit": 1, **keys})


# ---- With the harness: bash setup.sh eval


@pytest.fixture(scope="module")
def lm_eval():
    return pytest.importorskip("lm_eval", reason="bash setup.sh eval installs it")


@pytest.mark.usefixtures("lm_eval")
def test_tasks_of_every_kind_are_measured_and_written(trained, folder, tmp_path, capsys):
    tasks, path = "my_choice,my_t*,my_bytes", tmp_path / "results.json"
    metrics = run(trained, folder, tasks=tasks, limit=3, results_path=path)
    check_outputs({"results_path": str(path)})  # the same command may replace it
    written = json.loads(path.read_text())
    assert written["results"]["my_choice"]["acc,none"] == metrics["my_choice/acc,none"]
    assert 0 <= metrics["my_choice/acc,none"] <= 1
    assert metrics["my_texts/exact_match,none"] == 0
    assert metrics["my_bytes/bits_per_byte,none"] == pytest.approx(np.log2(258), abs=4)
    assert {task: each["effective"] for task, each in written["n-samples"].items()} == dict.fromkeys(
        ("my_choice", "my_texts", "my_bytes"), 3
    )
    assert written["config"]["model_args"]["load_parameters_path"] == str(trained)
    assert "|my_choice|" in capsys.readouterr().out.replace(" ", "")


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("tasks", ["my_evil", "{folder}/my_evil.yaml"])
def test_code_of_a_file_runs_only_where_it_is_trusted(trained, tmp_path, tasks):
    """The harness runs what `!function` names as it reads the file."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w').close()\ndef f(doc):\n    return ''\n")
    # Without a file of data the harness would look for some on the Hub, for minutes where there is no network.
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/lost.jsonl}}}}\ntest_split: test\n"
    (tmp_path / "my_evil.yaml").write_text(f"task: my_evil\n{data}doc_to_text: !function evil.f\n")
    keys = {"tasks": tasks.format(folder=tmp_path), "include_path": tmp_path}
    with pytest.raises(UserError, match="trust_tasks=true"):
        run(trained, tmp_path, **keys, trust_tasks="false")
    assert not (tmp_path / "was run").exists()
    with pytest.raises(UserError, match="the harness can't load"):
        run(trained, tmp_path, **keys, trust_tasks="true")
    assert (tmp_path / "was run").exists()


@pytest.mark.usefixtures("lm_eval")
def test_examples_before_a_question_and_what_does_not_fit_are_said(trained, folder, capsys):
    run(trained, folder, tasks=f"{folder}/my_choice.yaml", num_fewshot=3, limit=0.5, max_target_length=40)
    assert "requests do not fit max_target_length: they lost their beginning" in capsys.readouterr().out


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        pytest.param(
            {"tasks": "my_choise"},
            "tasks: my_choise is not one of the .* that the harness knows. Did you mean my_choice",
            marks=pytest.mark.long,  # it reads all tasks of the harness
        ),
        ({"tasks": "my_lost"}, "the harness can't load tasks=my_lost: .*Unable to find .*lost.jsonl"),
        ({"tasks": "my_code"}, "my_code runs code that a model writes, .* python -m src.convert to-hf"),
        ({"tasks": "my_odd"}, "num_beams is not one of do_sample, temperature"),
        ({"tasks": "my_choice", "num_fewshot": "20"}, "num_fewshot=20 is more than a task has examples for"),
        ({"tasks": "my_choice", "include_path": "nowhere"}, "include_path=nowhere: there is no such folder"),
        ({"tasks": "my_choice", "use_chat_template": "true"}, "this tokenizer has none"),
        ({"tasks": "my_choice", "results_path": "{folder}/rows.jsonl"}, "results_path=.*another file exists there"),
    ],
)
def test_what_can_not_be_measured_is_told(keys, sentence, trained, folder):
    keys = {key: value.replace("{folder}", str(folder)) for key, value in keys.items()}
    with pytest.raises(UserError, match=sentence):
        run(trained, folder, **keys)
