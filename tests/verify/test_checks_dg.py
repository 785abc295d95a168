"""The checks of documents and of decoding: clean models pass, and each planted fault is found and named."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from src.data import document_stream, mixture, source_packer
from src.data.document_stream import layout_of
from src.extras import conversations
from src.extras.generation import generate
from src.extras.verify import decoding, documents, locate, logits
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS
from src.extras.verify.subject import Subject
from src.model import attention, decoder, gated_delta, lora, low_precision, sinusoidal
from src.model.attention_kernels import scores
from src.step import loss, train_step
from tests.parallel.axes import MODELS
from tests.tiny import load
from tests.verify.contexts import context

TEMPLATES = Path(__file__).parents[1] / "old_runs" / "data"
SMALL = {"base_num_decoder_layers": 1}
ADAPTERS = "adapters merged into their weights"
DROPOUT = "each row has its own dropout"
LORA = {"lora_rank": 2, "lora_alpha": 3.0, "load_parameters_path": "base"}
WINDOW = {"attention_type": "local_sliding", "sliding_window_size": 7}
DELTA = {
    "decoder_segments": "[{pattern: [{attention_type: gated_delta}]}]",
    **{"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 8, "gdn_value_head_dim": 8},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}
KINDS = {
    **MODELS,
    "chunks": {
        "base_num_decoder_layers": 4,
        "decoder_segments": "[{repeats: 2, pattern: [{attention_type: chunk, chunk_attn_window_size: 6}, {}]}]",
        **{"rope_type": "yarn", "rope_factor": 4, "original_max_position_embeddings": 16},
    },
    "delta": {**DELTA, "decoder_segments": "[{repeats: 2, pattern: [{attention_type: gated_delta}, {}]}]"}
    | {"base_num_decoder_layers": 4, "max_target_length": 80},
    "sinks": {**WINDOW, **EXPERTS, "attention_sink": "true", "attention_bias": "true"},
    "capacity": {**EXPERTS, "capacity_factor": 1.0},
    "predictions": {"mtp_num_layers": 2, "position_type": "sinusoidal"},
}


def subject(seed=0, **keys):
    return Subject(load(**{"max_target_length": 48, **keys}), seed)


def failed(check, name, **keys):
    """The note of the row of this name, which fails."""
    row = next(row for row in check.rows(context(subject(**{**SMALL, **keys}))) if row.name == name)
    assert row.status == FAIL
    assert not row.figure <= 3 * row.bound
    return row.note


def assert_clean(check, of):
    rows = list(check.rows(context(of)))
    assert not [row for row in rows if row.status == FAIL]
    assert all(row.figure <= row.bound / 3 for row in rows if row.status == PASS)
    return [row.name for row in rows if row.status == NOT_APPLICABLE]


def patched(monkeypatch, module, name, around):
    """Replaces a function: the new one also takes the original."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **keys: around(original, *args, **keys))


# ---- Clean models


def test_documents_of_a_clean_model():
    assert assert_clean(documents, subject(**SMALL, **WINDOW)) == [DROPOUT]
    assert DROPOUT not in assert_clean(documents, subject(**SMALL, dropout_rate=0.2))


def test_decoding_of_a_clean_model():
    assert assert_clean(decoding, subject(**SMALL, **WINDOW)) == [ADAPTERS]


@pytest.mark.parametrize("keys", [{}, pytest.param({**EXPERTS, "lora_parameters": "[wo]"}, marks=pytest.mark.long)])
def test_adapters_of_a_clean_model_are_merged(keys):
    row = logits.adapters_merged(subject(**SMALL, **LORA, **keys), decoding.BOUND)
    assert row.status == PASS
    assert row.figure <= row.bound / 3


def test_adapters_merged_at_another_scale_are_named(monkeypatch):
    monkeypatch.setattr(lora, "merge", lambda *args, merge=lora.merge: merge(*args[:2], 2 * args[2]))
    row = logits.adapters_merged(subject(**SMALL, **LORA), decoding.BOUND)
    assert row.status == FAIL
    assert row.figure >= 3 * row.bound
    assert "attention." in row.note


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [documents, decoding])
def test_every_kind_is_clean(check, kind):
    names = assert_clean(check, subject(seed=1, **KINDS[kind]))
    names = [name for name in names if name not in (ADAPTERS, DROPOUT)]
    assert names == {"capacity": ["experts of limited capacity"], "delta": ["documents, context 2"]}.get(kind, [])


# ---- Planted faults


def test_finds_documents_that_see_each_other(monkeypatch):
    def without_segments(mask, context, window):
        return mask(dataclasses.replace(context, segment_ids_BT=jnp.ones_like(context.segment_ids_BT)), window)

    patched(monkeypatch, scores, "causal_mask", without_segments)
    note = failed(documents, "no document or row sees another")
    assert note.startswith("row 0: changing the token at 0 changes the logits at ")


