"""Resumed runs, counts, conversion and the compiled program: clean configs pass, and planted faults are named."""

import jax
import pytest

from src import train
from src.checkpoint.checkpointer import Checkpointer
from src.extras.hf import load as hf_load
from src.extras.hf import model_keys
from src.extras.hf import peft as hf_peft
from src.extras.hf import save as hf_save
from src.extras.verify import conversion, counts, program, resume
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS, Row
from src.extras.verify.shrink import shrink
from src.extras.verify.subject import LENGTH, Context, Subject
from src.model import feed_forward, flops
from src.model.moe import layer
from src.run import resolve_config
from src.step import plan, train_step
from tests import runs, tiny
from tests.parallel.axes import MODELS
from tests.verify.contexts import context

HYBRID = {
    **{"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 6, "gdn_value_head_dim": 5},
    "decoder_segments": "[{repeats: -1, pattern: [{attention_type: gated_delta}, {attention_gate: true}]}]",
}
BIASED_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 12, "mlp_bias": "true", "router_bias": "true"},
    **{"capacity_factor": 1.25, "norm_topk_prob": "true"},
}
ADAPTED = {"lora_rank": 2, "load_parameters_path": "elsewhere"}
KINDS = {**MODELS, "hybrid": HYBRID, "biased experts": BIASED_EXPERTS}
BY_RULES = "weights that load_weights_rules replaces"
STATE = {"ema_decay": 0.9, "skip_step_on_spikes": "true"}


def subject(kind="dense", **keys):
    return Subject(tiny.load(**{"max_target_length": LENGTH, "learning_rate": 3e-3, **KINDS[kind], **keys}))


def failures(rows):
    return {row.name: row.note for row in rows if row.status == FAIL}


def outcomes(rows):
    return {row.name: row.status for row in rows}


only_dense = pytest.mark.parametrize(
    "kind", ["dense", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "dense")]
)


# ---- f


@pytest.mark.long
@pytest.mark.parametrize("keys", [{"kind": kind} for kind in KINDS] + [ADAPTED], ids=[*KINDS, "adapted"])
def test_a_resumed_run_is_the_same_and_weights_only_are_not(keys):
    with runs.built_once():
        rows = list(resume.rows(context(subject(**STATE, **keys))))
    found = outcomes(rows)
    assert found.pop(BY_RULES) == (NOT_APPLICABLE if "lora_rank" in keys else PASS)
    assert {*found.values()} == {PASS}
    assert len(rows) == 7
    assert rows[-1].figure <= resume.BOUND / 3


def first_failure(rows):
    """Ends the generator there: each row of a resume is a run."""
    return next(row for row in rows if row.status == FAIL)


def test_an_optimizer_state_that_is_not_restored_is_found(monkeypatch):
    restore = Checkpointer.restore_latest

    def without_moments(self, wanted):
        if restored := restore(self, wanted):
            restored.state["opt"] = jax.tree.map(lambda leaf: 0 * leaf, restored.state["opt"])
        return restored

    monkeypatch.setattr(Checkpointer, "restore_latest", without_moments)
    with runs.built_once():
        row = first_failure(resume.rows(context(subject(**STATE))))
    assert row.name == "restored state"
    assert row.note.startswith("the first: opt.")


def test_a_schedule_that_resumes_a_step_late_is_found(monkeypatch):
    hparams_at, seen = train.hparams_at, []

    def late(keys, steps, step):
        seen.append(step)
        return hparams_at(keys, steps, step - (len(seen) > resume.STEPS + resume.SAVED))  # after the two runs in one go

    monkeypatch.setattr(train, "hparams_at", late)
    with runs.built_once():
        row = first_failure(resume.rows(context(subject(**STATE))))
    assert (row.name, row.note) == ("resumed run", "the first: the loss of step 5")


# ---- h


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_arrays_and_matmuls(kind):
    found = outcomes(counts.rows(context(subject(kind))))
    other = found.pop("FLOPs of other matmuls", None)
    assert {*found.values()} == {PASS}
    assert other == (NOT_APPLICABLE if kind == "hybrid" else None)


def test_keys_of_a_window_are_counted(monkeypatch):
    monkeypatch.setattr(flops, "mean_keys", lambda scores, length: scores.window)  # also for the first queries
    monkeypatch.setattr(counts, "mean_keys", flops.mean_keys)
    notes = failures(counts.rows(context(subject(attention_type="local_sliding", sliding_window_size=7))))
    assert notes.keys() == {"keys that tokens attend to within a window of 7"}
    assert "336 counted, 315 found" in notes["keys that tokens attend to within a window of 7"]


