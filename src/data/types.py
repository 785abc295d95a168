"""Declares the types that data modules share: documents, their sources, tokenizers, and a run's data sets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeGuard, runtime_checkable

import numpy as np

from src.config.schema import BatchKeys, Config, Data
from src.data.rules import PRESENT_RULES
from src.system.errors import UserError

# The arrays of a batch, [rows, T].
BATCH_ARRAYS: dict[str, type] = {
    "tokens": np.int32,  # inputs
    "targets": np.int32,  # the id that follows each input in its document
    "segment_ids": np.int32,  # 1 and up for the documents of a row, 0 for padding
    "positions": np.int32,  # from 0 in each segment
    "loss_mask": np.float32,  # 1 for targets that count in the loss; 0 for padding
}
END, NOT_TEXT = -1, -2  # `text_bytes` of bos and eos; of other ids without text, and of padding
RowArrays = dict[str, np.ndarray]  # a host's rows of the arrays of a batch, by name
Rows = Sequence[int] | np.ndarray  # numbers of a host's rows in a global batch, or of its packing streams; ascending
Fingerprint = dict[str, str | int]  # properties of data, by name, equal if the data are equal
Message = Mapping[str, Any]  # {"role": ..., "content": ..., and any other field that a chat template reads}
Shown = Mapping[str, Any] | None  # further inputs of a chat template, such as `tools`


class Document(NamedTuple):
    """Holds a tokenized document: ids, int32 [n]; n may be 0."""

    ids: np.ndarray
    loss_mask: np.ndarray | None = None  # bool [n]: ids that count in the loss; None: all
    text_bytes: np.ndarray | None = None  # int32 [n]: bytes of UTF-8 text per id, END or NOT_TEXT


class Conversation(NamedTuple):
    """Holds the messages of a conversation, such as the line of a .jsonl file that begins at byte `start`."""

    messages: tuple[Message, ...]
    is_pair: bool = False  # given as a prompt and a completion, which become two messages
    file: str = ""
    start: int = 0
    shown: Shown = None


# A document before it is tokenized: a text, a conversation, or ids as int32 [n]. Texts and ids may be empty.
Item = str | Conversation | np.ndarray


class Source(Protocol):
    """Numbers documents from 0; threads read them in any order, several at a time."""

    is_remote: bool = False  # each read is a request to a store
    is_stream: bool = False  # documents have no numbers and are read in sequence: a `streams.StreamSource`
    listings: Sequence[Any] = ()  # the files of the source (`readers.files.Listing`)

    def __len__(self) -> int:
        """Returns the number of documents, in constant time."""

    def __getitem__(self, i: int) -> Item:
        """Reads document `i`; raises UserError, naming its location, or TransientError if a store fails."""

    def document_keys(self) -> np.ndarray | None:
        """Hashes each document, uint64 [documents], equal for all pieces of a text; None: not supported."""
        return None

    def group_sizes(self) -> np.ndarray | None:
        """Returns the sizes of consecutive groups of documents stored together: int64 [groups]; None: no groups."""
        return None

    def fingerprint(self) -> Fingerprint:
        """Identifies the documents; equal for sources with the same documents, wherever they are stored."""


@runtime_checkable
class RowSource(Protocol):
    """Numbers rows from 0, each with T targets and independent of the others, so that no position has to be saved.

    An epoch has `row_count` rows, in random order; None: rows are endless, and in the order of their numbers. A source
    that reads files has `listings`, as a `Source` has.
    """

    row_count: int | None

    def row(self, i: int) -> list[Document]:
        """Reads the documents of row `i`, T targets in total, or fewer in the last row; raises as a `Source` does."""

    def fingerprint(self) -> Fingerprint:
        """Identifies the rows; equal for sources with the same rows, wherever they are stored."""


def is_stream(source: Source | RowSource) -> TypeGuard[Any]:
    """Returns whether a source is a `streams.StreamSource`: its documents are not numbered, but read in sequence."""
    return getattr(source, "is_stream", False)


class TrainData(NamedTuple):
    """Holds a run's training sources, their names in the config ("" for a single source), and weights."""

    names: tuple[str, ...]
    sources: tuple[Source | RowSource, ...]
    weights: tuple[float, ...]


