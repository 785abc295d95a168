"""Runs side by side: their results, what differs, losses at the same steps, on a page and as text."""

import html
import json
import re
import shutil
import subprocess

import pytest

from src.config import load as config
from src.extras.pages import comparison
from src.extras.pages.comparison import read_runs, tables
from src.system.errors import UserError
from tests.report.test_report import Page, eval_entry, in_node, train_entry


def make_run(folder, losses, arguments=(), evals=(), facts=None):
    """A run's folder with a loss for each step; returns its path."""
    folder.mkdir(parents=True)
    entries = [train_entry(step, loss) for step, loss in enumerate(losses, 1)] + [eval_entry(*each) for each in evals]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "config.yml").write_text(config.to_yaml(config.load(["configs/base.yml", "steps=40", *arguments])))
    (folder / "environment.json").write_text(json.dumps(facts or {}))
    return str(folder)


@pytest.fixture
def two(tmp_path):
    """The paths of a run of 40 steps, and of another that was stopped after 25."""
    first = make_run(
        tmp_path / "first",
        [10 - step / 10 for step in range(1, 41)],
        ["learning_rate=0.007"],
        [(10, 9.5), (20, 8.5), (40, 6.5)],
        {"jax": "0.10.2", "devices": "8 x TPU v4", "run": "a"},
    )
    facts = {"jax": "0.11.2", "devices": "8 x TPU v4", "run": "b"}
    return first, make_run(tmp_path / "second", [5.0] * 25, ["opt_type=muon"], [(20, 5.25)], facts)


def test_each_table_has_a_column_a_run_and_the_numbers_are_theirs(two):
    found = tables(read_runs(two))
    assert [rows[0] for rows in found.values()] == [["", "first", "second"]] * 4
    results = {name: values for name, *values in found["Results"][1:]}
    assert results["Steps"] == ["40 of 40", "25 of 40"]
    assert results["Train loss, mean of the last 1% of steps"] == ["6.0000", "5.0000"]
    assert results["Eval loss"] == ["6.5000", "5.2500"]
    assert results["Tokens per second"] == ["1.5", "1.5"]
    # Of the keys those that differ alone, and of the facts those that a result may depend on.
    assert sorted(found["What differs"][1:]) == [
        ["jax", "0.10.2", "0.11.2"],
        ["learning_rate", "0.007", "0.0003"],
        ["opt_type", "adamw", "muon"],
    ]
    means = {step: sum(10 - k / 10 for k in range(step - 4, step + 1)) / 5 for step in range(5, 41, 5)}
    assert found["Training loss, mean since the previous row"][1:] == [
        [f"step {step}", f"{mean:.4f}", "5.0000" if step <= 25 else "-"] for step, mean in means.items()
    ]
    evals = {name: values for name, *values in found["Eval loss"][1:]}
    assert evals["step 10"] == ["9.5000", "-"]
    assert evals["step 20"] == ["8.5000", "5.2500"]
    assert evals["step 40"] == ["6.5000", "-"]


def test_a_run_of_an_older_version_has_the_defaults_of_the_keys_it_lacks(two):
    older = f"{two[1]}/config.yml"
    with open(older) as file:
        lines = [line for line in file if not line.startswith(("hang_action", "adam_b1"))]
    with open(older, "w") as file:
        file.writelines([*lines, "a_key_of_old: 3\n"])
    rows = {name: values for name, *values in tables(read_runs(two))["What differs"][1:]}
    assert rows.keys() == {"jax", "learning_rate", "opt_type", "a_key_of_old"}
    assert rows["a_key_of_old"] == ["-", "3"]


def test_a_run_without_a_step_is_compared(tmp_path, two):
    found = tables(read_runs([two[0], make_run(tmp_path / "new", [])]))
    assert found["Results"][1] == ["Steps", "40 of 40", "0 of 40"]
    assert {row[2] for row in found["Training loss, mean since the previous row"][1:]} == {"-"}
    assert "Training loss, mean since the previous row" not in tables(read_runs([make_run(tmp_path / "newer", [])]))


def test_a_loss_that_is_not_finite_is_left_out_of_the_mean(tmp_path):
    runs = read_runs([make_run(tmp_path / "a", [2.0, None, 4.0, None])])
    assert tables(runs)["Training loss, mean since the previous row"][1:] == [
        ["step 1", "2.0000"], ["step 3", "4.0000"],
    ]  # fmt: skip


def test_steps_at_which_no_run_was_evaluated_have_no_row(tmp_path):
    runs = read_runs([make_run(tmp_path / "a", [2.0] * 40, evals=[(20, 2.5), (40, 2.4)])])
    assert tables(runs)["Eval loss"][1:] == [["step 20", "2.5000"], ["step 40", "2.4000"]]


