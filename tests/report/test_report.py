import html
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from src.config import load as config
from src.extras.pages.comparison import main
from src.extras.pages.history import Curve, History, key_figures, show_number
from src.run.metrics import EVAL_KEYS, perplexity, read_entry
from src.system.errors import UserError
from tests.runs import ROOT

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects text, charts by title and whatever a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.fetched, self.json = [], "", [], ""
        self.feed(text)
        assert self.open == []
        self.charts = {chart["title"]: chart for chart in json.loads(self.json)["charts"]}

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs.items() if name in ("src", "href", "srcset", "data")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"] and data.startswith("{"):
            self.json = data
        elif self.open[-1:] not in (["script"], ["style"]):
            self.text += data + " "

    def points(self, title):
        """The points of each series of a chart, by its name."""
        return {series["name"]: series["points"] for series in self.charts[title]["series"]}


def train_entry(step, loss=2.0, **others):
    values = [step, loss, loss and perplexity(loss), 0.5, 3e-4, 0.5, 2000.0, 1.5]
    names = [
        "step",
        "loss",
        "perplexity",
        "grad_norm",
        "learning_rate",
        "step_time_seconds",
        "data_wait_seconds",
        "tokens_per_second",
    ]
    return {**dict(zip(names, values, strict=False)), **others}


def eval_entry(step, loss=2.5):
    return {"step": step, **dict(zip(EVAL_KEYS, [loss, perplexity(loss)], strict=True))}


def report(folder, entries, arguments=(), torn=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn)
    (folder / "config.yml").write_text(config.to_yaml(config.load(["configs/base.yml", *arguments])))
    main([str(folder)])
    return (folder / "report.html").read_text()


def test_a_run_is_shown_whole(tmp_path):
    entries = [entry for k in range(1, 51) for entry in (train_entry(k, 5 / k + 1), eval_entry(k, 5 / k + 1.5))]
    run = tmp_path / "first try"
    run.mkdir()
    (run / "environment.json").write_text(json.dumps({"jax": "0.10.2", "devices": "8 x TPU v4"}))
    text = report(run, entries, ["steps=50", "learning_rate=0.007"])
    shown = Page(text)
    assert "first try" in shown.text
    assert "Finished, step 50 of 50" in shown.text
    for title in ("Loss", "Perplexity", "Learning rate", "Gradient norm", "Tokens per second"):
        assert title in shown.charts
    assert "8 x TPU v4" in shown.text
    changed, everything = shown.text.split("All of config.yml")
    assert re.search(r"learning_rate\s+0.007\s+default 0.0003", changed)
    assert "adam_b2" not in changed
    assert yaml.safe_load(everything.strip())["adam_b2"] == 0.95


def test_the_page_fetches_nothing(tmp_path):
    text = report(tmp_path, [train_entry(1), train_entry(2)])
    assert Page(text).fetched == []
    assert not re.search(r"https?://|@import|url\(", text)


def test_curves_carry_the_runs_own_numbers(tmp_path):
    losses = [3.0, 2.5, 2.25, 2.125]
    entries = [train_entry(k, loss) for k, loss in enumerate(losses, 1)] + [eval_entry(4, 2.75)]
    shown = Page(report(tmp_path, entries))
    assert shown.points("Loss") == {"train": [[1, 3], [2, 2.5], [3, 2.25], [4, 2.125]], "eval": [[4, 2.75]]}
    assert shown.points("Gradient norm") == {"train": [[k, 0.5] for k in range(1, 5)]}


def test_what_evaluations_measure_is_drawn_beside_the_steps_own_or_alone(tmp_path):
    measured = {"eval_margin/a": 0.5, "eval_margin/b": 0.75, "eval_bits_per_byte/a": 1.5}
    entries = [train_entry(1, margin=0.25), {**eval_entry(1), **measured}]
    shown = Page(report(tmp_path, entries))
    assert shown.points("margin") == {"train": [[1, 0.25]], "eval a": [[1, 0.5]], "eval b": [[1, 0.75]]}
    assert shown.points("bits_per_byte") == {"eval a": [[1, 1.5]]}
    assert "loss" not in shown.charts


def test_other_runs_are_drawn_beside_the_first(tmp_path, capsys):
    report(tmp_path / "a", [train_entry(1, 3.0), eval_entry(1, 4.0)])
    report(tmp_path / "b", [train_entry(1, 5.0)])
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    shown = Page((tmp_path / "a" / "comparison.html").read_text())
    assert shown.points("Loss") == {"a": [[1, 3]], "a eval": [[1, 4]], "b": [[1, 5]]}
    assert [series["run"] for series in shown.charts["Loss"]["series"]] == [0, 0, 1]
    report(tmp_path / "more" / "a", [train_entry(1, 6.0)])
    main([str(tmp_path / "a"), str(tmp_path / "more" / "a")])
    assert str(tmp_path / "more" / "a") in Page((tmp_path / "a" / "comparison.html").read_text()).points("Loss")
    with pytest.raises(UserError, match=r"c has no metrics\.jsonl"):
        main([str(tmp_path / "a"), str(tmp_path / "c")])


def test_experts_have_their_loads_drops_and_loss_drawn(tmp_path):
    loads = {"expert_load_max": [1.5, 2.5, None], "load_balance_loss": 3.25}
    entries = [
        train_entry(1, **loads, tokens_dropped=[0.0, 0.02]),
        train_entry(2, **loads, tokens_dropped=[None, None]),
    ]
    shown = Page(report(tmp_path, entries))
    assert shown.points("Busiest expert") == {"train": [[1, 2.5], [2, 2.5]]}
    assert shown.points("Dropped choices") == {"train": [[1, 0.01], [2, None]]}
    assert shown.points("Load-balance loss") == {"train": [[1, 3.25], [2, 3.25]]}
    all_kept = Page(report(tmp_path / "all kept", [train_entry(1, **loads, tokens_dropped=[0.0, 0.0])]))
    assert set(shown.charts) - set(all_kept.charts) == {"Dropped choices"}
    dense = Page(report(tmp_path / "dense", [train_entry(1)]))
    assert set(shown.charts) - set(dense.charts) == {"Busiest expert", "Dropped choices", "Load-balance loss"}


def history_of(entries):
    history = History()
    history.add(entries)
    return history


def test_internals_are_heat_maps_of_layers_over_steps(tmp_path):
    """Five layers: a segment of one, and a pattern of two that is run twice."""
    line = {
        "activation_rms": [1.0, 2.0, None, 4.0, 5.0],
        "weight_norm/embedding": [9.0],
        "weight_norm/segments.0.0.attention.query": [3.0],
        "weight_norm/segments.0.0.norm.scale": [4.0],
        "weight_norm/segments.1.0.attention.query": [1.0, 2.0],
        "weight_norm/segments.1.1.attention.query": [1.5, None],
    }
    rows = [{"step": step, **line} for step in (10, 20)]
    maps = json.loads(Page(report(tmp_path, [train_entry(20), *rows])).json)["maps"]
    assert [(each["steps"], each["values"][1]) for each in maps] == [
        ([10, 20], [1.0, 2.0, None, 4.0, 5.0]),
        ([10, 20], [5.0, 1.0, 1.5, 2.0, None]),
    ]
    assert [each["rows"] for each in maps] == [[f"layer {layer}" for layer in range(5)]] * 2
    history = History()
    history.add({"step": step, **line} for step in range(100_000))
    assert len(history.heat_maps()[0]["steps"]) <= 400


def test_norms_of_layers_that_share_weights_are_named_as_the_weights(tmp_path):
    """Four layers: one with weights of its own that is run twice with them, then two with theirs."""
    line = {
        "activation_rms": [1.0, 2.0, 3.0, 4.0],
        "weight_norm/segments.0.0.attention.query": [7.0],
        "weight_norm/segments.1.0.attention.query": [8.0, 9.0],
    }
    maps = json.loads(Page(report(tmp_path, [train_entry(10), {"step": 10, **line}])).json)["maps"]
    assert maps[0]["rows"] == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert maps[1]["rows"] == ["segments.0.0, repeat 0", "segments.1.0, repeat 0", "segments.1.0, repeat 1"]
    assert maps[1]["values"] == [[7.0, 8.0, 9.0]]


def test_names_and_values_are_escaped(tmp_path):
    name = "eval_loss/</script><b>"
    entries = [train_entry(1), {"step": 1, name: 2.0, name.replace("loss", "perplexity"): 7.4}]
    text = report(tmp_path / "<i>x&", entries, ["prompt=</pre><script>alert(1)</script>"])
    assert "eval </script><b>" in Page(text).points("Loss")
    assert "<script>alert" not in text
    assert html.escape("</pre><script>alert(1)</script>") in text
    assert "<i>x" not in text


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [train_entry(1)],
        [train_entry(1), eval_entry(1)],
        [train_entry(1, None, grad_norm=None)],
        [train_entry(k, 2.0, grad_norm=0.0, learning_rate=0.0) for k in range(1, 9)],
        [train_entry(k) for k in range(90_001, 90_021)],
        [train_entry(k, 3.0 if k == 1 else None) for k in range(1, 60)],
    ],
    ids=["no step", "one", "one and eval", "not finite", "constant", "started late", "only the first finite"],
)
def test_any_state_of_a_run_gives_a_page(tmp_path, entries):
    text = report(tmp_path, entries)
    assert "NaN" not in Page(text).json
    assert ("No step is recorded yet" in text) == (not entries)
    assert not re.search("NaN|Infinity|undefined|null", json.dumps(drawn(text)))