def test_finds_a_linear_layer_that_ignores_documents(monkeypatch):
    patched(monkeypatch, gated_delta, "_documents", lambda _, segment_ids_BT: jnp.ones_like(segment_ids_BT))
    assert "changes the logits" in failed(documents, "no document or row sees another", **DELTA)


def test_finds_a_token_that_sees_the_next(monkeypatch):
    def shifted(mask, context, window):
        mask_BntS = mask(context, window)
        return mask_BntS | jnp.roll(mask_BntS, 1, axis=-1)

    patched(monkeypatch, scores, "causal_mask", shifted)
    assert "changing the token at 1 changes the logits at 0" in failed(documents, "no token sees a later one")


def test_finds_padding_that_has_an_effect(monkeypatch):
    def with_padding(attend, q, k, v, spec, sinks, context):
        padding_BT11 = (context.segment_ids_BT == 0)[..., None, None]
        return attend(q, k, v, spec, sinks, context) + jnp.sum(padding_BT11 * v, axis=(1, 2), keepdims=True)

    patched(monkeypatch, attention, "attend", with_padding)
    assert "changes the logits at 0" in failed(documents, "padding has no effect")


def test_finds_positions_that_do_not_restart(monkeypatch):
    def of_row(original, positions_BT, emb_dim):
        return original(jnp.broadcast_to(jnp.arange(positions_BT.shape[1]), positions_BT.shape), emb_dim)

    patched(monkeypatch, sinusoidal, "sinusoidal", of_row)
    note = failed(documents, "packing changes no logits", position_type="sinusoidal")
    assert note == "document 2 of row 0: logits differ from its token 0 on, from the embedded tokens on"


@pytest.mark.parametrize(
    ("by", "note"),
    [(1, "row 1: changing the token at 0 changes the logits at 7"), (-1, "no token sees the one 6 before")],
)
def test_finds_a_window_that_is_off_by_one(monkeypatch, by, note):
    patched(monkeypatch, scores, "causal_mask", lambda mask, context, window: mask(context, window + by))
    assert failed(documents, "layer 0's reach: local_sliding, window 7", **WINDOW).startswith(note)


@pytest.mark.long
def test_finds_a_chunk_that_begins_late(monkeypatch):
    def late(attend, *args):
        context = dataclasses.replace(args[-1], positions_BT=args[-1].positions_BT + 5)
        return attend(*args[:-1], context)

    patched(monkeypatch, attention, "attend", late)
    note = failed(documents, "layer 0's reach: chunk, chunk 6", attention_type="chunk", chunk_attn_window_size=6)
    assert "changes the logits" in note


@pytest.mark.long
def test_finds_padding_of_the_vocabulary_in_the_loss(monkeypatch):
    monkeypatch.setattr(decoder, "MASKED", 0.0)
    assert "loss is " in failed(documents, "the step's loss is its tokens' mean")


@pytest.mark.long
def test_finds_a_loss_over_all_tokens(monkeypatch):
    def all_tokens(count, batch, plan):
        return count(batch, plan)._replace(loss=jnp.float32(batch["tokens"].size))

    patched(monkeypatch, train_step, "count_tokens", all_tokens)
    assert "loss is " in failed(documents, "the step's loss is its tokens' mean")


def test_finds_dropout_masks_that_rows_share(monkeypatch):
    def of_one_row(with_keys, batch, step, plan):
        keyed = with_keys(batch, step, plan)
        return {**keyed, "dropout_keys": jnp.broadcast_to(keyed["dropout_keys"][:1], keyed["dropout_keys"].shape)}

    patched(monkeypatch, locate, "with_dropout_keys", of_one_row)
    note = failed(documents, DROPOUT, dropout_rate=0.2)
    assert note == "14 of 16 rows, half in a second step, have another's mask"


def test_finds_dropout_masks_that_steps_share(monkeypatch):
    patched(monkeypatch, locate, "with_dropout_keys", lambda original, batch, _, plan: original(batch, 0, plan))
    assert failed(documents, DROPOUT, dropout_rate=0.2).startswith("8 of 16 rows")


def test_finds_a_mean_over_tokens_whatever_their_weights(monkeypatch):
    def unweighted(count, batch, plan):
        return count({**batch, "loss_mask": jnp.sign(batch["loss_mask"])}, plan)

    patched(monkeypatch, train_step, "count_tokens", unweighted)
    assert "loss is " in failed(documents, "the step's loss is its tokens' mean")


