"""`python -m src.verify` passes the edits of docs/forking.md, and finds mistakes that are planted into them."""

import json
import re
from typing import NamedTuple

import pytest

from src.extras.verify.rows import FAIL, PASS
from tests.test_forking import EDITS, apply, commands, copied, diff, python, section

ATTENTION, DIFFERENTIAL, BLOCK = (f"src/model/{name}.py" for name in ("attention", "differential_attention", "block"))
GATED, PAIRS, SCALED = "attention_head_gate=true", "attention_type=differential", "layer_scale=0.1"


class Mistake(NamedTuple):
    """A mistake in an edit, the keys and checks of a command, and words of a row that fails."""

    edit: str
    file: str
    before: str
    after: str
    words: str
    where: str
    further: str = ""  # at the end of the file


GATE = 'matmul(x_BTD, self.head_gate[...], "BTD,DN->BTN")'
# A backward pass that lacks the sum over devices with other rows, as a custom kernel's may.
OF_ONE_DEVICE = """

@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gates(x_BTD, gate_DN, layout):
    return matmul(x_BTD, gate_DN, "BTD,DN->BTN")


def _backward(layout, kept, change_BTN):
    x_BTD, gate_DN = kept
    rows = tuple(layout.spec(("batch", "length", last)) for last in (None, "heads"))
    own = layout.shard_map(lambda x, y: jnp.einsum("BTD,BTN->DN", x, y), rows, layout.spec((None, "heads")))
    return jnp.einsum("BTN,DN->BTD", change_BTN, gate_DN), own(x_BTD, change_BTN)


_gates.defvjp(lambda x_BTD, gate_DN, layout: (_gates(x_BTD, gate_DN, layout), (x_BTD, gate_DN)), _backward)
"""
CENTRED = """

def _centred(out_BTNJ, layout):
    spec = layout.spec(("batch", "length", "heads", None))
    return layout.shard_map(lambda x: x - jnp.mean(x, axis=2, keepdims=True), (spec,), spec)(out_BTNJ)
"""
MISTAKES = {
    "a gradient that devices do not sum": Mistake(
        "gated_attention",
        ATTENTION,
        GATE,
        "_gates(x_BTD, self.head_gate[...], context.layout)",
        f"{GATED} checks=a mesh=fsdp=2",
        "attention.head_gate",
        OF_ONE_DEVICE,
    ),
    "a gate of the next token": Mistake(
        "gated_attention",
        ATTENTION,
        GATE,
        GATE.replace("x_BTD", "jnp.roll(x_BTD, -1, axis=1)"),
        f"{GATED} checks=d",
        "no token sees a later one",
    ),
    "a gate that learns nothing": Mistake(
        "gated_attention", ATTENTION, GATE, f"jax.lax.stop_gradient({GATE})", f"{GATED} checks=b", "attention.head_gate"
    ),
    "a gate that decoding leaves out": Mistake(
        "gated_attention",
        ATTENTION,
        "if self.spec.attention_head_gate:\n            out",
        "if self.spec.attention_head_gate and not context.decoding:\n            out",
        f"{GATED} checks=g",
        "decoding of src.decode",
    ),
    "a gate whose FLOPs are not counted": Mistake(
        "gated_attention",
        ATTENTION,
        '("embed", "heads"), dtype, fan_in=(0,))',
        '("embed", "heads"), dtype)',
        f"{GATED} checks=h",
        "attention.head_gate",
    ),
    "a mean over the heads of a shard": Mistake(
        "differential_attention",
        DIFFERENTIAL,
        "self._subtract(out_BTNJ, context.layer)",
        "self._subtract(_centred(out_BTNJ, context.layout), context.layer)",
        f"{PAIRS} checks=a mesh=tensor=2",
        "mesh tensor 2",
        CENTRED,
    ),
    "documents that see each other": Mistake(
        "differential_attention",
        DIFFERENTIAL,
        "self.scores, None, context)",
        "self.scores, None, dataclasses.replace(context, packed=False, segment_ids_BT=0 * context.segment_ids_BT))",
        f"{PAIRS} checks=d",
        "no document or row sees another",
    ),
    "a cache whose newest slot is hidden": Mistake(
        "differential_attention",
        DIFFERENTIAL,
        "decode_mask(self.scores, context.positions_BT,",
        "decode_mask(self.scores, context.positions_BT - 1,",
        f"{PAIRS} checks=g",
        "decoding of src.decode",
    ),
    "one branch with the other's scale": Mistake(
        "layer_scale", BLOCK, "self.feed_forward_scale)\n", "self.attention_scale)\n", f"{SCALED} checks=e", "feed_for"
    ),
}


def rows_of(folder, *words):
    """The exit code of a command in the copy, and the rows that it found."""
    ended = python(folder, "-m", "src.verify", *words, "report=report.json")
    assert ended.returncode in (0, 3), ended.stdout + ended.stderr
    return ended, json.loads((folder / "report.json").read_text())["rows"]


@pytest.mark.long
@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit != "tar_shards"])  # a source of data is not verified
def test_an_edit_passes(edit, tmp_path):
    folder = copied(tmp_path / "copy")
    assert not apply(diff(edit), folder)
    (words,) = commands(edit, "src.verify")
    ended, rows = rows_of(folder, *words)
    assert ended.returncode == 0, ended.stdout
    (said,) = re.findall(r"`src.verify`\s+prints\s+`([^;`]*);", section(edit))
    assert said in ended.stdout
    assert max(row["figure"] / row["bound"] for row in rows if row["bound"]) <= 1 / 3


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_edit_is_found(name, tmp_path):
    mistake, folder = MISTAKES[name], copied(tmp_path / "copy")
    assert not apply(diff(mistake.edit), folder)
    file = folder / mistake.file
    assert file.read_text().count(mistake.before) == 1
    file.write_text(file.read_text().replace(mistake.before, mistake.after) + mistake.further)
    if "functools." in mistake.further:
        file.write_text(file.read_text().replace("import dataclasses\n", "import dataclasses\nimport functools\n", 1))
    _, rows = rows_of(folder, "configs/quickstart.yml", *mistake.words.split())
    failed = [row for row in rows if row["status"] == FAIL]
    assert mistake.where in " ".join(f"{row['name']} {row['note']}" for row in failed), rows
    figures = [row["figure"] / row["bound"] for row in failed if row["bound"]]
    assert not figures or max(figures) >= 3


def test_both_mixers_pass_on_a_mesh(tmp_path):
    folder = copied(tmp_path / "copy")
    assert not [out for edit in ("gated_attention", "differential_attention") if (out := apply(diff(edit), folder))]
    segments = "decoder_segments=[{pattern: [{attention_type: differential}, {attention_head_gate: true}]}]"
    words = ["base_num_decoder_layers=2", segments, "checks=a", "mesh=fsdp=2,tensor=2"]
    ended, rows = rows_of(folder, "configs/quickstart.yml", *words)
    assert "every kind kept: differential attention, global attention" in ended.stdout
    assert [row["status"] for row in rows] == [PASS]
