"""Declares the types that data modules share: documents, their sources, tokenizers, and what a run reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from src.config import schema
from src.data.rules import PRESENT_RULES
from src.system.errors import UserError

# The arrays of a batch, [rows, T].
BATCH_ARRAYS: dict[str, type] = {
    "tokens": np.int32,  # inputs
    "targets": np.int32,  # the id that follows each input in its document
    "segment_ids": np.int32,  # 1 and up for the documents of a row, 0 for padding
    "positions": np.int32,  # from 0 in each segment
    "loss_mask": np.float32,  # 1 where the target counts in the loss; 0 on padding
}
END, NOT_TEXT = -1, -2  # of `text_bytes`: bos and eos; ids of no text, and padding
RowArrays = dict[str, np.ndarray]  # a host's rows of them
Fingerprint = dict[str, str | int]  # facts on which data depend, by name: equal exactly where the data are
Message = Mapping[str, Any]  # {"role": ..., "content": ..., and any other field that a chat template reads}
Shown = Mapping[str, Any] | None  # what a chat template is shown beside the messages, such as `tools`


class Document(NamedTuple):
    """Holds a document in ids, int32 [n], where n may be 0."""

    ids: np.ndarray
    loss_mask: np.ndarray | None = None  # bool [n]: which count in the loss; None: all do
    text_bytes: np.ndarray | None = None  # int32 [n]: bytes of text in UTF-8 that each is; END; NOT_TEXT


class Conversation(NamedTuple):
    """Holds messages, such as those of the line of a .jsonl file that begins at byte `start`."""

    messages: tuple[Message, ...]
    is_pair: bool = False  # it was given as prompt and completion, which are then the two messages
    file: str = ""
    start: int = 0
    shown: Shown = None


# A document before it is tokenized: a text, a conversation, or ids as int32 [n]. Texts and ids may be empty.
Item = str | Conversation | np.ndarray


class Source(Protocol):
    """Numbers documents from 0; they are read in any order and from several threads at a time."""

    is_remote = False  # reading a document is a request to a store
    is_stream = False  # documents come one after the other, without numbers: a `streams.StreamSource`
    listings: Sequence[Any] = ()  # of the files that are read (`readers.files.Listing`)

    def __len__(self) -> int:
        """Counts the documents. Opening a source of a hundred million and this cost no more than of one."""

    def __getitem__(self, i: int) -> Item:
        """Reads document `i`; raises UserError naming the place of what can't be read."""

    def document_keys(self) -> np.ndarray | None:
        """Returns uint64 [documents]: a hash that the pieces of one document share; None: too many to list."""
        return None

    def group_sizes(self) -> np.ndarray | None:
        """Returns int64: how many documents are stored together and read at once, in order; None: each is alone."""
        return None

    def fingerprint(self) -> Fingerprint:
        """Returns facts that are equal for sources with the same documents, wherever they are stored."""


@runtime_checkable
class RowSource(Protocol):
    """Numbers rows from 0, each of T targets and complete in itself, so that no position has to be kept.

    `row_count` rows of an epoch come in a random order; None: they are endless, and come as they are numbered. One that
    reads files has `listings`, as a `Source` has.
    """

    row_count: int | None

    def row(self, i: int) -> list[Document]:
        """Returns the documents of row `i`, which have T targets together; the last row may have fewer."""

    def fingerprint(self) -> Fingerprint:
        """Returns facts that are equal for sources with the same rows, wherever they are stored."""


def is_stream(source: Source | RowSource) -> bool:
    """Tells a `streams.StreamSource` from sources whose documents or rows are numbered."""
    return getattr(source, "is_stream", False)


class TrainData(NamedTuple):
    """Holds what a run trains on: sources by their names in the config ("" for one alone), and each one's share."""

    names: tuple[str, ...]
    sources: tuple[Source | RowSource, ...]
    weights: tuple[float, ...]


class EvalSet(NamedTuple):
    """Holds what a run evaluates on: a set's name in the config ("" for one alone), and batches, -1 for one epoch."""

    name: str
    source: Source | RowSource
    steps: int


class Tokenizer(Protocol):
    """Translates text to ids and back. A document's ids are [bos, ..., eos], neither doubled if its text spells it."""

    vocab_size: int  # a model's vocabulary has at least as many ids
    bos: int
    eos: int
    stop_ids: frozenset[int]  # the ids that end the model's turn, eos among them
    chat_template: str | None = None  # the source of the template that `render_chat` follows
    tool_template: str | None = None  # what it follows instead for conversations with tools
    caveat: str = ""  # why transformers may give other ids
    rules: int = PRESENT_RULES  # of data: by the first, a bos or eos that a text spells was doubled

    def encode(self, text: str) -> np.ndarray:
        """Returns the int32 ids of a document, with bos and eos."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """Returns the int32 ids of the beginning of a document, with bos."""
        return self.encode(text)[:-1]

    def encode_default(self, text: str) -> np.ndarray:
        """Returns the int32 ids that a Hugging Face model's tokenizer gives by default, mostly with bos."""
        return self.encode_prompt(text)

    def encode_text(self, text: str) -> np.ndarray:
        """Returns the int32 ids of the text alone."""
        return self.encode(text)[1:-1]

    def byte_ends(self, text: str) -> np.ndarray:
        """Returns how many bytes of the text, in UTF-8, each of `encode_text`'s ids and those before it stand for."""

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool, shown: Shown = None) -> str:
        """Writes a conversation as the chat template does, special tokens included, for `encode_text`.

        With `add_generation_prompt` it ends where the assistant's next turn begins. `strftime_now`, in ISO format, is
        the time that the template is told, else the present. Raises UserError where there is no template, or it refuses
        the conversation.
        """
        return self.render_parts(messages, [(len(messages), add_generation_prompt)], shown)[0]

    def render_parts(
        self, messages: Sequence[Message], parts: Sequence[tuple[int, bool]], shown: Shown = None
    ) -> list[str]:
        """Writes parts of a conversation as `render_chat` does: of each its number of messages, and how it ends."""
        raise missing_template()

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of ids. Special ids, and ids beyond the vocabulary, give none."""

    def decode_spelled(self, ids: np.ndarray) -> str:
        """Returns the text of `encode_text`'s ids, with the special tokens that a text spells where they are read."""
        return self.decode(ids)

    def fingerprint(self) -> Fingerprint:
        """Returns facts that are equal for tokenizers that give the same ids."""


def missing_template() -> UserError:
    """Makes the error that answers a conversation where the tokenizer has no chat template."""
    return UserError(
        "messages are written by a chat template, and this tokenizer has none: set tokenizer_type=huggingface, and "
        "tokenizer_path to a folder that has one in chat_template.jinja or as chat_template in tokenizer_config.json"
    )


class InputSpec(NamedTuple):
    """Says how documents become rows: sections of the config, and the tokenizer."""

    data: schema.Data
    batch: schema.BatchKeys
    vocab_size: int  # V; ids are in [0, V)
    tokenizer: Tokenizer | None  # None where nothing is text
    config: schema.Config  # all keys, for what the user wrote: `dataset_factory` is called with them
    count_bytes: Callable[[str], Document] | None = None  # tokenizes texts with their `text_bytes`
    rules: int = PRESENT_RULES  # version of them; an older run keeps its own

    @classmethod
    def of(cls, config: schema.Config, tokenizer: Tokenizer | None, rules: int = PRESENT_RULES) -> Self:
        """Takes the sections of a run's config, and gives its tokenizer the run's rules."""
        if tokenizer:
            tokenizer.rules = rules
        return cls(config.data, config.batch, config.vocab_size, tokenizer, config, rules=rules)
