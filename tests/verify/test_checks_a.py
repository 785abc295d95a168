"""verify's check a: meshes of as many devices as it makes, and code that one device refuses."""

import numpy as np
import pytest

from src.extras.verify import comparison, meshes, rewrites
from src.extras.verify.rows import FAIL, PASS
from src.extras.verify.subject import LENGTH, Context, Result, Subject
from src.system.errors import Unsupported
from tests.tiny import load


def given(*sizes, **keys):
    subject = Subject(load(max_target_length=LENGTH, **keys))
    return Context(subject, subject.config, sizes)


def test_eight_devices_share_each_micro_batch():
    (row,) = meshes.rows(given({"data": 8}, gradient_accumulation_steps=2))
    assert row.status == PASS
    assert row.figure <= row.bound / 3


@pytest.mark.parametrize("check", [meshes, rewrites])
def test_a_model_that_one_device_refuses_is_no_refusal_of_a_mesh(monkeypatch, check):
    def refuse(*_, **__):
        raise Unsupported("this edit is not finished")

    monkeypatch.setattr(Subject, "result", refuse)
    with pytest.raises(Unsupported, match="not finished"):
        list(check.rows(given({"data": 2})))


def test_a_layer_without_any_gradient_does_not_hide_the_one_that_differs():
    """Layer 0's gradient is zero on both sides, as behind a gate that is shut; layer 1's is doubled."""
    wanted = np.stack([np.zeros((2, 3)), np.ones((2, 3))])
    metrics = {"tokens": 4.0, "loss": 1.0, "grad_norm": 1.0}
    expected, found = (Result({"segments.0.0.feed_forward.wi": factor * wanted}, metrics, {}) for factor in (1.0, 2.0))
    row = comparison.compared("fsdp=2", found, expected, 1e-5)
    assert row.status == FAIL
    assert "segments.0.0.feed_forward.wi[1]" in row.note
    assert dict(comparison.differences({"a": np.zeros(2)}, {"a": np.zeros(2)})) == {"a": 0.0}
    assert dict(comparison.differences({"a": np.ones(2)}, {"a": np.zeros(2)})) == {"a": np.inf}