def test_a_weight_that_the_flops_forget_is_named(monkeypatch):
    whole = flops.block_weights

    def without_output(layer, spec):
        for each in whole(layer, spec):
            yield each._replace(input=()) if each.path == ("feed_forward", "wo") else each

    monkeypatch.setattr(flops, "block_weights", without_output)
    notes = failures(counts.rows(context(subject())))
    assert notes.keys() == {"FLOPs of all matmuls"}
    assert "the difference is that of segments.0.0.feed_forward.wo" in notes["FLOPs of all matmuls"]


def test_padded_vocabulary_counted_as_parameters_is_found(monkeypatch):
    monkeypatch.setattr(counts, "count_params", lambda spec: flops.count_params(spec) + 31 * 32)
    assert [*failures(counts.rows(context(subject())))] == ["parameters"]


# ---- i


@pytest.mark.parametrize("kind", ["dense", pytest.param("gpt3", marks=pytest.mark.long)])
def test_an_exported_folder_is_the_same_model(kind):
    rows = list(conversion.rows(context(subject(kind))))
    assert [row.status for row in rows] == [PASS, PASS, NOT_APPLICABLE]
    assert rows[1].figure <= rows[1].bound / 3


def test_adapters_are_exported_as_they_are(monkeypatch):
    adapted = subject(**ADAPTED)
    *_, row = conversion.rows(context(adapted))
    assert row.status == PASS
    assert row.figure <= row.bound / 3
    write = hf_peft.save_adapters

    def halved(*given):
        write(*given[:-1], {**given[-1], "alpha": given[-1]["alpha"] / 2})

    monkeypatch.setattr(hf_peft, "save_adapters", halved)
    *_, row = conversion.rows(context(adapted))
    assert row.status == FAIL
    assert row.figure >= 3 * row.bound
    assert "attention.query" in row.note


def test_a_model_that_no_family_has_does_not_apply():
    (row,) = conversion.rows(context(subject("windowed")))
    assert row.status == NOT_APPLICABLE
    assert "attn_logits_soft_cap=20.0" in row.note


def test_a_model_file_that_no_family_has_any_more_fails(monkeypatch):
    config = resolve_config.load([tiny.BASE, "model_name=gemma2-27b"])
    small = shrink(config).config
    (row, *_) = conversion.rows(Context(Subject(small), config))
    assert row.status == PASS
    monkeypatch.setattr(model_keys, "FAMILIES", [it for it in model_keys.FAMILIES if it.model_type != "gemma2"])
    (row,) = conversion.rows(Context(Subject(small), config))
    assert row.status == FAIL
    assert row.note.startswith("gemma2-27b is no longer recognised")
    changed = config.replace(attn_logits_soft_cap=20.0)
    assert [row.status for row in conversion.rows(Context(Subject(small), changed))] == [NOT_APPLICABLE]


def swapped(lay_out):
    """Lays out keys as values and values as keys."""

    def lay_out_swapped(table, *rest):
        names = {"k_proj.weight": "v_proj.weight", "v_proj.weight": "k_proj.weight"}
        return lay_out([row._replace(file=swap(row.file, names)) for row in table], *rest)

    def swap(file, names):
        end = ".".join(file.split(".")[-2:])
        return file.removesuffix(end) + names.get(end, end)

    return lay_out_swapped


def test_a_tensor_written_in_place_of_another_is_named(monkeypatch):
    monkeypatch.setattr(hf_save, "lay_out", swapped(hf_save.lay_out))
    notes = failures(conversion.rows(context(subject())))
    assert notes["written and read back"] == "the first: segments.0.0.attention.key"
    assert "logits of transformers" in notes


def test_a_table_that_is_wrong_in_both_directions_is_found_by_transformers(monkeypatch):
    monkeypatch.setattr(hf_save, "lay_out", swapped(hf_save.lay_out))
    monkeypatch.setattr(hf_load, "lay_out", swapped(hf_load.lay_out))
    assert [*failures(conversion.rows(context(subject())))] == ["logits of transformers"]


# ---- j

MESH = {"fsdp": 2, "tensor": 2}


def test_sums_of_micro_batches_in_16_bits_are_named(monkeypatch):
    given = context(subject(gradient_accumulation_steps=2), (), weight_dtype="bfloat16")
    *_, row = program.rows(given)
    assert row.status == PASS

    def narrow(*arguments, sums=program.accumulate):
        gradients, rest = sums(*arguments)
        return jax.tree.map(lambda x: x.astype("bfloat16"), gradients), rest

    monkeypatch.setattr(program, "accumulate", narrow)
    *_, row = program.rows(given)
    assert row.note.startswith("the first: embedding in bfloat16")


@only_dense
def test_the_program_of_a_mesh_is_clean(kind):
    *rows, sums = program.rows(context(subject(kind, **STATE), (MESH,), dtype="bfloat16"))
    assert {*outcomes(rows).values()} == {PASS}
    assert len(rows) == 6
    assert sums.status == NOT_APPLICABLE
    assert "all-gather over fsdp" in rows[3].note