class DataPosition(NamedTuple):
    """Holds the point in the training data at which a run begins or resumes."""

    streams: np.ndarray | None = None  # int32 [B, S, 2]: where each packing stream resumes in each source; None: start
    rows_taken: int = 0  # earlier rows of the run, over all hosts, since the batch or the data last changed
    rows_before: Mapping[str, int] = {}  # earlier rows of each source, by name, that `rows_taken` omits
    saved: Mapping[str, Any] = {}  # this process's state of each `StreamSource`, by name


START = DataPosition()


class EvalSet(NamedTuple):
    """Holds an evaluation set: its name in the config ("" for a single set), source, and batches (-1: one epoch)."""

    name: str
    source: Source | RowSource
    steps: int


class Tokenizer(Protocol):
    """Translates text to ids and back. A document is [bos, ..., eos]; a bos or eos in its text is not doubled.

    Encoding raises UserError if the tokenizer fails on a text, or gives it an id that the model does not have.
    """

    vocab_size: int  # a model's vocabulary has at least this many ids
    bos: int
    eos: int
    stop_ids: frozenset[int]  # ids that end the model's turn, including eos
    chat_template: str | None = None  # source of the template for `render_chat`
    tool_template: str | None = None  # source of the template for conversations with tools, if it differs
    caveat: str = ""  # why transformers may produce different ids
    rules: int = PRESENT_RULES  # data rules: version 1 doubled a bos or eos spelled in the text

    def encode(self, text: str) -> np.ndarray:
        """Encodes a document as int32 ids, with bos and eos."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encodes the beginning of a document as int32 ids, with bos."""
        return self.encode(text)[:-1]

    def encode_default(self, text: str) -> np.ndarray:
        """Encodes as a Hugging Face model's tokenizer does by default, usually with bos: int32 ids."""
        return self.encode_prompt(text)

    def encode_text(self, text: str) -> np.ndarray:
        """Encodes only the text as int32 ids, without bos and eos."""
        return self.encode(text)[1:-1]

    def byte_ends(self, text: str) -> np.ndarray:
        """Returns the byte of the UTF-8 text at which each of `encode_text`'s ids ends: int [ids]."""

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool, shown: Shown = None) -> str:
        """Renders a conversation by the chat template, including special tokens, as text for `encode_text`.

        With `add_generation_prompt` it ends with the header of the assistant's next turn. The template's clock shows
        `strftime_now` of `shown`, in ISO format, or else the present time. Raises UserError if the tokenizer lacks a
        template, or the template refuses the conversation.
        """
        return self.render_parts(messages, [(len(messages), add_generation_prompt)], shown)[0]

    def render_parts(
        self, messages: Sequence[Message], parts: Sequence[tuple[int, bool]], shown: Shown = None
    ) -> list[str]:
        """Renders parts of a conversation as `render_chat` does, given (number of messages, add_generation_prompt)."""
        raise missing_template()

    def decode(self, ids: np.ndarray) -> str:
        """Decodes ids to text. Special ids, and ids beyond the vocabulary, produce no text."""

    def decode_spelled(self, ids: np.ndarray) -> str:
        """Decodes `encode_text`'s ids, including special tokens if the tokenizer recognises them in texts."""
        return self.decode(ids)

    def fingerprint(self) -> Fingerprint:
        """Identifies the tokenizer; equal for tokenizers that produce the same ids."""


def missing_template() -> UserError:
    """Makes the error for a conversation if the tokenizer lacks a chat template."""
    return UserError(
        "messages are written by a chat template, and this tokenizer has none: set tokenizer_type=huggingface, and "
        "tokenizer_path to a folder that has one in chat_template.jinja or as chat_template in tokenizer_config.json"
    )


class InputSpec(NamedTuple):
    """Holds the settings by which documents become rows: sections of the config, and the tokenizer."""

    data: Data
    batch: BatchKeys
    vocab_size: int  # V; ids are in [0, V)
    tokenizer: Tokenizer | None  # None if no data are text
    config: Config  # all keys, for the user's code: `dataset_factory` is called with them
    count_bytes: Callable[[str], Document] | None = None  # tokenizes texts with their `text_bytes`
    rules: int = PRESENT_RULES  # version of the data rules; an older run keeps its own version

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer | None, rules: int = PRESENT_RULES) -> Self:
        """Selects the sections of a run's config, and sets the run's data rules in its tokenizer."""
        if tokenizer:
            tokenizer.rules = rules
        return cls(config.data, config.batch, config.model.vocab_size, tokenizer, config, rules=rules)
