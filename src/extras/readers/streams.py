"""Reads documents in sequence from iterators such as Grain's IterDataset and Hugging Face's IterableDataset.

The documents are not numbered, so each host has its own stream and fills its rows from it in order. A host resumes at
the stream's own state, which checkpoints save, so a run has to resume with the same number of hosts.
"""

import collections
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags

from src.data.document_stream import encode, layout_of
from src.data.order import permute
from src.data.packing import PackingStream, SourcePacker, Truncation
from src.data.processes import gather_json
from src.data.types import Fingerprint, InputSpec, Item, RowArrays, Source
from src.system.errors import UserError, say
from src.system.user_code import call

_WINDOW = 1024  # documents to read, and maybe shuffle, at once; the state before each window can be saved


class StreamSource(Source):
    """Reads one host's documents from an iterable, which restarts each time it is iterated over.

    Either its iterators have get_state and set_state, as in Grain, or it has state_dict and load_state_dict itself.
    `name` is for messages; `read(i, item)` converts item i of an epoch to a document; `facts` is the fingerprint. With
    `shuffles`, the documents of a window of 1,024 come in a random order.
    """

    is_stream = True

    def __init__(
        self, name: str, iterable: Any, read: Callable[[int, Any], Item], facts: Fingerprint, shuffles: bool = False
    ) -> None:
        self.name, self._iterable, self._read, self._facts, self.shuffles = name, iterable, read, facts, shuffles
        # With `datasets`, a host may get different files each epoch, and so a different number of documents.
        self.moves_files = hasattr(iterable, "set_epoch") and jax.process_count() > 1

    def __len__(self) -> NoReturn:
        """Raises UserError: a stream's documents are not counted."""
        raise UserError(
            f"{self.name} is a stream, read in sequence: its documents cannot be counted, and none can be held out. "
            "Name data to evaluate on (eval_dataset_path, eval_datasets), with eval_mode=reset and eval_steps=N; "
            "src.decode takes the first decode_num_prompts=N; other tools take numbered documents"
        )

    def __getitem__(self, i: int) -> Item:
        """Raises UserError: use a `StreamReader`."""
        self.__len__()

    def check_hosts_differ(self) -> None:
        """Raises UserError on every process if two begin with the same documents; every process calls it.

        Also raises as `open` and `items` do.
        """
        first = list(map(str, self.items(self.open(0, None)[0], 0, 8)))
        everyones = list(map(str, gather_json(first)))
        if len(set(everyones)) < len(everyones):
            raise UserError(
                f"{self.name}: the streams of two processes begin with the same documents. Give each process its own "
                "documents, such as dataset[jax.process_index() :: jax.process_count()]"
            )

    def check_rows(self, rows: int, global_batch: int) -> None:
        """Raises UserError if processes share rows of a batch; every process calls it, with its number of rows."""
        if jax.process_count() > 1 and sum(gather_json(rows)) != global_batch:
            raise UserError(
                f"{self.name} is one stream per process, and on this mesh processes share rows: make the product of "
                "the sizes of the axes data, fsdp and expert a multiple of the number of processes"
            )

    def fingerprint(self) -> Fingerprint:
        """Gives the facts passed to the constructor, which must be the same on all hosts."""
        return self._facts

    def open(self, epoch: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        """Opens an epoch at a saved state (None: its start); returns an iterator of items and a getter of its state.

        If the iterable's own code raises, raises UserError, or TransientError if the failure may pass.
        """
        if hasattr(self._iterable, "load_state_dict"):
            if hasattr(self._iterable, "set_epoch"):  # `datasets` has it: the order of files changes each epoch
                call(self.name, self._iterable.set_epoch, epoch)
            if state is not None:
                call(self.name, self._iterable.load_state_dict, state)
            return call(self.name, iter, self._iterable), self._iterable.state_dict
        if not flags.FLAGS.is_parsed():  # Grain starts its workers by absl flags: use the defaults
            flags.FLAGS.mark_as_parsed()
        iterator = call(self.name, iter, self._iterable)
        if state is not None:
            has_text = isinstance(call(self.name, iterator.get_state), bytes)  # grain.DataLoader returns bytes
            call(self.name, iterator.set_state, state.encode() if has_text else state)
        return iterator, iterator.get_state

    def items(self, iterator: Iterator[Any], before: int, count: int = _WINDOW) -> list[Item]:
        """Reads at most `count` documents, [] at the epoch's end; `before` is the number of earlier ones in the epoch.

        Raises as `open` does if the iterator's own code raises, and as the constructor's `read` does.
        """
        items = call(f"{self.name}, after {before} documents of an epoch", lambda: list(islice(iterator, count)))
        return [self._read(number, item) for number, item in enumerate(items, start=before)]

    def state(self, get_state: Callable[[], Any]) -> Any:
        """Reads the state as a JSON value. Raises UserError for a state from which a run could not resume exactly.

        Also raises as `open` does if `get_state` raises or returns anything that JSON lacks.
        """

        def as_json() -> str:
            state = get_state()
            return json.dumps(state.decode() if isinstance(state, bytes) else state, default=lambda x: x.tolist())

        text = call(f"{self.name}: its state", as_json)
        if "BufferShuffled" in text:
            raise UserError(
                f"{self.name}: datasets does not save the buffer of shuffle(buffer_size=...), so a run could not "
                "resume exactly: leave it out; documents are shuffled in windows of 1,024 here"
            )
        return json.loads(text)


class Window(NamedTuple):
    """Holds the point in a stream at which a window of documents begins."""

    first: int = 0  # the number of its first document, over all epochs
    epoch: int = 0
    read: int = 0  # documents of the epoch read before the window
    length: int | None = None  # documents that the epoch must have; None: any number
    state: Any = None  # the stream's own state; None at the start of an epoch


class StreamReader:
    """Numbers the documents of a host's stream, from the state `saved` on; None: from the start.

    Raises as `StreamSource.open` does.
    """

    def __init__(self, source: StreamSource, seed: int, saved: Mapping[str, Any] | None) -> None:
        self._source, self._seed = source, seed
        self._next = Window(*(saved[field] for field in Window._fields)) if saved else Window()
        self._iterator, self._get_state = source.open(self._next.epoch, self._next.state)
        self._first, self._items = self._next.first, list[Item]()  # of the newest window
        self._windows: collections.deque[Window] = collections.deque()  # windows that `saved` may return

    def __call__(self, number: int) -> Item:
        """Reads document `number`; calls must not go back before the current window.

        Prints a message when another epoch begins. Raises UserError if an epoch has no documents, or not as many as the
        one before (unless the stream `moves_files`), and as the methods of `StreamSource` do.
        """
        assert number >= self._first, "a stream is read forwards only"
        while number >= self._first + len(self._items):
            self._read_window()
        return self._items[number - self._first]

    def saved(self, oldest: int) -> dict[str, Any]:
        """Returns the state from which a new reader reads document `oldest` and all later ones: its window's start.

        Forgets earlier windows, so later calls must not pass a smaller `oldest`.
        """
        while len(self._windows) > 1 and self._windows[1].first <= oldest:
            self._windows.popleft()
        return (self._windows[0] if self._windows else self._next)._asdict()

    def _read_window(self) -> None:
        source, window = self._source, self._next
        items = source.items(self._iterator, window.read)
        while not items:
            if not window.read or window.read != (window.length or window.read):
                before = f", and the epoch before had {window.length:,}" if window.read else ""
                raise UserError(f"{source.name}: the stream ended after {window.read:,} documents of an epoch{before}")
            say([f"{source.name}: all {window.read:,} documents of this host's stream were read; it starts again"])
            window = Window(window.first, window.epoch + 1, length=None if source.moves_files else window.read)
            self._iterator, self._get_state = source.open(window.epoch, None)
            items = source.items(self._iterator, window.read)
        count, state = len(items), source.state(self._get_state)
        self._next = window._replace(first=window.first + count, read=window.read + count, state=state)
        if source.shuffles:
            key = f"window {window.first}"
            items = [items[permute(i, count, self._seed, key, window.epoch)] for i in range(count)]
        self._windows.append(window)
        self._first, self._items = window.first, items


class StreamPacker(SourcePacker):
    """Fills all rows of a host from its stream, in order, in a single thread.

    Raises as `StreamSource.check_rows` and `StreamReader` do.
    """

    def __init__(
        self, inputs: InputSpec, source: StreamSource, rows: int, global_batch: int, saved: Mapping[str, Any] | None
    ) -> None:
        source.check_rows(rows, global_batch)
        self._reader = reader = StreamReader(source, inputs.data.data_shuffle_seed, saved)
        position = saved["position"] if saved else (0, 0)
        self._stream = PackingStream(lambda number: encode(inputs, reader(number)), 0, 1, layout_of(inputs), position)

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Truncation:
        return self._stream.fill(batch, row)

    def saved(self) -> dict[str, Any]:
        position = self._stream.position
        return {**self._reader.saved(position[0]), "position": position}
