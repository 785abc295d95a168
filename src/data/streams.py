"""Documents that come one after the other: Grain's IterDataset, Hugging Face's IterableDataset, and what is like them.

They have no numbers, so each host has a stream of its own, and fills its rows from it in their order. The stream's own
state, saved with a checkpoint, says where a host goes on, so a run goes on with as many hosts as it had.
"""

import collections
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import jax
from absl import flags

from src.data.document_stream import encode, layout_of
from src.data.host_arrays import gather_json
from src.data.order import permute
from src.data.packing import PackingStream, SourcePacker, Truncation
from src.data.types import Fingerprint, InputSpec, Item, RowArrays, Source
from src.system.errors import UserError, say
from src.system.user_code import call

_WINDOW = 1024  # documents that are read, and may be shuffled, together; the state before each window can be saved


class StreamSource(Source):
    """Reads one host's documents from an iterable, which begins anew each time it is iterated over.

    Either its iterators have get_state and set_state, as Grain's have, or it has state_dict and load_state_dict itself.
    `read(i, item)` makes a document of its item i. With `shuffles` the documents of a window come in a random order.
    """

    is_stream = True

    def __init__(
        self, name: str, iterable: Any, read: Callable[[int, Any], Item], facts: Fingerprint, shuffles: bool = False
    ) -> None:
        self.name, self._iterable, self._read, self._facts, self.shuffles = name, iterable, read, facts, shuffles
        # Whether a host has other files in each epoch, as of datasets, and so other counts of documents.
        self.moves_files = hasattr(iterable, "set_epoch") and jax.process_count() > 1

    def __len__(self) -> int:
        raise UserError(
            f"{self.name} is a stream, whose documents come one after the other: they are not counted, and none are "
            "held out. Name data to evaluate on (eval_dataset_path, eval_datasets), with eval_mode=reset and "
            "eval_steps=N; src.decode takes the first decode_num_prompts=N; other tools take numbered documents"
        )

    def check_hosts_differ(self) -> None:
        """Raises UserError on every process, each of which calls this, where two have the same documents first."""
        first = list(map(str, self.items(self.open(0, None)[0], 0, 8)))
        everyones = list(map(str, gather_json(first)))
        if len(set(everyones)) < len(everyones):
            raise UserError(
                f"{self.name}: the streams of two processes begin with the same documents. Give each documents of its "
                "own, such as those of dataset[jax.process_index() :: jax.process_count()]"
            )

    def check_rows(self, rows: int, global_batch: int) -> None:
        """Raises UserError unless each row of a batch, of which this process has `rows`, is of one process alone."""
        if jax.process_count() > 1 and sum(gather_json(rows)) != global_batch:
            raise UserError(
                f"{self.name} is a stream for each process, and on this mesh processes share rows: let the sizes of "
                "the axes data, fsdp and expert multiply to a multiple of the number of processes"
            )

    def fingerprint(self) -> Fingerprint:
        """Returns the facts it was made with, which are every host's."""
        return self._facts

    def open(self, epoch: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        """Begins an epoch, at its start or at a state of it; returns its items, and what gives the state among them."""
        if hasattr(self._iterable, "load_state_dict"):
            if hasattr(self._iterable, "set_epoch"):  # as datasets has, of which each epoch has another order of files
                call(self.name, self._iterable.set_epoch, epoch)
            if state is not None:
                call(self.name, self._iterable.load_state_dict, state)
            return call(self.name, iter, self._iterable), self._iterable.state_dict
        if not flags.FLAGS.is_parsed():  # Grain's worker processes are started by flags of absl, at their defaults
            flags.FLAGS.mark_as_parsed()
        iterator = call(self.name, iter, self._iterable)
        if state is not None:
            has_text = isinstance(call(self.name, iterator.get_state), bytes)  # as a grain.DataLoader's
            call(self.name, iterator.set_state, state.encode() if has_text else state)
        return iterator, iterator.get_state

    def items(self, iterator: Iterator[Any], before: int, count: int = _WINDOW) -> list[Item]:
        """Reads the next documents, `count` at most; `before` came before them in the epoch."""
        items = call(f"{self.name}, after {before} documents of an epoch", lambda: list(islice(iterator, count)))
        return [self._read(number, item) for number, item in enumerate(items, start=before)]

    def state(self, get_state: Callable[[], Any]) -> Any:
        """Returns a state as JSON has it. Raises UserError for one that would not go on exactly."""

        def as_json() -> str:
            state = get_state()
            return json.dumps(state.decode() if isinstance(state, bytes) else state, default=lambda x: x.tolist())

        text = call(f"{self.name}: its state", as_json)
        if "BufferShuffled" in text:
            raise UserError(
                f"{self.name}: datasets does not save the buffer of shuffle(buffer_size=...), so a run could not go "
                "on exactly: leave it out; documents are shuffled in windows of 1,024 here"
            )
        return json.loads(text)


class Window(NamedTuple):
    """Says how a window of documents begins."""

    first: int = 0  # the number of its first document, over all epochs
    epoch: int = 0
    read: int = 0  # documents of the epoch before it
    length: int | None = None  # documents that the epoch has to have; None: any number
    state: Any = None  # the stream's own; None at the start of an epoch


class StreamReader:
    """Numbers the documents of a host's stream; `saved` says where it begins, None: at the start."""

    def __init__(self, source: StreamSource, seed: int, saved: Mapping[str, Any] | None) -> None:
        self._source, self._seed = source, seed
        self._next = Window(*(saved[field] for field in Window._fields)) if saved else Window()
        self._iterator, self._get_state = source.open(self._next.epoch, self._next.state)
        self._first, self._items = self._next.first, list[Item]()  # of the window that was read last
        self._windows: collections.deque[Window] = collections.deque()  # those that `saved` may return

    def __call__(self, number: int) -> Item:
        """Returns document `number`; a later call asks for a later one."""
        assert number >= self._first, "a stream goes forwards alone"
        while number >= self._first + len(self._items):
            self._read_window()
        return self._items[number - self._first]

    def saved(self, oldest: int) -> dict[str, Any]:
        """Returns where to begin for document `oldest` and those after it: less than a window before it."""
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
            say([f"{source.name}: all {window.read:,} documents of this host's stream are read, it begins again"])
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
    """Fills all rows of a host from its stream, in their order, by one thread."""

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