def test_a_torn_last_line_is_left_out(tmp_path):
    assert "At step 2 of 10,000" in report(tmp_path, [train_entry(1), train_entry(2)], torn='{"step": 3, "lo')


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path):
    noise = random.Random(0)
    entries = [train_entry(k, 2 + 8 / k + noise.gauss(0, 0.01)) for k in range(1, 30_001)]
    entries[20_000]["grad_norm"] = 99.0
    text = report(tmp_path, entries, ["steps=30_000"])
    assert len(text) < 1_000_000
    norms = Page(text).charts["Gradient norm"]["series"][0]
    assert [20_001, 99] in norms["points"]
    assert len(norms["points"]) <= 4000
    assert len(norms["medians"]) <= 2000


def in_node(*script):
    """What the last line of a script evaluates to after charts.js."""
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed")
    code = (ROOT / "src" / "extras" / "pages" / "charts.js").read_text()
    code += "".join(f"{line};\n" for line in script[:-1]) + f"console.log(JSON.stringify({script[-1]}))"
    return json.loads(subprocess.run([node, "-"], input=code, capture_output=True, text=True, check=True).stdout)


DRAWN = """Object.fromEntries(data.charts.map((chart) => {
    const steps = chart.series.flatMap(({ points }) => points.map((point) => point[0]));
    const view = [Math.min(...steps), Math.max(...steps) + 1];
    const drawn = curves(chart, view), range = valueRange(chart, drawn, startsLog(chart), true);
    const marks = startsLog(chart) ? logTicks(range.low, range.high) : ticks(range.low, range.high, 6);
    return [chart.title, [range.note, marks, ...drawn.map((curve) => paths(curve, view, range, startsLog(chart)))]];
}))"""


