"""Fields that `batch_transform` adds: in the loss and in evaluations, on any mesh and after a restart."""

import importlib
import json
import sys

import numpy as np
import pytest

from src.config.schema import BatchKeys
from src.data.batch_transform import added_fields
from src.data.packing import empty_batch
from src.data.user_transform import apply_transform
from src.system.errors import UserError
from src.system.user_code import load_function
from tests import runs

MODULE = """
import jax.numpy as jnp
import numpy as np
from src.step.loss import LossSums, hidden_states, in_zigzag, next_token_loss

seen = []


def transform(batch):
    batch["new_field"] = (batch["tokens"] * 3 % 7).astype(np.float32)
    batch["of_row"] = batch["tokens"].sum(axis=1, dtype=np.int32) % 5
    batch["wide"] = np.stack([batch["of_row"]] * 3, axis=1).astype(np.uint8)
    seen.append({name: array.copy() for name, array in batch.items()})
    return batch


def value(batch):
    of_tokens = batch["new_field"] * (1.0 + batch["of_row"][:, None] + batch["wide"][:, 2:])
    return jnp.sum(of_tokens * batch["loss_mask"])


def loss(model, batch, plan):
    sums = next_token_loss(model, batch, plan)
    # In the order of the devices' parts too: `new_field` is of tokens, the others of rows.
    return sums._replace(loss=0 * sums.loss + value(in_zigzag(batch, plan.layout)))


def metrics(logits, batch):
    return {"field": (value(batch), jnp.sum(batch["loss_mask"]))}


def value_of(batch):
    of_tokens = batch["new_field"] * (1 + batch["of_row"][:, None] + batch["wide"][:, 2:].astype(np.int64))
    return (of_tokens * batch["loss_mask"]).sum(dtype=np.float64) / batch["loss_mask"].sum(dtype=np.float64)
"""


@pytest.fixture
def my_fields(tmp_path, monkeypatch):
    (tmp_path / "my_fields.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_fields", raising=False)
    return importlib.import_module("my_fields")


MESH = {"ici_context_parallelism": 2, "ici_tensor_parallelism": 2, "gradient_accumulation_steps": 2}


def test_fields_reach_loss_and_metrics_on_a_mesh_and_after_a_restart(my_fields, tmp_path):
    keys = {"batch_transform": "my_fields:transform", "loss": "my_fields:loss", "eval_metrics": "my_fields:metrics"}
    keys |= {"dataset_path": runs.write_corpus(tmp_path / "corpus"), "base_num_decoder_layers": 1, "eval_steps": 1}
    keys |= {"base_output_directory": tmp_path, "steps": 4, "eval_interval": 4, "per_device_batch_size": 0.5}
    keys |= {**MESH, "checkpoint_period": 2, "eval_per_device_batch_size": 1}
    result = runs.run_here(**keys)
    batches = [batch for batch in my_fields.seen if batch["segment_ids"].any()]  # not the padding it was asked with
    expected = [my_fields.value_of(batch) for batch in batches[:4]]
    assert len(set(expected)) == 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    evaluated = [my_fields.value_of(batch) for batch in batches]
    assert np.isclose(evaluated, result.eval_metrics["eval_field"], rtol=1e-5).any()

    (tmp_path / "run" / "checkpoints" / "4").rename(tmp_path / "4")  # as if it had been killed after step 2
    runs.run_here(**keys)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == losses


def keys_of(name):
    return BatchKeys(max_target_length=4, batch_transform=f"my_fields:{name}")


def test_the_fields_are_found_without_data(my_fields):
    found = {name: (x.shape, x.dtype) for name, x in added_fields(keys_of("transform"), 10).items()}
    assert found == {"new_field": ((4,), np.float32), "of_row": ((), np.int32), "wide": ((3,), np.uint8)}
    assert added_fields(BatchKeys(), 10) == {}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (lambda rows: rows["tokens"].astype(np.int64), r"new: int64 \[2, 4\], to a batch of 2 rows. .*32 bits"),
        (lambda rows: np.zeros(4, np.int32), r"new: int32 \[4\]"),
        (lambda rows: np.array(["a", "b"]), r"new: <U1 \[2\]"),
    ],
)
def test_a_field_that_no_step_can_take_is_refused(my_fields, added, message):
    my_fields.unfit = lambda rows: {**rows, "new": added(rows)}
    with pytest.raises(UserError, match=message):
        added_fields(keys_of("unfit"), 10)


@pytest.mark.parametrize("name", [3, "text_bytes", "dropout_keys"])  # bytes of text are what evaluations count
def test_a_field_with_a_name_of_ours_or_none_is_refused(my_fields, name):
    my_fields.named = lambda rows: {**rows, name: rows["tokens"]}
    with pytest.raises(UserError, match=rf"added {name}: .* and a name other than dropout_keys or text_bytes"):
        added_fields(keys_of("named"), 10)


def test_each_batch_has_the_fields_that_padding_had(my_fields):
    my_fields.some = lambda rows: {**rows, "new": rows["tokens"]} if rows["tokens"].any() else rows
    fields, batch = added_fields(keys_of("some"), 10), empty_batch(3, 4)
    assert fields == {}
    batch["tokens"][:] = 1
    with pytest.raises(UserError, match=r"  new: none -> int32 \[3, 4\]\n.*adds to two rows of padding"):
        apply_transform(load_function("my_fields:some", "batch_transform"), 10, batch, fields)