@pytest.mark.parametrize("packing", ["true", "false"])
def test_an_epoch_has_each_target_once(packing, monkeypatch):
    config = load(max_target_length=48, packing=packing)
    assert documents.of_epochs(config).status == PASS
    monkeypatch.setattr(source_packer, "layout_of", lambda inputs: lambda *given: _cut_late(layout_of(inputs), *given))
    assert "are not one document's" in documents.of_epochs(config).note
    monkeypatch.undo()
    patched(monkeypatch, document_stream.Shuffle, "__call__", lambda order, self, ordinal: order(self, ordinal // 2))
    assert "has one of them twice" in documents.of_epochs(config).note


def _cut_late(layout, sizes_of, position, length):
    """A layout that resumes one target late in a document that a row has cut."""
    segments, (item, offset) = layout(sizes_of, position, length)
    return segments, (item, offset + (0 < offset < sizes_of(item)[0] - 1))


def test_finds_a_scale_that_layers_share(monkeypatch):
    def of_all(bound, self, weight, dims):
        found = bound(self, weight, dims)
        return jnp.full_like(found, jnp.max(found))

    kind = {"base_num_decoder_layers": 2, "scan_layers": "true"}
    assert documents.of_quantized(subject(**kind), "int8").status == PASS
    patched(monkeypatch, low_precision.EightBitMatmuls, "bound", of_all)
    assert "layer 0's " in documents.of_quantized(subject(**kind), "int8").note


@pytest.mark.long
def test_finds_predictions_weighted_by_segment(monkeypatch):
    def weighted(mtp_batches, batch, plan):
        return [{**each, "loss_mask": each["loss_mask"] * batch["segment_ids"]} for each in mtp_batches(batch, plan)]

    patched(monkeypatch, loss, "mtp_batches", weighted)
    assert failed(documents, "packing changes no logits", mtp_num_layers=1).startswith("the sums of the loss")
    assert "mtp_loss is " in failed(documents, "the step's loss is its tokens' mean", mtp_num_layers=1)


def test_finds_a_cache_that_is_one_slot_late(monkeypatch):
    def late(update, cache, new, context):
        return update(cache, new, dataclasses.replace(context, positions_BT=context.positions_BT + context.decoding))

    patched(monkeypatch, attention, "update", late)
    assert failed(decoding, "decoding of src.decode").startswith("prompt of 3 tokens, beside others: ")


@pytest.mark.long
def test_finds_a_cache_that_outlives_its_chunk(monkeypatch):
    def without_chunks(decode_mask, spec, *args):
        return decode_mask(dataclasses.replace(spec, chunk=0), *args)

    patched(monkeypatch, attention, "decode_mask", without_chunks)
    keys = {"attention_type": "chunk", "chunk_attn_window_size": 6}
    assert " nats at " in failed(decoding, "decoding of src.decode", **keys)


@pytest.mark.long
@pytest.mark.parametrize("keys", [WINDOW, DELTA])
def test_finds_the_padding_of_prompts_in_caches(monkeypatch, keys):
    def unpadded(context, positions_BT, segment_ids_BT, *args, **flags):
        return context(positions_BT, jnp.ones_like(segment_ids_BT), *args, **flags)

    patched(monkeypatch, generate, "ForwardContext", unpadded)
    assert failed(decoding, "decoding of src.decode", **keys).startswith("prompt of 3 tokens, beside others: ")


@pytest.mark.parametrize("template", ["", "inst", "chatml"])
def test_only_the_answers_of_a_conversation_count(template, monkeypatch):
    keys = {"tokenizer_type": "huggingface", "tokenizer_path": str(TEMPLATES / template)} if template else {}
    config = load(use_sft="true", dataset_type="text", dataset_path="pairs.jsonl", vocab_size=1000, **keys)
    assert documents._of_conversation(config).status == PASS
    encode = conversations.encode_conversation

    def shorter(*arguments, **more):
        return [
            each._replace(loss_mask=each.loss_mask & np.roll(each.loss_mask, -1)) for each in encode(*arguments, **more)
        ]

    monkeypatch.setattr(conversations, "encode_conversation", shorter)
    row = documents._of_conversation(config)
    assert row.status == FAIL
    assert "the end of 'Because of it.' does not count" in row.note


def test_datasets_have_their_shares_of_rows(monkeypatch):
    datasets = tuple(
        {"name": name, "dataset_type": "synthetic", "weight": weight} for name, weight in (("a", 3), ("b", 1))
    )
    of_two = context(subject(), datasets=datasets)
    assert documents._of_mixture(of_two).status == PASS
    monkeypatch.setattr(mixture.Mixture, "assign", lambda self, row, **order: self.at(row % 2))
    row = documents._of_mixture(of_two)
    assert row.status == FAIL
    assert "after 1 batches of 8 rows" in row.note