def drawn(text):
    """The note, ticks and paths of each chart of a page, by title."""
    return in_node(f"const data = {Page(text).json}", DRAWN)


def test_a_gap_is_no_point_and_no_bridge(tmp_path):
    entries = [train_entry(k, None if k == 3 else 2.0, grad_norm=None) for k in range(1, 6)]
    line, dots = drawn(report(tmp_path, entries))["Loss"][2]
    assert re.sub(r"[\d. ]+", "", line) == "MLML"
    assert dots == ""


def test_a_lone_point_is_drawn_as_a_dot(tmp_path):
    assert drawn(report(tmp_path, [train_entry(1)]))["Loss"][2][1].endswith("h0")


def test_the_first_steps_do_not_flatten_the_loss(tmp_path):
    entries = [train_entry(k, 11.0 if k < 5 else 2.2 - k / 1000) for k in range(1, 201)]
    note, _, settled, *_ = drawn(report(tmp_path, entries))["Loss"]
    above = re.search(r"(\d+) of 200 points lie above the chart, up to 11\.", note)
    assert 4 <= int(above[1]) <= 10  # at most the first twentieth
    report(tmp_path / "other", entries)
    main([str(tmp_path), str(tmp_path / "other")])
    both = drawn((tmp_path / "comparison.html").read_text())["Loss"][0]
    assert f"{2 * int(above[1])} of 400 points lie above" in both
    heights = [float(y) for _, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", settled[0])][20:]
    assert max(heights) - min(heights) > 700  # of 1000: what comes after fills the chart


def test_a_step_that_seems_short_does_not_flatten_the_throughput(tmp_path):
    entries = [train_entry(k, tokens_per_second=8e5 if k == 150 else 3e4 + k) for k in range(1, 401)]
    note, marks, *_ = drawn(report(tmp_path, entries))["Tokens per second"]
    assert note == "1 of 400 points lie above the chart: a step recorded late makes the next look fast."
    assert max(marks) < 40_000


def test_losses_have_a_unit_unless_a_function_of_the_users_computes_them(tmp_path):
    entries = [train_entry(k, 2.0) for k in range(1, 11)]
    text = Page(report(tmp_path, entries)).text
    assert "Train loss, mean of the last 1% of steps, nats per token 2.0000" in " ".join(text.split())
    config = (tmp_path / "config.yml").read_text()
    (tmp_path / "config.yml").write_text(re.sub("^loss: .*$", "loss: my_loss:loss", config, flags=re.MULTILINE))
    main([str(tmp_path)])
    assert "nats" not in Page((tmp_path / "report.html").read_text()).text.partition("Configuration")[0]


def test_key_figures_are_those_of_the_entries():
    train = [train_entry(k, loss=4.0, step_time_seconds=0.5, tokens_per_second=2000.0) for k in range(1, 11)]
    train[0].update(step_time_seconds=20.0, tokens_per_second=50.0)  # compiles; the batch is 1000 tokens all the same
    train[-1]["loss"] = 2.0
    figures = dict(key_figures(history_of([*train, eval_entry(5, 1.0), eval_entry(10, 1.25)])))
    assert figures["Train loss, mean of the last 1% of steps"] == "2.0000"
    assert figures["Eval loss"] == "1.2500"
    assert figures["Lowest eval loss"] == "1.0000"
    assert figures["Eval perplexity"] == f"{math.exp(1.25):.4g}"
    assert figures["Tokens"] == "10k"
    assert figures["Time in steps"] == "0:24"  # 20 + 9 * 0.5, to the even second
    assert figures["Tokens per second"] == "2k"
    assert not any("MFU" in name for name in figures)
    assert dict(key_figures(history_of([{**train[0], "mfu": 0.4567}])))["MFU"] == "45.7%"


def test_main_writes_beside_the_metrics_and_names_what_is_missing(tmp_path, capsys):
    report(tmp_path, [train_entry(1)])
    (tmp_path / "report.html").unlink()
    main([str(tmp_path)])
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        main([str(tmp_path / "elsewhere")])
    with pytest.raises(UserError, match="expected one or more"):
        main([])


def test_help_says_how_it_is_used(capsys):
    main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m src.report RUN_DIR [OTHER_RUN_DIR ...]\n")


@pytest.mark.parametrize(
    "line",
    [
        *("[1, 2]", "3", "null", "{}", '{"step": "3"}', '{"step": 1.5}', '{"step": true, "loss": 1}', '{"step": -1}'),
        *('{"step": 3, "loss": "2"}', '{"step": 3, "loss": [2]}', '{"step": 3, "loss": {}}'),
        *('{"step": 3, "loss": NaN}', '{"step": 3, "loss": 1e999}', f'{{"step": 3, "loss": {10**400}}}'),
        *('{"step": 3, "tokens_dropped": 0.5}', '{"step": 3, "tokens_dropped": ["x"]}'),
        *('{"step": 3, "eval_loss": true}', "\0\0", "é", '{"step": 3,'),
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_line_of_another_shape_is_left_out_with_a_word(tmp_path, line):
    tmp_path = tmp_path / "run"
    entries = [json.dumps(train_entry(1)), line, json.dumps(train_entry(2, 3.0))]
    report(tmp_path, [])
    (tmp_path / "metrics.jsonl").write_text("".join(f"{each}\n" for each in entries))
    main([str(tmp_path)])
    shown = Page((tmp_path / "report.html").read_text())
    assert shown.points("Loss") == {"train": [[1, 2], [2, 3]]}
    assert "1 line of metrics.jsonl" in shown.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yml", "environment.json", "sample.txt", "report.html"])
def test_a_folder_in_the_place_of_a_file_is_said(tmp_path, name):
    report(tmp_path, [train_entry(1)])
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("environment.json", "{", "environment.json cannot be read"),
        ("environment.json", "[1]", "it is not a mapping"),
        ("environment.json", "[" * 100_000, "nested too deeply"),
        ("config.yml", "steps: many", "config.yml: steps is many"),
        ("config.yml", "", "config.yml: steps is"),
        ("config.yml", "a: [", "not valid YAML"),
    ],
)
def test_a_file_of_another_shape_is_said(tmp_path, name, text, said):
    report(tmp_path, [train_entry(1)])
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        main([str(tmp_path)])


@pytest.mark.parametrize("place", ["a\0b", "n" * 300, "loop"])
def test_a_place_that_can_not_be_is_said(tmp_path, place):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="expected the folder of a run"):
        main([str(tmp_path / place)])


