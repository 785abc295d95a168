"""Where commands write files: looked at before a long computation, written whole, and nothing foreign replaced."""

import json
import os

import numpy as np
import pytest

from src.checkpoint.run_folder import RunFolder
from src.extras.command_files import check_outputs, write_output
from src.extras.evaluation import evaluate
from src.extras.generation import decode
from src.extras.pages import comparison
from src.system.errors import UserError
from tests import runs

KEY = "compile_report"
OURS = b'{\n  "topology": "cpu-8"\n}\n'


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_what_can_be_written_is_let_through_and_nothing_is_left(tmp_path):
    (tmp_path / "old").write_bytes(OURS)
    (tmp_path / "empty").write_bytes(b"")
    for place in ("new", "x/y/new", "old", "empty"):
        check_outputs({KEY: str(tmp_path / place)})
    assert names(tmp_path) == ["empty", "old"]
    assert (tmp_path / "old").read_bytes() == OURS


def test_a_file_is_written_with_its_folders_and_replaced_whole(tmp_path):
    path = tmp_path / "x" / "file"
    for content in (OURS, OURS + b" "):
        write_output(KEY, str(path), content)
        assert path.read_bytes() == content
        assert names(path.parent) == ["file"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "to_pipe"):
        for refused in (lambda path: check_outputs({KEY: path}), lambda path: write_output(KEY, path, b"x")):
            with pytest.raises(UserError, match=f"{KEY}={path}: cannot write it: it exists and is not a regular file"):
                refused(str(path))
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe", "to_pipe"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write it: NotADirectoryError"):
        check_outputs({KEY: str(tmp_path / "file" / "x")})


def test_an_unknown_protocol_is_named():
    for refused in (lambda path: check_outputs({KEY: path}), lambda path: write_output(KEY, path, b"x")):
        with pytest.raises(UserError, match=f"{KEY}=foo://x: cannot write it: foo:// is not a supported protocol"):
            refused("foo://x")


def test_two_keys_have_two_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="compile_report and results_path are both"):
        check_outputs({KEY: str(tmp_path / "file"), "results_path": str(tmp_path / "link")})


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(OURS)

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="no space left"):
        write_output(KEY, str(tmp_path / "file"), b"x")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == OURS


# ---- What the commands replace


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, with a text and ids to score beside it."""
    folder = tmp_path_factory.mktemp("outputs")
    corpus = runs.write_corpus(folder / "corpus")
    runs.run_here(base_output_directory=folder, dataset_path=corpus, steps=1, eval_interval=1, eval_steps=1)
    (folder / "texts.txt").write_text("alpha\n")
    np.save(folder / "ids.npy", np.zeros((8, 4), np.int32))
    np.save(folder / "logits.npy", np.zeros((8, 4, 300), np.float32))
    return folder / "run"


def commands(trained, out):
    """Each command that writes a file at a path it is given: what to call, and with which keys."""
    beside = trained.parent
    return {
        "results_path": (evaluate.main, [f"results_path={out}", "eval_steps=1"]),
        "scores_path": (evaluate.main, [f"texts_path={beside}/texts.txt", f"scores_path={out}"]),
        "logits_path": (evaluate.main, [f"tokens_path={beside}/ids.npy", f"logits_path={out}"]),
        "decode_path": (decode.main, [f"decode_path={out}", "prompt=a", "sample_length=2"]),
    }


FOREIGN = {
    "a run's config.yml": lambda trained: (trained / "config.yml").read_bytes(),
    "data in JSON lines": lambda trained: b'{"text": "mine"}\n',
    "ids": lambda trained: (trained.parent / "ids.npy").read_bytes(),
    "another program's logits": lambda trained: (trained.parent / "logits.npy").read_bytes(),
    "JSON": lambda trained: b'{\n  "mine": 1\n}\n',
    "texts, of which a later one has scores": lambda trained: (
        b'{"text": "a"}\n{"text": "b", "log_probs": [null, -1]}\n'
    ),
}


@pytest.mark.parametrize("key", ["results_path", "scores_path", "logits_path", "decode_path"])
def test_a_command_replaces_what_it_wrote_and_nothing_else(trained, tmp_path, key):
    out = tmp_path / "new folder" / "out"
    main, keys = commands(trained, out)[key]
    argv = [str(trained), f"jax_cache_dir={runs.TINY['jax_cache_dir']}", *keys]
    for _ in range(2):
        main(argv)
        written = out.read_bytes()
    beside = [out, out.with_name("out.settings")] if key == "decode_path" else [out]
    assert sorted(beside) == sorted(out.parent.iterdir())
    for content in FOREIGN.values():
        for file in beside:
            out.unlink(missing_ok=True)
            file.write_bytes(content(trained))
            with pytest.raises(UserError, match=f"{key}.*=.*another file exists there"):
                main(argv)
            assert file.read_bytes() == content(trained)
            file.unlink()
    out.write_bytes(written if key != "decode_path" else b"")
    main(argv)
    assert len(out.read_bytes()) == len(written)


@pytest.mark.parametrize("name", ["config.yml", "environment.json", "metrics.jsonl", "report.html", "sample.txt"])
def test_a_run_replaces_nothing_in_a_folder_that_is_not_a_runs(trained, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("steps: 5  # mine\n")
    with pytest.raises(UserError, match=f"run/{name} exists, and .*config.yml is not from a run"):
        runs.run_here(base_output_directory=tmp_path, dataset_path=trained.parent / "corpus", steps=1)
    assert runs.contents(tmp_path) == {f"run/{name}": b"steps: 5  # mine\n"}


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(trained, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.yml", "environment.json", "metrics.jsonl", "report.html"):
        (tmp_path / "run" / name).write_bytes((trained / name).read_bytes())
    RunFolder(str(tmp_path), "run").check_writable()


def test_a_report_replaces_no_page_of_somebody_elses(trained):
    pages = trained / "report.html", trained / "comparison.html"
    (trained.parent / "again").symlink_to(trained)
    for file, argv in zip(pages, ([str(trained)], [str(trained), str(trained.parent / "again")]), strict=True):
        comparison.main(argv)
        comparison.main(argv)
        file.write_text("<!doctype html>\n<p>mine</p>\n")
        with pytest.raises(UserError, match=f"{file}.*another file exists there"):
            comparison.main(argv)
        assert file.read_text() == "<!doctype html>\n<p>mine</p>\n"
        file.unlink()


def test_what_the_commands_write_is_what_they_wrote_before(trained, tmp_path):
    """Files of earlier versions are replaced too: the first bytes of each kind, as f47738a wrote them."""
    kept = {
        "results_path": json.dumps({"eval_loss": 1.5, "eval_perplexity": 4.5}, indent=2),
        "compile_report": json.dumps({"topology": "v5e-16", "slices": 1}, indent=2),
        "scores_path": json.dumps({"text": "a", "ids": [1, 2], "log_probs": [None, -1.5], "log_prob": -1.5}),
        "compiled_trainstep_file": "MinText compiled training step, format 2\nsha256 ab of the 3 bytes that follow\n",
        "pgle_profile": "MinText PGLE profile, format 1\n",
    }
    for key, text in kept.items():
        (tmp_path / key).write_text(text)
        check_outputs({key: str(tmp_path / key)})
    named = {"eval_loss/books": 1.5}
    (tmp_path / "results_path").write_text(json.dumps(named, indent=2))
    check_outputs({"results_path": str(tmp_path / "results_path")})