def test_an_evaluation_stands_at_its_own_step(tmp_path):
    often = make_run(tmp_path / "often", [3.0] * 1000, evals=[(step, step / 100) for step in range(50, 1001, 50)])
    seldom = make_run(tmp_path / "seldom", [3.0] * 1000, evals=[(500, 9.5), (750, 9.75)])
    other = make_run(tmp_path / "other", [3.0] * 1000, evals=[(step, 7.0) for step in range(33, 1000, 33)])
    assert tables(read_runs([often, seldom]))["Eval loss"][1:] == [
        ["step 500", "5.0000", "9.5000"],
        ["step 750", "7.5000", "9.7500"],
    ]
    rows = tables(read_runs([often, other]))["Eval loss"][1:]  # which share no step
    assert 5 <= len(rows) <= 10
    for name, *values in rows:
        step = int(name.removeprefix("step ").replace(",", ""))
        assert values == [f"{step / 100:.4f}" if step % 50 == 0 else "-", "7.0000" if step % 33 == 0 else "-"]
    assert rows[-1][0] == "step 1,000"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["eval_steps=3"], "eval_steps"),
        (["max_target_length=99"], "max_target_length"),
        (["eval_dataset_path=/books"], "eval_dataset_path"),
        (["eval_fraction=0.5"], "eval_fraction"),
        (["data_shuffle_seed=1"], "data_shuffle_seed"),  # in another order, rows begin at other tokens
        (["batch_transform=mine:late"], "batch_transform"),
        (["learning_rate=1e-3", "per_device_batch_size=3", "eval_interval=7"], ""),  # of one epoch, all of it
    ],
)
def test_evaluations_of_other_tokens_are_said_not_to_compare(tmp_path, capsys, arguments, named):
    evals = [(20, 2.5)]
    one = make_run(tmp_path / "one", [3.0] * 40, ["eval_interval=20"], evals)
    comparison.main([one, make_run(tmp_path / "other", [3.0] * 40, ["eval_interval=20", *arguments], evals)])
    note = f"differ in {named}: their evaluations use different tokens"
    shown = Page((tmp_path / "one" / "comparison.html").read_text()).text
    assert (note in capsys.readouterr().out) == (note in shown) == bool(named)


def test_losses_of_different_tokenizers_are_said_not_to_compare(two, tmp_path, capsys):
    comparison.main(list(two))
    assert "can't be compared" not in capsys.readouterr().out
    other = make_run(tmp_path / "other", [5.0], ["tokenizer_type=huggingface", "tokenizer_path=/my/model"])
    comparison.main([two[0], other])
    note = (
        "differ in tokenizer_type, tokenizer_path: losses per token of different tokenizers can't be compared. Compare "
    )
    assert note + "eval_bits_per_byte" in capsys.readouterr().out
    assert note + "eval_bits_per_byte" in Page((tmp_path / "first" / "comparison.html").read_text()).text


def test_another_loss_is_said_not_to_compare(two, tmp_path, capsys):
    """Of src.train_dpo: the log of a sigmoid, beside nats per token."""
    other = make_run(tmp_path / "preferred", [0.6], ["loss=src.step.dpo:dpo_loss"])
    comparison.main([two[0], other])
    note = "These runs differ in loss: their losses and perplexities measure different things and can't be compared."
    assert note in capsys.readouterr().out
    assert note in Page((tmp_path / "first" / "comparison.html").read_text()).text


def test_a_short_run_beside_a_long_one_does_not_flatten_its_losses(tmp_path):
    long, short = [3 + 8 * 0.9**step for step in range(400)], [3 + 8 * 0.8**step for step in range(30)]
    comparison.main([make_run(tmp_path / "long", long), make_run(tmp_path / "short", short)])
    loss = Page((tmp_path / "long" / "comparison.html").read_text()).charts["Loss"]
    top = in_node(f"valueRange({{scale: 'settled'}}, curves({json.dumps(loss)}, [1, 400]), false, true).high")
    assert 3 < top < 4.2  # the long run's loss from a twentieth of its steps on: 3 + 8 * 0.9**20 is 3.97


