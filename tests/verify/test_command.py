"""`python -m src.verify` as a user meets it: its lines, report, exit codes and mistakes."""

import itertools
import json
import re
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.extras.code_digest import code_digest
from src.extras.verify import command, conversion, derivatives, meshes, subject
from src.extras.verify import report as report_file
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS, Row
from src.model.attention import Attention
from src.model.feed_forward import FeedForward
from src.model.params import matmul, weight
from src.run import resolve_config
from src.step.loss import next_token_loss
from src.system.errors import UserError
from tests.runs import BASE

TINY = (BASE, "base_emb_dim=32", "base_mlp_dim=64", "base_num_decoder_layers=2", "base_num_query_heads=4")
TINY += ("base_num_kv_heads=2", "head_dim=8")


@pytest.fixture(autouse=True)
def devices():
    """There are eight here already, and JAX has started."""
    assert jax.config.jax_num_cpu_devices == meshes.DEVICES


def test_a_mesh_is_compared_and_reported(tmp_path, capsys):
    path, golden = tmp_path / "report.json", tmp_path / "golden.json"
    words = [*TINY, "checks=a", "mesh=fsdp=2", f"report={path}", f"golden={golden}"]
    report = command.main(words)
    assert report.exit_code == 0
    said = capsys.readouterr().out
    assert "a  a mesh computes what one device does\n   PASS           mesh fsdp 2" in said
    assert re.search(r"mesh fsdp 2 +\d\.\de-\d\d <= 3e-04\n", said)
    assert "2 PASS, 0 FAIL, 0 NOT APPLICABLE" in said
    found = json.loads(path.read_text())
    assert [row["status"] for row in found["rows"]] == [PASS, PASS]
    assert found["rows"][0]["figure"] <= found["rows"][0]["bound"]
    again = command.main([*TINY, "checks=h", f"golden={golden}", f"report={path}"])
    assert {row.note for row in again.rows if row.check == "golden"} == {"same bits"}
    with pytest.raises(UserError, match="for another config"):
        command.main([*TINY, "checks=h", f"golden={golden}", "adam_b1=0.8"])


def test_a_step_that_is_not_finite_fails_each_check(monkeypatch, tmp_path):
    """A training step then makes no update, from which a gradient would be read as zero."""

    def not_finite(model, batch, plan):
        sums = next_token_loss(model, batch, plan)
        return sums._replace(loss=sums.loss * jnp.nan)

    monkeypatch.setattr(subject, "next_token_loss", not_finite)
    report = command.main([*TINY, "checks=abe", "mesh=fsdp=2", f"golden={tmp_path / 'golden.json'}"])
    failed = [row for row in report.rows if row.status == FAIL]
    assert [row.check for row in failed] == ["a", "b", "e", "golden"]
    assert all("is not finite" in row.note for row in failed)
    assert [row.name for row in report.rows if row not in failed] == ["initial weights differ from each other"]


def test_a_loss_that_reports_more_is_verified(monkeypatch):
    def reporting(model, batch, plan):
        sums = next_token_loss(model, batch, plan)
        return sums._replace(metrics={"more": (sums.loss, jnp.ones(()))})

    monkeypatch.setattr(subject, "next_token_loss", reporting)
    report = command.main([*TINY, "checks=a", "mesh=fsdp=2", "log_internals=1"])
    assert [row.status for row in report.rows] == [PASS]


def test_the_seed_of_weights_gives_other_weights_and_another_batch(monkeypatch):
    found = []
    monkeypatch.setattr("src.extras.verify.schedules.rows", lambda context: found.append(context.subject) or iter(()))
    for seed in (0, 0, 1):
        command.main([*TINY, "checks=k", f"init_weights_seed={seed}"])
    first, again, other = ({**each.batch, **dict(jax.tree.leaves_with_path(each.weights))} for each in found)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.long
