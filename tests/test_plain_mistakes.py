"""Plain mistakes that libraries answer with exceptions of their own: here each is one sentence that names the key."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from ml_collections import ConfigDict

from src.checkpoint import run_folder
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.load_weights import load_weights
from src.config.dataset_spec import train_specs
from src.data.open import open_source
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.hf import hub
from src.extras.pages import page
from src.run.resolve_config import load
from src.system import storage_errors
from src.system.errors import TransientError, UserError
from src.system.storage_errors import retried
from tests import runs
from tests.tiny import load as load_tiny


@pytest.mark.parametrize("protocol", ["foo", "file", "http", "https", "memory"])
@pytest.mark.parametrize(
    "key",
    [
        *("base_output_directory", "jax_cache_dir", "load_parameters_path", "load_full_state_path"),
        *("compiled_trainstep_file", "tokenizer_path", "prompt_path", "results_path"),
    ],
)
def test_a_path_of_a_protocol_that_is_not_read_is_refused(key, protocol):
    with pytest.raises(UserError, match=f"{key}={protocol}://a/b: expected a path on this machine"):
        load([runs.BASE, f"{key}={protocol}://a/b"])


@pytest.mark.parametrize("path", ["gs://a/b", "s3://a/b"])
def test_a_path_on_a_store_is_taken(path):
    config = load([runs.BASE, f"base_output_directory={path}", f"jax_cache_dir={path}"])
    assert config.run.base_output_directory == config.step.jax_cache_dir == path


def test_paths_that_are_no_keys_value_are_refused_where_they_are_opened():
    with pytest.raises(UserError, match="foo:// is not a supported protocol; gs:// and s3:// are"):
        load_weights("foo://a/b", {})
    with pytest.raises(UserError, match="foo:// is not a supported protocol"):
        page.main(["foo://a/b"])
    for argv in (["foo://a/b"], [runs.BASE, "model_name=foo://a/b"]):
        with pytest.raises(UserError, match="cannot look into foo://a/b: foo:// is not read"):
            load(argv)


@pytest.mark.parametrize("name", ["../x", "a/..", "-a/b", "a/b--c", "a/" + "b" * 200])
def test_a_name_that_the_hub_cannot_have(name):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UserError, match=f"hf://{name} is not a model name: "):
        hub.local_folder(f"hf://{name}")


@pytest.mark.parametrize("key", ["prompt_path", "texts_path", "tokens_path", "load_parameters_path", "tokenizer_path"])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(key, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"{key}={tmp_path}/pipe is a pipe: expected a file, or /dev/stdin"):
        load([runs.BASE, f"{key}={tmp_path}/pipe"])


@pytest.mark.parametrize("key", ["dataset_path", "prompt_path", "load_parameters_path", "base_output_directory"])
def test_a_home_of_nobody(key):
    with pytest.raises(
        UserError, match=rf"{key}=~nobody-here/x: ~nobody-here is not a user of this machine; .* \./~nobody"
    ):
        load([runs.BASE, f"{key}=~nobody-here/x"])


def test_a_pipe_in_a_folder_of_data_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    config = load_tiny(dataset_type="text", dataset_path=tmp_path, vocab_size=258)
    with pytest.raises(UserError, match=r"pipe\.txt is not a regular file: leave it out"):
        open_source(train_specs(config.data)[0], InputSpec.of(config, ByteTokenizer()))


@pytest.mark.parametrize(
    "content",
    {
        "empty": b"",
        "no array": b"\x93NUMPY",
        "a header that is none": b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i4'}",
        "too many values": b"\x93NUMPY\x01\x00\x4e\x00"
        + b"{'descr': '<i4', 'fortran_order': False, 'shape': (99999999, 99999999), }".ljust(77)
        + b"\n",
        "several arrays": b"PK\x03\x04" + bytes(60),
        "objects": b"\x93NUMPY\x01\x00\x3e\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }".ljust(61)
        + b"\nx",
    }.values(),
)
def test_a_file_that_is_no_array_of_ids(content, tmp_path, monkeypatch):
    from src.extras.evaluation import scoring

    (tmp_path / "ids.npy").write_bytes(content)
    config = load([runs.BASE, f"tokens_path={tmp_path}/ids.npy", f"logits_path={tmp_path}/logits.npy"])
    with pytest.raises(UserError, match=r"tokens_path=.*ids.npy cannot be read as a .npy file: "):
        scoring.write_logits(config.evaluation, config.batch, None, None)


def test_a_parquet_file_with_two_columns_of_the_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], names=["text", "text", "other"])
    pq.write_table(table, tmp_path / "a.parquet")
    config = load_tiny(dataset_type="parquet", dataset_path=tmp_path / "a.parquet", vocab_size=258)
    with pytest.raises(UserError, match="has several columns of this name; it has text, text, other"):
        open_source(train_specs(config.data)[0], InputSpec.of(config, None))


@pytest.mark.parametrize("itself", [ConfigDict(), []], ids=["a ConfigDict", "a list"])
def test_a_value_that_contains_itself(itself):
    config = ConfigDict()
    config.mlp_activations = itself
    itself.update(inside=itself) if isinstance(itself, ConfigDict) else itself.append(itself)
    with pytest.raises(UserError, match="mlp_activations: its value is not a number, text, list or mapping"):
        load(config)


def test_numbers_of_numpy_are_numbers():
    config = ConfigDict()
    config.steps = np.int64(7)
    config.learning_rate = np.float32(0.5)
    config.adam_b1 = np.float64(0.25)
    config.packing = np.bool_(False)
    config.mlp_activations = [np.str_("gelu")]
    config.log_period = np.array(3)
    loaded = load(config)
    assert (loaded.run.steps, loaded.batch.packing) == (7, False)
    assert (loaded.step.learning_rate, loaded.step.adam_b1) == (0.5, 0.25)
    assert (loaded.model.mlp_activations, loaded.run.log_period) == (("gelu",), 3)
    assert type(loaded.run.steps) is int


# ---- Stores that do not answer


class Clock:
    """Time that passes while something is tried and while something sleeps."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(storage_errors.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(storage_errors.time, "sleep", self.passes)

    def passes(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("seconds", "attempts"), [(0, 5), (1, 5), (40, 1)])
def test_what_a_client_has_tried_for_long_is_not_tried_again(seconds, attempts, monkeypatch):
    clock, made = Clock(monkeypatch), []

    def attempt():
        made.append(clock.now)
        clock.passes(seconds)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        retried(attempt)
    assert len(made) == attempts
    assert clock.now - made[0] <= max(seconds, 15) + 5 * min(seconds, 1)


def test_a_store_that_does_not_answer_is_no_folder_without_checkpoints(monkeypatch):
    """A run would begin from its first step; fsspec answers "is it a folder?" with no."""
    folder = epath.Path("gs://bucket/runs/a/checkpoints")

    def no_answer(self):
        raise ConnectionResetError

    monkeypatch.setattr(type(folder), "is_dir", lambda self: False)
    monkeypatch.setattr(type(folder), "iterdir", no_answer)
    monkeypatch.setattr(storage_errors.time, "sleep", lambda seconds: None)
    with pytest.raises(ConnectionResetError):
        run_folder.steps_in(folder)
    with pytest.raises(TransientError, match="a checkpoint could not be read"):
        Checkpointer(folder, max_to_keep=1, async_save=True).restore_latest({})


def test_no_folder_and_a_file_have_no_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    assert run_folder.steps_in(epath.Path(tmp_path / "file")) == []
    assert run_folder.steps_in(epath.Path(tmp_path / "nowhere")) == []