@pytest.mark.parametrize(("long", "short", "gap"), [(50, 12, 5), (10_000, 3_000, 1_000), (5_000, 4_100, 500)])
def test_rows_of_long_runs_end_at_their_steps_and_a_run_that_ended_earlier_says_where(tmp_path, long, short, gap):
    """Curves of more than 2,000 steps are thinned: the middle of their last block is not their last step."""
    paths = [make_run(tmp_path / f"{n}", [step / 100 for step in range(1, n + 1)]) for n in (long, short)]
    rows = tables(read_runs(paths))["Training loss, mean since the previous row"][1:]
    assert [row[0] for row in rows] == [f"step {step:,}" for step in range(gap, long + 1, gap)]
    for n, (_, *values) in enumerate(rows):
        for value, end in zip(values, (long, short), strict=True):
            first, last = n * gap + 1, min((n + 1) * gap, end)
            if first > end:
                assert value == "-"
                continue
            loss, _, mark = value.partition(" ")
            assert float(loss) == pytest.approx((first + last) / 200, abs=0.08)  # a block has up to 8 steps
            assert mark == (f"(to {end:,})" if end < (n + 1) * gap else "")


def test_the_page_has_the_tables_and_curves_of_all_and_leaves_the_report_alone(two, tmp_path, capsys):
    comparison.main(list(two))
    file = tmp_path / "first" / "comparison.html"
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")
    assert not (tmp_path / "first" / "report.html").exists()
    shown = Page(file.read_text())
    assert shown.text.split("2 runs")[0].split()[-2:] == ["first,", "second"]
    assert shown.points("Loss").keys() == {"first", "first eval", "second", "second eval"}
    for text in ("Results", "What differs", "learning_rate", "0.007", "Training loss, mean", "Eval loss"):
        assert text in shown.text


def test_a_run_that_is_named_twice_stands_there_once(two, tmp_path, capsys):
    comparison.main([two[0], two[1], f"{two[0]}/"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["first", "second"]
    comparison.main([two[0], two[0]])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'first' / 'report.html'}\n"


@pytest.mark.skipif(not shutil.which("chromium"), reason="a browser lays the page out")
def test_on_a_phone_names_stand_over_the_numbers_of_their_runs_and_keys_end_lines_between_words(two, tmp_path):
    comparison.main(list(two))
    inner = html.escape((tmp_path / "first" / "comparison.html").read_text())
    script = """onload = () => {
        const shown = document.querySelector("iframe").contentDocument, range = shown.createRange();
        const lines = (node) => (range.selectNodeContents(node), range.getClientRects().length);
        document.title = JSON.stringify([
            [...shown.querySelectorAll(".runs tr")].map(
                (row) => [...row.children].slice(1).map((cell) => Math.round(cell.getBoundingClientRect().left))),
            [...shown.querySelectorAll(".runs th:first-child")].flatMap((key) => [...key.childNodes]).map(
                (word) => [word.data, lines(word)]).filter(([word]) => word && !word.includes(" "))])}"""
    framed = tmp_path / "framed.html"
    framed.write_text(f'<script>{script}</script><iframe srcdoc="{inner}" style="width: 360px; border: 0"></iframe>')
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    dom = subprocess.run([*command, framed.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    (found,) = re.findall("<title>(.*?)</title>", dom.partition("<iframe")[0])
    rows, words = json.loads(found)
    assert {"learning_", "rate", "opt_", "type"} <= {word for word, _ in words}
    assert {lines for _, lines in words} == {1}
    assert len(rows) > 20
    head = None
    for row, cells in zip(rows, [cells for rows in tables(read_runs(two)).values() for cells in rows], strict=True):
        head = row if cells[0] == "" else head
        assert row == head
    assert max(head) < 360


def test_the_text_is_a_table_a_fact(two, capsys):
    comparison.main(list(two))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Results"
    assert re.fullmatch(" +first    second", lines[1])
    at = lines.index("What differs")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [["first", "second"], ["opt_type", "adamw", "muon"]]
    assert "step 25  7.7000  5.0000" in lines


def test_many_runs_have_a_row_each(two, tmp_path, capsys):
    comparison.main([*two, *(make_run(tmp_path / f"run{n}", [3.0]) for n in range(5))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["Steps", "Train", "loss,"]
    assert [line.split()[0] for line in lines[2:9]] == ["first", "second", *(f"run{n}" for n in range(5))]


def test_what_is_no_run_is_said(two, tmp_path):
    with pytest.raises(UserError, match=r"nowhere has no metrics\.jsonl: expected the folder of a run"):
        comparison.main([two[0], str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"fisrt has no .*\. Did you mean /.*/first\?"):
        comparison.main([str(tmp_path / "fisrt"), two[1]])
    (tmp_path / "first" / "config.yml").write_text("steps: [")
    with pytest.raises(UserError, match=r"first/config\.yml"):
        comparison.main(list(two))