def test_each_row_of_resumed_runs_is_printed(capsys):
    report = command.main([*TINY, "checks=f"])
    said = capsys.readouterr().out
    assert len(report.rows) == 5
    assert all(row.name in said for row in report.rows)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("checks=ax", "checks=ax: unknown check x; expected all, or letters of abcdefghijklm"),
        ("mesh=rows=2", "unknown mesh axis rows; expected one of data, stage, fsdp, context, expert, tensor"),
        ("mesh=tensor=1", "expected tensor=2 or more devices, not 1"),
        ("mesh=tensor=²", "expected tensor=2 or more devices, not ²"),
        ("mesh=tensor=2,tensor=4", "tensor is given twice"),
        ("mesh=tensor=16", "has 16 devices, and verify makes 8"),
        ("report=/proc/report.json", "report"),
        ("golden=", "expected one golden=, with a value"),
        ("golden=/proc/none/golden.json", "there is no folder /proc/none"),
        ("checks=,", "unknown check ; expected all"),
        ("base_emb_dim=", "base_emb_dim"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_computed(word, answer):
    with pytest.raises(UserError, match=answer.replace("(", r"\(")):
        command.main([*TINY, word])


def test_an_edit_that_fails_is_shown_by_its_line(monkeypatch, capsys):
    monkeypatch.setattr("src.model.norm.Norm.__call__", lambda self, x: x @ 3)
    report = command.main([*TINY, "checks=a", "mesh=fsdp=2"])
    assert (report.exit_code, [row.status for row in report.rows]) == (3, [FAIL])
    assert "test_command.py" in report.rows[0].note
    assert "lambda self, x: x @ 3" in report.rows[0].note


def test_a_wrong_einsum_is_shown_by_the_line_that_has_it(monkeypatch):
    """Not by the line of `matmul`, which computes it."""
    monkeypatch.setattr(
        "src.model.attention.Attention._values", lambda self, x, k: matmul(x, self.value[...], "BTD,DKX->BTKH")
    )
    (row,) = command.main([*TINY, "checks=a", "mesh=fsdp=2"]).rows
    assert row.status == FAIL
    assert "test_command.py" in row.note
    assert "BTD,DKX->BTKH" in row.note


@pytest.mark.parametrize(
    ("axes", "why"),
    [(("embd", "heads"), "no logical axis is called embd"), (("embed",), r"1 logical axes (embed) of 2 dims")],
)
def test_wrong_axes_are_shown_by_the_line_that_declares_them(monkeypatch, axes, why):
    initial = FeedForward.__init__

    def with_a_gate(self, spec, out_scale, dtype, rngs):
        initial(self, spec, out_scale, dtype, rngs)
        self.gate = weight(rngs, (spec.emb_dim, 2), axes, dtype, fan_in=(0,))

    monkeypatch.setattr(FeedForward, "__init__", with_a_gate)
    (row,) = command.main([*TINY, "checks=b"]).rows
    assert row.status == FAIL
    assert why in row.note
    assert "self.gate = weight(" in row.note


def test_a_loss_that_fails_on_a_mesh_is_told_from_a_layer_that_refuses_it(monkeypatch, tmp_path):
    lines = ("from src.step.loss import next_token_loss", "", "", "def loss(model, batch, plan):")
    lines += ("    assert plan.layout.mesh.size == 1", "    return next_token_loss(model, batch, plan)")
    (tmp_path / "of_one_device.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    found = command.main([*TINY, "mesh=context=2", "checks=ad", "loss=of_one_device:loss"])
    rows = {row.check: row for row in found.rows if row.status == FAIL}
    assert rows.keys() == {"a", "d"}
    assert all("of_one_device.py, line 5" in row.note for row in rows.values())
    model = [*TINY[:4], "attention_type=gated_delta", "gdn_num_key_heads=2", "gdn_num_value_heads=4"]
    (row,) = command.main([*model, "mesh=context=2", "checks=a", "loss=src.step.loss:next_token_loss"]).rows
    assert (row.status, row.note.partition(" (")[0]) == (NOT_APPLICABLE, "devices share sequences")
    (row, *_) = command.main([*model, "mesh=as_configured", "checks=a", "ici_context_parallelism=2"]).rows
    assert (row.status, row.note.partition(" (")[0]) == (FAIL, "devices share sequences"), "it cannot be trained so"


@pytest.mark.parametrize("mistake", [UserError("only whole sequences"), ValueError("only whole sequences")])
def test_a_mixer_that_raises_on_a_mesh_fails(monkeypatch, mistake):
    """A user's mixer may raise whatever it likes: it is not taken for a model that the mesh does not fit."""
    mix = Attention.__call__

    def of_whole_sequences(self, x_BTD, context, cache):
        if context.layout.shards("length") > 1:
            raise mistake
        return mix(self, x_BTD, context, cache)

    monkeypatch.setattr(Attention, "__call__", of_whole_sequences)
    found = command.main([*TINY, "mesh=context=2", "checks=ad"])
    failed = [row for row in found.rows if row.status == FAIL]
    assert [row.check for row in failed] == ["a", "d"]
    assert all("only whole sequences, " in row.note and "test_command.py" in row.note for row in failed)
    assert not [row for row in found.rows if "context" in row.name]


def test_what_was_found_is_reported_after_an_interrupt(monkeypatch, tmp_path):
    def rows(context):
        yield Row("first", PASS)
        raise KeyboardInterrupt

    monkeypatch.setattr(meshes, "rows", rows)
    with pytest.raises(KeyboardInterrupt):
        command.main([*TINY, "checks=a", f"report={tmp_path / 'report.json'}"])
    assert [row["name"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]] == ["first"]


@pytest.fixture
def checks(monkeypatch):
    """Checks a and b, of a row each, that note when they run; b then raises what is in the list."""
    ran, errors = [], []

    def first(context):
        ran.append("a")
        yield Row("first", FAIL, float("inf"), 1.0)

    def second(context):
        ran.append("b")
        yield Row("second", PASS)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(meshes, "rows", first)
    monkeypatch.setattr(derivatives, "rows", second)
    return ran, errors


def test_an_interrupted_command_continues_with_the_same_code_and_config(checks, monkeypatch, tmp_path):
    ran, errors = checks
    words = [*TINY, "checks=ab", f"report={tmp_path / 'report.json'}"]

    def interrupted(*further):
        errors.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            command.main([*words, *further])
        ran.clear()

    interrupted()
    assert command.main(words).rows == [
        Row("first", FAIL, float("inf"), 1.0, check="a"),
        Row("second", PASS, check="b"),
    ]
    assert ran == ["b"]
    command.main(words)
    assert ran == ["b", "a", "b"], "a report that is complete is written again"
    # The last two leave the small config as it is.
    for key in ("adam_b1=0.8", "mesh=fsdp=2", "base_mlp_dim=96", "sft_train_on_completion_only=false"):
        interrupted()
        command.main([*words, key])
        assert ran == ["a", "b"]
    interrupted()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "edited.py").write_text("EDITED = True")
    monkeypatch.setattr("src.extras.code_digest.FOLDER", tmp_path / "src")
    command.main(words)
    assert ran == ["a", "b"]


def test_a_report_is_written_once_per_check(checks, monkeypatch, tmp_path):
    written, write = [], report_file.write
    monkeypatch.setattr(report_file, "write", lambda *given: (written.append([*given[-1]]), write(*given)))
    command.main([*TINY, "checks=ab", f"report={tmp_path / 'report.json'}"])
    assert written == [["b"], []]


def test_code_outside_of_the_checkout_is_run_again():
    assert report_file.digest_of(resolve_config.load([*TINY, "loss=my_loss:smoothed"]), {}) == ""


def test_code_is_digested_beside_packages_without_a_version(monkeypatch):
    class Package(NamedTuple):
        name: str
        version: str | None

    monkeypatch.setattr(metadata, "distributions", lambda: [Package("broken", None), Package("broken", "1.0")])
    assert code_digest() == code_digest()


def test_a_check_that_lacks_memory_is_run_again(checks, tmp_path):
    ran, errors = checks
    words = [*TINY, "checks=ba", f"report={tmp_path / 'report.json'}"]
    for error in (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), MemoryError("no room")):
        errors.append(error)
        found = command.main(words)
        failed = [row for row in found.rows if row.check == "b" and row.status == FAIL]
        assert failed[0].note == f"memory is full: {error}"
        assert [row.name for row in found.rows][2] == "first", "the checks after it are made"
        ran.clear()
        command.main(words)
        assert ran == ["b"]


