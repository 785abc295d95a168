"""verify's check a: meshes of as many devices as it makes, and code that one device refuses."""

import pytest

from src.extras.verify import meshes, rewrites
from src.extras.verify.rows import PASS
from src.extras.verify.subject import LENGTH, Context, Subject
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