def test_the_sample_is_shown(tmp_path):
    (tmp_path / "sample.txt").write_text("after step 2\n<b>once</b>\n  upon")
    text = report(tmp_path, [train_entry(1)])
    assert "Sample, after step 2" in Page(text).text
    assert "&lt;b&gt;once&lt;/b&gt;\n  upon" in text
    (tmp_path / "sample.txt").unlink()
    assert "Sample" not in report(tmp_path, [train_entry(1)])


def test_a_history_reads_on_where_it_stopped(tmp_path):
    metrics, history = tmp_path / "metrics.jsonl", History()
    first, second = (json.dumps(train_entry(k, k / 2)) + "\n" for k in (1, 2))
    for text in ("", first[:9], first + second[:-1], first + second):
        metrics.write_text(text)
        history.read(metrics)
        assert history.train["loss"].points() == [(1, 0.5), (2, 1.0)][: text.count("\n")]
    assert history.invalid_lines == 0


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=200),
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
)
@example([None] * 6 + [5e-324, 5e-324], [1])  # half of which is no float
def test_a_thinned_curve_keeps_the_extremes_the_sum_and_the_order(values, chunks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("src.extras.pages.history._BLOCKS", 4)
        curve, points = Curve(), list(enumerate(values))
        for size in chunks * len(values):
            curve.extend(points[:size])
            points = points[size:]
    points, blocks = list(enumerate(values)), curve.blocks()
    kept, finite = curve.points(), [value for value in values if value is not None]
    assert len(blocks) <= 8
    assert set(kept) <= set(points)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert sum(block.count for block in blocks) == len(finite)
    assert sum(block.total for block in blocks) == pytest.approx(sum(finite), abs=1e-3)
    assert curve.last == (finite[-1] if finite else None)
    if len(values) < 8:
        assert kept == curve.medians() == points
    if finite:
        shown = [value for _, value in kept if value is not None]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    width = curve.stride
    for block, start in zip(blocks, range(0, len(values), width), strict=True):
        inside = [value for value in values[start : start + width] if value is not None]
        if inside:
            assert min(inside) <= block.median[1] <= max(inside)
            assert (block.low[1], block.high[1]) == (min(inside), max(inside))


def test_the_medians_of_blocks_lean_to_no_side():
    curve = Curve()
    curve.extend([(k, float(k % 2)) for k in range(20_000)])
    assert curve.stride == 16
    assert {value for _, value in curve.medians()} == {0.5}


def test_the_memory_of_a_history_does_not_grow_with_the_run():
    history = History()
    for start in range(0, 100_000, 1000):
        history.add(train_entry(k, 2.0) for k in range(start, start + 1000))
    assert max(len(curve.blocks()) for curve in history.train.values()) < 2000
    assert history.train["loss"].stride == 64


def test_a_running_median_is_that_of_the_window():
    noise = random.Random(0)
    values = [noise.choice([None, noise.uniform(-9, 9)]) for _ in range(60)]
    found = in_node(f"runningMedian({json.dumps(list(enumerate(values)))}, 7)")
    for index, (step, median) in enumerate(found):
        window = sorted(v for v in values[max(0, index - 3) : index + 4] if v is not None)
        assert (step, median) == (index, window[len(window) // 2] if window else None)
    assert len(found) == len(values)


@pytest.mark.parametrize(
    ("call", "marks"),
    [
        ("ticks(0, 500, 5)", [0, 100, 200, 300, 400, 500]),
        ("ticks(1, 20000, 5)", [5_000, 10_000, 15_000, 20_000]),
        ("ticks(2.01, 2.09, 6)", [2.02, 2.04, 2.06, 2.08]),
        ("logTicks(0.25, 40)", [0.3, 1, 3, 10, 30]),
        ("[height(2, {low: 2, high: 4}), height(4, {low: 2, high: 4})]", [0, 1]),
        ("[0.1, 1, 10].map((x) => height(x, {low: 0.1, high: 10}, true))", [0, 0.5, 1]),
        ("nearest([[1, 5], [2, null], [4, 6]], 2.4)", [1, 5]),
        ("inView([1, 2, 3, 4, 5].map((k) => [k, k]), [2.5, 3.5]).map((p) => p[0])", [2, 3, 4]),
    ],
)
def test_the_script_places_marks_and_points(call, marks):
    assert in_node(call) == pytest.approx(marks)


@pytest.mark.parametrize(("x", "text"), [(0, "0"), (2.3456, "2.346"), (13_200, "13.2k"), (0.0003, "3e-4")])
def test_the_script_shows_numbers_briefly(x, text):
    assert in_node(f"showNumber({x})") == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (2.3456, "2.346"), (999, "999"), (13_200, "13.2k"), (1.05e10, "10.5B")]
)
def test_show_number(number, text):
    assert show_number(number) == text


def test_a_line_whose_end_is_written_while_the_page_reads_is_counted_once(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.jsonl"
    first, second = (json.dumps(train_entry(step, loss=float(step))) + "\n" for step in (1, 2))
    metrics.write_text(first + second[:20])

    def read_while_the_run_writes(line):
        if metrics.stat().st_size < len(first + second):
            metrics.write_text(first + second)
        return read_entry(line)

    monkeypatch.setattr("src.extras.pages.history.read_entry", read_while_the_run_writes)
    history = History()
    history.read(metrics)
    history.read(metrics)
    assert (history.invalid_lines, history.train["loss"].points()) == (0, [(1, 1.0), (2, 2.0)])
