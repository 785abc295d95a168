"""What src.inspect_data prints, against the texts that are there."""

import json
import re

import numpy as np
import pytest

from src.data.open import open_sources
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.datasets import inspect_data
from src.extras.datasets.inspect_data import main, rows_of_process, segments
from src.run import resolve_config
from src.system.errors import UserError
from tests import runs
from tests.data.one_source import train_batches
from tests.data.test_huggingface import CHAT_ML, TOKENS, byte_level, write_folder

SMALL = {"max_target_length": 32, "data_shuffle_seed": 1}


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch):
    """Of how fast batches are made: as users are told it takes two seconds."""
    monkeypatch.setattr(inspect_data, "_MEASURED_SECONDS", 0.1)


def inspect(capsys, tmp_path, **keys):
    path = {} if "datasets" in keys else {"dataset_path": tmp_path}
    main(runs.arguments(**{**path, **SMALL, **keys}))
    return capsys.readouterr().out


def rows_shown(printed):
    return [int(row) for row in re.findall(r"^step \d+, row (\d+)", printed, re.MULTILINE)]


@pytest.fixture
def texts(tmp_path):
    found = [f"{n}:" + "ab" * (3 * n) for n in range(12)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in found))
    return found


def test_rows_are_shown_as_text_with_where_documents_begin_and_end(capsys, tmp_path, texts):
    printed = inspect(capsys, tmp_path)
    assert rows_shown(printed) == list(range(8))
    whole = re.findall(r"begins     ends .*\n +'(.*)'", printed)
    assert whole
    assert set(whole) <= set(texts)
    for text in re.findall(r"continues  .*\n +'(.*)'", printed):
        assert any(text in other and not other.startswith(text) for other in texts)
    assert "12 of 12" not in printed  # the stream goes on after an epoch: a hundred documents are checked
    assert "100 of 100 documents decode to text that encodes to the same ids" in printed
    assert "filled       100.00%" in printed


def test_the_hosts_of_a_job_share_the_rows_that_one_process_has(capsys, tmp_path, texts):
    def row_texts(printed):
        return re.findall(r"^step.*\n(?:  .*\n)+", printed, re.MULTILINE)

    # As many devices per host, so as many rows per host: two hosts' batches are those of one with twice the rows.
    whole = row_texts(inspect(capsys, tmp_path))
    parts = [
        row_texts(inspect(capsys, tmp_path, per_device_batch_size=0.5, process_count=2, process_index=index))
        for index in range(2)
    ]
    assert parts[0] + parts[1] == whole
    assert len(whole) == 8


