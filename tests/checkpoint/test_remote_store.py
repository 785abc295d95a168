"""A run on an object store, through the clients of Google Cloud Storage: nothing can be appended to or renamed."""

import json

import pytest

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.run_folder import RunFolder, write_error
from src.run.resolve_config import load
from src.system.errors import UserError
from tests import runs
from tests.checkpoint.arrays import abstract, make_mesh, make_values, place, restore_step, same
from tests.gcs_server import GcsServer


@pytest.fixture(scope="module")
def server():
    server = GcsServer("bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        patch.setenv("GCE_METADATA_ROOT", server.url.removeprefix("http://"))  # No search for credentials outside.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs")  # It reads the environment when it is imported.
        yield server
    server.close()


@pytest.fixture
def base(server, request):
    """A base_output_directory with nothing in it."""
    return f"gs://bucket/a dir/{request.node.name}"


@pytest.fixture
def objects(server, request):
    """What lies in the folder of the run `a` there: name in the folder -> (contents, generation)."""

    def find():
        prefix = f"a dir/{request.node.name}/a/"
        return {name.removeprefix(prefix): value for name, value in server.objects.items() if name.startswith(prefix)}

    return find


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 2, 2))


def checkpointer(folder):
    return Checkpointer(folder.path / "checkpoints", max_to_keep=2, async_save=True)


def append(file, text):
    with open(file, "a") as opened:
        opened.write(text)


def test_growing_files_are_copied_up_and_fetched_by_the_next_part_of_the_run(objects, base):
    first = RunFolder(base, "a")
    first.check_writable()
    assert objects() == {}
    first.write_text("config.yml", "é")
    append(first.fetch("metrics.jsonl"), "1\n")
    append(first.fetch("tensorboard/events.0"), "e")
    assert set(objects()) == {"config.yml"}
    first.sync()
    assert objects()["metrics.jsonl"][0] == b"1\n"
    assert objects()["tensorboard/events.0"][0] == b"e"
    append(first.local / "metrics.jsonl", "2\n")
    # Killed here: what was not synced is lost, and the temporary folder means nothing to the next process.

    second = RunFolder(base, "a")
    assert second.read_text("config.yml") == "é"
    assert second.fetch("metrics.jsonl").read_text() == "1\n"
    append(second.local / "metrics.jsonl", "2\n")
    second.close()
    assert objects()["metrics.jsonl"][0] == b"1\n2\n"
    assert not second.local.exists()


def test_a_run_there_is_a_config(base):
    RunFolder(base, "a").write_text("config.yml", "base_emb_dim: 32\nrun_name: b\n")
    config = load([f"{base}/a"], uses_weights=True)
    assert (config.run.base_output_directory, config.run.run_name, config.model.base_emb_dim) == (base, "a", 32)
    assert config.checkpoint.load_parameters_path == f"{base}/a"


def test_only_files_that_changed_are_copied_again(objects, base):
    folder = RunFolder(base, "a")
    append(folder.fetch("metrics.jsonl"), "1\n")
    append(folder.fetch("steps"), "1\n")
    folder.sync()
    generation = {name: generation for name, (_, generation) in objects().items()}
    append(folder.local / "metrics.jsonl", "2\n")
    folder.close()
    assert objects()["steps"][1] == generation["steps"]
    assert objects()["metrics.jsonl"][1] > generation["metrics.jsonl"]


def test_a_bucket_that_is_not_there_is_an_error(server):
    with pytest.raises(UserError, match="cannot write to gs://other/runs/a"):
        RunFolder("gs://other/runs", "a").check_writable()


def test_checkpoints_go_to_the_store_and_come_back_from_it_alone(objects, base, mesh):
    folder = RunFolder(base, "a")
    saver = checkpointer(folder)
    for step in (10, 20, 30):
        saver.save(step, place(make_values(step), mesh), {"loss": step / 8})
    saver.wait()
    saver.prune()
    saver.close()
    assert {name.split("/")[1] for name in objects()} == {"20", "30"}

    wanted = abstract(place(make_values(0), make_mesh((1, 8, 1))))
    state, meta, messages = checkpointer(folder).restore_latest(wanted)
    assert same(state, make_values(30))
    assert meta == {"loss": 30 / 8}
    assert messages == []
    weights, _, _ = restore_step(f"{base}/a/checkpoints/20", wanted)
    assert same(weights["trainable"], make_values(20)["trainable"])


def test_an_unfinished_save_is_passed_over_and_made_again(server, base, mesh):
    """A store shows a save's files as they are written; the file that ends it is not there after a kill."""
    folder = RunFolder(base, "a")
    saver = checkpointer(folder)
    for step in (10, 20):
        saver.save(step, place(make_values(step), mesh), {})
    saver.close()
    del server.objects[base.removeprefix("gs://bucket/") + "/a/checkpoints/20/commit_success.txt"]

    assert "Checkpoint 10 is intact" in str(write_error(folder.path / "checkpoints", 30, 1, OSError("away")))
    resumed = checkpointer(folder)
    state, _, messages = resumed.restore_latest(abstract(place(make_values(0), mesh)))
    assert same(state, make_values(10))
    assert messages[0].startswith("checkpoint 20 is passed over: it cannot be read: ")
    resumed.save(20, place(make_values(20), mesh), {})
    resumed.close()
    state, _, messages = checkpointer(folder).restore_latest(abstract(state))
    assert same(state, make_values(20))
    assert messages == []


def test_a_flipped_bit_in_the_store_is_noticed(server, base, mesh):
    folder = RunFolder(base, "a")
    saver = checkpointer(folder)
    for step in (10, 20):
        saver.save(step, place(make_values(step), mesh), {})
    saver.close()
    index = f"{base.removeprefix('gs://bucket/')}/a/checkpoints/20/state/d/"
    (name,) = (name for name in server.objects if name.startswith(index))
    contents, generation = server.objects[name]
    middle = len(contents) // 2
    server.objects[name] = (contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :], generation)

    resumed = checkpointer(folder)
    state, _, messages = resumed.restore_latest(abstract(place(make_values(0), mesh)))
    assert same(state, make_values(10))
    assert messages[0].startswith("checkpoint 20 is passed over: ")
    damaged = {
        name.replace("/20/", "/20.damaged/"): value[0]
        for name, value in server.objects.items()
        if name.startswith(index.removesuffix("state/d/"))
    }
    resumed.save(20, state, {})
    resumed.close()
    assert all(server.objects[name.replace("/20/", "/20.damaged/")][0] == value for name, value in damaged.items())


def test_a_run_goes_on_from_the_store_alone(objects, base, tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = {"base_output_directory": base, "run_name": "a", "dataset_path": corpus, "checkpoint_period": 2}
    for steps in (3, 6):
        runs.run_here(**keys, steps=steps, learning_rate_schedule_steps=6)
    output = capsys.readouterr().out
    assert "resumed from step 3" in output
    assert f"report: {base}/a/report.html" in output
    lines = [json.loads(line) for line in objects()["metrics.jsonl"][0].splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"config.yml", "environment.json", "report.html"} <= set(objects())
    assert b"Finished, step 6 of 6" in objects()["report.html"][0]
    runs.run_here(**{**keys, "base_output_directory": tmp_path, "steps": 6})
    assert runs.losses(tmp_path / "a") == [(line["step"], line["loss"]) for line in lines]
