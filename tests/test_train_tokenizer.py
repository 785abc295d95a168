import json

import pytest
import sentencepiece
from transformers import AutoTokenizer

from src.data.open import open_sources
from src.data.readers.text import TextSource
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.extras.datasets.train_tokenizer import _parts, main, train
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.run.resolve_config import load
from src.system.errors import UserError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for n in range(20):
        lines = "".join(f"    if value_{n} is None:\n        return {k} * {n}\n\n" for k in range(10))
        (folder / f"{n}.py").write_text(f"def function_{n}(value):\n{lines}\treturn 'é{n}'\n")
    return folder


@pytest.fixture
def command(corpus, tmp_path):
    path = tmp_path / "out" / "t.model"
    keys = {"dataset_path": corpus, "tokenizer_type": "sentencepiece", "tokenizer_path": path, "vocab_size": 400}

    def make(**changes):
        return ["configs/base.yml", *(f"{key}={value}" for key, value in (keys | changes).items())]

    return make, path


def test_the_command_writes_a_tokenizer_of_that_size_for_that_text(command, corpus):
    make, path = command
    main(make())
    tokenizer = SentencePieceTokenizer(str(path))
    assert tokenizer.vocab_size == 400
    source = TextSource(str(corpus), 64 * 1024)
    for i in range(len(source)):
        ids = tokenizer.encode(source[i])
        assert tokenizer.decode(ids) == source[i]
        assert len(ids) < len(source[i]) / 3


def test_with_the_type_huggingface_it_writes_a_folder_that_transformers_reads_too(command, corpus, tmp_path):
    make, path = command
    main(make())
    folder = tmp_path / "folder"
    argv = make(tokenizer_type="huggingface", tokenizer_path=folder)
    main(argv)
    ours, theirs = SentencePieceTokenizer(str(path)), AutoTokenizer.from_pretrained(folder)
    config = load(argv)
    again = make_tokenizer(config.data, config.model.vocab_size)
    for file in sorted(corpus.iterdir())[:3]:
        text = file.read_text()
        assert again.encode(text).tolist() == ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == ours.encode_prompt(text).tolist()
    main(argv)


def test_the_same_command_writes_the_same_file(command, tmp_path, capsys):
    make, path = command
    main(make())
    main(make())
    assert f"{path} already exists" in capsys.readouterr().out
    main(make(tokenizer_path=tmp_path / "again.model"))
    assert path.read_bytes() == (tmp_path / "again.model").read_bytes()


def knows(path, character):
    """Whether a character has a piece of its own; without one it takes its UTF-8 bytes."""
    return len(SentencePieceTokenizer(str(path)).encode(character)) == len(["bos", character, "eos"])


def test_a_folder_that_a_killed_command_left_unfinished_is_completed(command, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    make, _ = command
    words, folder = make(tokenizer_type="huggingface", tokenizer_path=tmp_path / "mine"), tmp_path / "mine"
    with monkeypatch.context() as patch:
        patch.setattr("src.extras.datasets.train_tokenizer.save_tokenizer", killed)
        with pytest.raises(KeyboardInterrupt):
            main(words)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.model"]
    main(words)
    assert AutoTokenizer.from_pretrained(folder).vocab_size == 400


@pytest.mark.parametrize(("eval_interval", "seen"), [(-1, True), (10, False)])
def test_documents_held_out_for_evaluation_are_not_trained_on(command, corpus, eval_interval, seen):
    make, path = command
    config = load(make(eval_interval=10))
    _, (evaluation,) = open_sources(InputSpec.of(config, None), config.evaluation)
    held_out = evaluation.source
    texts = [held_out[i] for i in range(len(held_out))]
    for file in corpus.iterdir():
        if file.read_text() in texts:
            file.write_text("def § ( ): § § §\n" * 500)
    main(make(eval_interval=eval_interval))
    assert knows(path, "é")
    assert knows(path, "§") == seen


@pytest.mark.parametrize("vocab_size", [280, 100_000])
def test_a_vocabulary_the_text_does_not_give_is_an_error(vocab_size):
    with pytest.raises(UserError, match=f"vocab_size={vocab_size} does not suit this text: Vocabulary size"):
        train(["abcdefghijklmnopqrstuvwxyz " * 10] * 10, vocab_size)


def test_lines_that_sentencepiece_would_leave_out_are_trained_on_too():
    texts = ["the cat sat on the mat\n" * 100, "zebra quagga " * 400, "斑馬" * 1000]
    model = sentencepiece.SentencePieceProcessor(model_proto=train(texts, 320))
    assert {"▁zebra", "▁quagga", "斑馬", "▁cat"} <= {model.id_to_piece(i) for i in range(320)}
    for line in ("x " * 3000, "é\x1f" * 3000, "斑" * 3000 + " x", " " * 5000):
        parts = _parts(line)
        assert "".join(parts) == line
        assert max(len(part.encode()) for part in parts) <= 4192


def test_data_without_text_are_an_error(command, tmp_path):
    make, _ = command
    for line, message in (({"text": ""}, "contains no text"), ({"text": [1, 2]}, "has lists of ids")):
        (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(UserError, match=message):
            main(make(dataset_path=tmp_path / "data.jsonl"))


def test_a_path_may_begin_with_the_home_folder(command, tmp_path, monkeypatch):
    make, _ = command
    monkeypatch.setenv("HOME", str(tmp_path))
    main(make(tokenizer_path="~/t.model"))
    assert SentencePieceTokenizer("~/t.model").model == (tmp_path / "t.model").read_bytes()


def test_an_existing_file_is_kept(command):
    make, path = command
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(UserError, match=f"tokenizer_path={path} exists"):
        main(make())
    assert path.read_text() == "precious"


def test_a_path_that_can_not_be_written_is_an_error(command, tmp_path):
    make, _ = command
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"):
        main(make(tokenizer_path=tmp_path / "file" / "t.model"))


@pytest.mark.parametrize("changes", [{"dataset_type": "synthetic"}, {"tokenizer_type": "byte", "tokenizer_path": ""}])
def test_other_data_or_tokenizers_are_an_error(command, changes):
    make, _ = command
    with pytest.raises(UserError, match="dataset_type=text tokenizer_type=sentencepiece"):
        main(make(**changes))


def test_help_is_answered(capsys):
    main(["--help", "tokenizer_path"])
    assert "tokenizer_path" in capsys.readouterr().out
