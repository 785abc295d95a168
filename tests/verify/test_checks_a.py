"""verify's check a: meshes of as many devices as it makes."""

from src.extras.verify import meshes
from src.extras.verify.rows import PASS
from src.extras.verify.subject import LENGTH, Context, Subject
from tests.tiny import load


def given(*sizes, **keys):
    subject = Subject(load(max_target_length=LENGTH, **keys))
    return Context(subject, subject.config, sizes)


def test_eight_devices_share_each_micro_batch():
    (row,) = meshes.rows(given({"data": 8}, gradient_accumulation_steps=2))
    assert row.status == PASS
    assert row.figure <= row.bound / 3