@pytest.mark.parametrize(
    ("mesh", "kind", "keys"),
    [
        ({"context": 2, "tensor": 2}, "dense", {}),
        ({"data": 2, "tensor": 2}, "dense", {"logical_axis_rules.norm_length": "[context, tensor]"}),
        pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, "biased experts", {}, marks=pytest.mark.long),
        pytest.param({"stage": 2, "tensor": 2}, "dense", {}, marks=pytest.mark.long),
    ],
)
def test_clean_programs_gather_no_dim_that_stays_sharded(mesh, kind, keys):
    assert not failures(program.rows(context(subject(kind, **keys), (mesh,))))


def test_a_weight_that_each_device_gathers_whole_is_named(monkeypatch):
    matmul = feed_forward.matmul

    def of_whole_weights(x, kernel, einsum):
        layout = subject().plan(2, ici_tensor_parallelism=2).layout
        return matmul(x, layout.constrain(kernel, *[None] * kernel.ndim) if kernel.ndim == 2 else kernel, einsum)

    monkeypatch.setattr(feed_forward, "matmul", of_whole_weights)
    notes = failures(program.rows(context(subject(), ({"tensor": 2},))))
    assert notes.keys() == {"mesh tensor 2: sharded dims stay sharded"}
    assert "feed_forward.wo, whole along mlp by an all-gather over tensor" in next(iter(notes.values()))


def test_arrays_that_are_not_donated_are_named(monkeypatch):
    monkeypatch.setattr(train_step.jax, "jit", lambda f, jit=jax.jit, **how: jit(f, **how | {"donate_argnums": ()}))
    notes = failures(program.rows(context(subject(), ({"fsdp": 2},))))
    assert notes == {"mesh fsdp 2: the state is donated": "the first: .step"}


def test_a_matmul_in_float32_is_named(monkeypatch):
    matmul = feed_forward.matmul
    monkeypatch.setattr(feed_forward, "matmul", lambda x, *rest: matmul(x.astype("float32"), *rest).astype(x.dtype))
    ((name, note),) = failures(program.rows(context(subject(), dtype="bfloat16"))).items()
    assert name == "matmuls with weights are in bfloat16"
    assert "feed_forward" in note


def test_experts_with_capacity_in_float32_are_named(monkeypatch):
    batched = layer.batched_matmul

    def wide(x, *rest, **how):
        return batched(x.astype("float32"), *rest, **how).astype(x.dtype)

    monkeypatch.setattr(layer, "batched_matmul", wide)
    ((name, note),) = failures(program.rows(context(subject("biased experts"), dtype="bfloat16"))).items()
    assert name == "matmuls with weights are in bfloat16"
    assert "segments.0.0.feed_forward.w" in note


def test_a_weight_and_moments_that_are_whole_are_named(monkeypatch):
    shardings, state = plan.weight_shardings, program.abstract_state

    def whole(sharding, *_):
        return jax.NamedSharding(sharding.mesh, jax.P(*[None] * len(sharding.spec)))

    def without_wo(*inputs):
        return jax.tree.map_with_path(lambda path, at: whole(at) if "wo" in str(path) else at, shardings(*inputs))

    def of_query(path, leaf):
        is_moment = "mu" in str(path) and "query" in str(path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole(leaf.sharding)) if is_moment else leaf

    monkeypatch.setattr(plan, "weight_shardings", without_wo)
    monkeypatch.setattr(program, "abstract_state", lambda each: jax.tree.map_with_path(of_query, state(each)))
    monkeypatch.setattr(program, "none_of", lambda name, wrong, note="": Row(name, FAIL, note=", ".join(wrong)))
    note = failures(program.rows(context(subject(), ({"fsdp": 2},))))["mesh fsdp 2: no array is whole"]
    weight, moment = note.split(", ")
    assert weight == "segments.0.0.feed_forward.wo"
    assert "mu" in moment
    assert "query" in moment


def test_a_gradient_that_is_not_summed_is_named(monkeypatch):
    compiled = program._compiled

    def without_one(lowered):
        text, warnings = compiled(lowered)
        sums = [line for line in text.splitlines() if " all-reduce(" in line and "f32[2,64,32]" in line]  # of wi
        assert sums
        for line in sums:
            text = text.replace(line, line.replace("f32[2,64,32]", "f32[1]"))
        return text, warnings

    monkeypatch.setattr(program, "_compiled", without_one)
    notes = failures(program.rows(context(subject(), ({"data": 2},))))
    weights = "embedding or output or segments.0.0.feed_forward.wi"  # which have as many entries
    assert notes == {"mesh data 2: gradients are summed": f"the first: {weights} over data"}