def test_without_torch_the_row_says_so(monkeypatch):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None if name == "torch" else name)
    bits, logits, adapters = command.main([*TINY, "checks=i"]).rows
    assert (bits.status, logits.status, logits.note) == (PASS, NOT_APPLICABLE, "torch is not installed")
    assert adapters.note == "lora_rank is 0"


def test_meshes_are_chosen_by_the_config():
    dense = resolve_config.load([BASE])
    experts = resolve_config.load([BASE, "num_experts=4", "num_experts_per_tok=2", "ici_tensor_parallelism=2"])
    axes = ["data", "stage", "fsdp", "context", "tensor"]
    assert meshes.chosen("", dense, dense.mesh) == [{axis: 2} for axis in axes]
    assert meshes.chosen("as_configured", experts, experts.mesh) == [{"fsdp": 2, "tensor": 2}]
    assert {"fsdp": 2, "tensor": 2} in meshes.chosen("", experts, experts.mesh)
    assert meshes.compiled(dense, dense.mesh) == [{"fsdp": 2, "tensor": 2}]
    configured = resolve_config.load([BASE, "ici_context_parallelism=2", "ici_data_parallelism=4"])
    assert meshes.compiled(dense, configured.mesh) == [{"data": 2, "fsdp": 2, "context": 2}]
    all_of_them = meshes.chosen("all", experts, experts.mesh)
    pairs = {frozenset(pair) for sizes in all_of_them for pair in itertools.combinations(sizes, 2)}
    assert len(pairs) == 15, "every pair of six axes"
    assert all(len(sizes) <= 3 for sizes in all_of_them)
