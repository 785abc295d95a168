"""Trains a SentencePiece tokenizer on a run's training text, without its held-out part. Output is deterministic.

With tokenizer_type=huggingface, `tokenizer_path` is a folder with the model as tokenizer.model, and as tokenizer.json
and tokenizer_config.json, which other programs read.
"""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from src.config.run_configs import HUB
from src.config.usage import Usage
from src.data import order
from src.data.open import open_sources
from src.data.types import InputSpec
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.extras.hf.tokenizer_json import save_tokenizer
from src.run import resolve_config
from src.system.disk import new_file
from src.system.errors import UserError, show

USAGE = Usage(
    """Trains a SentencePiece tokenizer on a run's text.

python -m src.train_tokenizer CONFIG dataset_path=TEXT tokenizer_type=sentencepiece tokenizer_path=OUT.model \\
    vocab_size=8000 [key=value ...]              (tokenizer_type=huggingface: OUT is a folder with a tokenizer.json)""",
    ("Data",),
)

# Train on a random sample of documents up to these limits: enough for merges to settle, and about a minute of work.
_MAX_DOCUMENTS = 50_000
_MAX_CHARACTERS = 30_000_000
_MAX_LINE_BYTES = 4192  # SentencePiece's default limit: it leaves out longer lines, without a word


def main(argv: Sequence[str] | ConfigDict) -> None:
    """Runs the command line `argv`: writes a tokenizer to `tokenizer_path`, or answers --help.

    Raises UserError if the keys ask for another kind of data or tokenizer, `tokenizer_path` exists with other content
    or can't be written, or the texts are too few for `vocab_size`; also as `of_command` and `open_sources` do.
    """
    config = resolve_config.of_command(argv, USAGE)
    if config is None:
        return
    keys = config.data
    if keys.dataset_type != "text" or keys.datasets or keys.use_sft or keys.tokenizer_type == "byte":
        raise UserError(
            "src.train_tokenizer needs dataset_type=text tokenizer_type=sentencepiece (or huggingface) use_sft=false "
            "datasets=[]"
        )
    if keys.tokenizer_path.startswith(HUB):
        raise UserError(f"tokenizer_path={keys.tokenizer_path}: a new tokenizer is written to a path on this machine")
    path = Path(keys.tokenizer_path).expanduser()
    file = path if keys.tokenizer_type == "sentencepiece" else path / "tokenizer.model"
    data, _ = open_sources(InputSpec.of(config, None), config.evaluation)
    source: Any = data.sources[0]
    texts = list(_sample(source, config.data.data_shuffle_seed))
    read = f"{len(texts):,} of {len(source):,} documents or pieces of them, {sum(map(len, texts)):,} characters"
    show(f"training on {read}")
    model = train(texts, config.model.vocab_size)
    if file.is_file() and file.read_bytes() == model:
        if file == path or (path / "tokenizer_config.json").is_file():  # which is written last
            show(f"{path} already exists, identical to what this command writes")
            return
    elif path.exists():
        raise UserError(
            f"tokenizer_path={path} exists with other content, which runs may need: name a new file, or delete this one"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as opened:
            opened.write(model)
        if file != path:
            save_tokenizer(path, SentencePieceTokenizer(str(file)))
    except OSError as error:
        raise UserError(f"tokenizer_path={path} can't be written: {error.strerror}") from error
    show(f"wrote {path}")


def train(texts: Sequence[str], vocab_size: int) -> bytes:
    """Trains a SentencePiece BPE model of exactly `vocab_size` pieces; returns the serialized model.

    It decodes ids to the encoded text: text is neither normalized nor trimmed, runs of spaces may become pieces
    (indentation), and characters without a piece are encoded as bytes. Only U+2581, SentencePiece's symbol for a space,
    is lost: it decodes to a space. Raises UserError if all texts are empty, or if `vocab_size` doesn't suit them.
    """
    import sentencepiece

    if not any(map(str.strip, texts)):
        raise UserError("the data contains no text: there is nothing to train on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for text in texts for line in text.splitlines() for part in _parts(line)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,  # errors only, which are raised as exceptions too
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]  # after the position in SentencePiece's source
        raise UserError(f"vocab_size={vocab_size} does not suit this text: {reason}") from None
    return model.getvalue()


def _parts(line: str) -> list[str]:
    """Cuts a line that is too long for SentencePiece into parts that it takes, before spaces if there are any."""
    if len(line.encode()) <= _MAX_LINE_BYTES:
        return [line]
    most = _MAX_LINE_BYTES // 4  # characters, of at most four bytes each
    return re.findall(rf"(?s).{{1,{most}}}(?= |$)|.{{1,{most}}}", line)


def _sample(source: Any, seed: int) -> Iterator[str]:
    characters = 0
    for i in range(min(len(source), _MAX_DOCUMENTS)):
        text = source[order.permute(i, len(source), seed, source=0, epoch=0)]
        if not isinstance(text, str):
            raise UserError("the data has lists of ids, from which no tokenizer can be trained: give texts")
        characters += len(text)
        if i > 0 and characters > _MAX_CHARACTERS:
            return
        yield text