def test_of_a_stream_the_rows_of_other_processes_are_not_made_up(capsys, tmp_path, monkeypatch):
    code = "import grain\n\ndef made(config, split):\n"
    code += "    return grain.MapDataset.source([str(n) for n in range(90)]).to_iter_dataset()\n"
    (tmp_path / "my_counting.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"dataset_path": "", "dataset_type": "custom", "dataset_factory": "my_counting:made"}
    assert "'0'" in inspect(capsys, tmp_path, **keys, eval_interval=-1)
    with pytest.raises(UserError, match="process_count=2: this dataset is streamed per process"):
        inspect(capsys, tmp_path, **keys, process_count=2, process_index=1)


def test_the_batches_after_those_shown_are_explained(capsys, tmp_path, texts):
    for count, shown in ((1, "1 batch shown"), (2, "2 batches shown")):
        printed = inspect(capsys, tmp_path, inspect_num_steps=count)
        assert re.search(rf"^checked +{shown}, and \d+ after, to measure speed$", printed, re.MULTILINE)


def test_later_steps_are_those_that_a_run_comes_to(capsys, tmp_path, texts):
    both = inspect(capsys, tmp_path, inspect_num_steps=2)
    later = inspect(capsys, tmp_path, inspect_first_step=1)
    assert later[later.index("step 1, row 0") : later.index("checked")] in both


def test_the_batches_of_a_ramp_have_the_rows_that_full_ones_would_have(capsys, tmp_path, texts):
    def rows_of(**keys):
        printed = inspect(capsys, tmp_path, **keys)
        return re.findall(r"^step \d+, row \d+: .*\n((?:  .*\n)+)", printed, re.MULTILINE), printed

    full, _ = rows_of(inspect_num_steps=2)
    sizes = {"per_device_batch_size_start": 0.25, "per_device_batch_size_increment": 0.25, "global_rampup_samples": 9}
    ramped, printed = rows_of(enable_rampup_batch_size="true", inspect_first_step=1, inspect_num_steps=3, **sizes)
    assert "2 rows to step 2, 4 rows to step 3, 6 rows to step 4, 8 from step 5 on, after 14 rows" in printed
    assert ramped == full[2:14]  # 2, 4 and 6 rows
    with pytest.raises(UserError, match="a process's rows depend on the mesh"):
        inspect(capsys, tmp_path, enable_rampup_batch_size="true", process_count=2, **sizes)


def test_padding_and_what_does_not_count_are_told(capsys, tmp_path):
    lines = [{"prompt": "p" * n, "completion": "c" * n} for n in range(1, 9)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    keys = {"packing": "false", "use_sft": "true", "max_target_length": 40}
    printed = inspect(capsys, tmp_path, **keys)
    # Of a pair with n characters each 2n + 1 tokens have a target, n + 1 of which count.
    for n in range(1, 9):
        assert f"documents 1, tokens {2 * n + 1} of 40, in the loss {n + 1}\n" in printed
        assert f"in the loss: '{'c' * n}'\n" in printed
    filled = sum(2 * n + 1 for n in range(1, 9)) / (8 * 40)
    assert f"{filled:.2%}" in printed


@pytest.mark.parametrize(("end", "endless"), [("", True), ("{{ eos_token }}", False)])
def test_a_template_without_an_end_token_is_told(capsys, tmp_path, end, endless):
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}" + end + "{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    folder = write_folder(tmp_path / "model", byte_level(), tokenizer_config={**TOKENS, "chat_template": template})
    lines = [{"prompt": "p" * n, "completion": "c" * n} for n in (3, 4)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = {"tokenizer_type": "huggingface", "tokenizer_path": folder, "vocab_size": 400}
    for only in ("true", "false"):
        keys = {"use_sft": "true", "sft_train_on_completion_only": only, "max_target_length": 32, **model}
        printed = inspect(capsys, tmp_path / "chat.jsonl", **keys)
        assert ("; 2 have no end token, so that the model does not learn to stop" in printed) == endless


def test_special_tokens_of_chats_are_shown_and_each_turn_in_the_loss(capsys, tmp_path):
    folder = write_folder(tmp_path / "model", byte_level(), tokenizer_config={**TOKENS, "chat_template": CHAT_ML})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[3]["weight"] = 0
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': messages, 'id': 7})}\n" * 3)
    model = {"tokenizer_type": "huggingface", "tokenizer_path": folder, "vocab_size": 400}
    printed = inspect(capsys, tmp_path / "chat.jsonl", use_sft="true", packing="false", max_target_length=99, **model)
    assert "in the loss: 'b<|end|> | f<|end|>'\n" in printed
    assert "'<|start|>user\\na<|end|>\\n<|start|>assistant\\nb<|end|>\\n<|start|>user" in printed
    assert printed.count("these fields have no effect: id\n") == 1


@pytest.mark.parametrize("packing", ["true", "false"])
def test_conversations_of_a_template_begin_and_end_where_they_do(capsys, tmp_path, packing):
    """ChatML: no conversation begins with bos or ends with eos."""
    folder = write_folder(tmp_path / "model", byte_level(), tokenizer_config={**TOKENS, "chat_template": CHAT_ML})
    lines = [{"prompt": "p" * n, "completion": "c" * n} for n in (3, 4, 5, 6, 40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    printed = inspect(
        capsys,
        tmp_path / "chat.jsonl",
        **{"packing": packing, "use_sft": "true", "max_target_length": 64, "inspect_num_steps": 3},
        **{"tokenizer_type": "huggingface", "tokenizer_path": folder, "vocab_size": 400},
    )
    assert re.search(r"conversations +1 of 5 looked at are longer than a row of 64 and cut; what the assi", printed)
    parts = re.findall(r"(begins|continues) +(ends|truncated) .*\n +'(.*)'", printed)
    for begins, ends, text in parts:
        assert (begins == "begins") == text.startswith("<|start|>user")
        assert (ends == "ends") == (text.endswith("c<|end|>\\n"))
    assert {part[:2] for part in parts} >= {("begins", "ends"), ("begins", "truncated"), ("continues", "ends")}
    assert "round trip" not in printed


def test_the_source_of_each_row_of_a_mixture_is_named(capsys, tmp_path, texts):
    (tmp_path / "other.txt").write_text("zz " * 200)
    one = f"{{name: one, weight: 3, dataset_path: {tmp_path}/d.jsonl}}"
    two = f"{{name: two, dataset_path: {tmp_path}/other.txt}}"
    printed = inspect(capsys, tmp_path, datasets=f"[{one}, {two}]")
    named = re.findall(r"^step 0, row \d \((\w+)\).*\n.*\n +'(.*)'", printed, re.MULTILINE)
    assert sorted(name for name, _ in named) == ["one"] * 6 + ["two"] * 2
    assert all(("z" in text) == (name == "two") for name, text in named)


def test_segments_have_every_pair_of_the_row(tmp_path, texts):
    config = resolve_config.load(runs.arguments(dataset_path=tmp_path, **SMALL))
    data, _ = open_sources(InputSpec.of(config, ByteTokenizer()), config.evaluation)
    batches = train_batches(config, data, ByteTokenizer(), range(8), 8)
    batch = next(batches)
    batches.close()
    for row in range(8):
        found = segments(batch, row)
        assert np.concatenate([segment.ids[:-1] for segment in found]).tolist() == batch["tokens"][row].tolist()
        assert np.concatenate([segment.ids[1:] for segment in found]).tolist() == batch["targets"][row].tolist()


def test_hosts_that_do_not_divide_the_batch():
    def rows_of(count, index=0, rows_per_device=1.0):
        return rows_of_process(rows_per_device, 1, count, index)

    rows, own = rows_of(4, index=3)
    assert (rows, own.tolist()) == (32, list(range(24, 32)))
    with pytest.raises(UserError, match=r"is 4.8 rows per batch, not divisible by 3 processes"):
        rows_of(3, rows_per_device=0.2)
    with pytest.raises(UserError, match=r"process_index=2 must be less than process_count=2"):
        rows_of(2, index=2)
