"""A user's function that fails is the user's to mend, whatever it says: no disk is blamed, nothing is tried again."""

import re
from pathlib import Path

import pytest

from tests import runs

HERE = Path(__file__)


def fails(*_):
    raise ValueError("INTERNAL: a status word of TensorStore's, from a user")


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset_type": "custom", "dataset_factory": "tests.test_user_errors:fails"},
        {"batch_transform": "tests.test_user_errors:fails"},
        {"loss": "tests.test_user_errors:fails"},
        {"eval_metrics": "tests.test_user_errors:fails", "eval_interval": 1, "eval_steps": 1},
        pytest.param(
            {"decode_metrics": "tests.test_user_errors:fails", "eval_interval": 1, "eval_steps": 1, "sample_length": 1},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_users_error_names_the_line_that_raised_it(keys, tmp_path, monkeypatch, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 1, **keys}
    message = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))  # exit code 2
    line = 1 + HERE.read_text().splitlines().index("def fails(*_):") + 1
    assert re.search(rf"raised ValueError: INTERNAL: .* \({HERE}, line {line}\)", message)
    assert "try again" not in message
