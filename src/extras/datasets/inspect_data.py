"""Shows a run's batches as text, checks them, and measures the loader's speed, without creating the model."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from src.checkpoint.run_rules import run_rules
from src.config.dataset_spec import train_specs
from src.config.usage import Usage
from src.data.batch_schedule import BatchSchedule
from src.data.document_stream import DocumentStream, rows_per_epoch
from src.data.loader import HostBatch, train_batches
from src.data.mixture import Mixture
from src.data.numbered_rows import row_reader
from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from src.data.types import DataPosition, InputSpec, RowArrays, RowSource, Tokenizer, TrainData, is_stream
from src.extras.sft_summary import describe_conversations
from src.run.run_setup import configured
from src.run.summary import describe_data, describe_tokenizer, few_documents, print_header
from src.system.errors import UserError, counted, printable, show

USAGE = Usage(
    """Shows the first batches of a run as text, checks them, and measures the loader's speed.

python -m src.inspect_data CONFIG [key=value ...]
python -m src.inspect_data CONFIG process_count=4 process_index=1     what the second of four hosts would load""",
    ("Tools for data", "Data"),
)

_MEASURED_SECONDS = 2.0
_WIDTH = 100  # characters shown of a document
_SHOWN_IDS = 12
_CHECKED_BATCHES = 20  # in addition to the batches shown
_CHECKED_DOCUMENTS = 100


class Segment(NamedTuple):
    """A document, or a piece of one, in the columns [start, stop) of a row."""

    start: int
    stop: int
    ids: np.ndarray  # int32 [stop - start + 1], its tokens and the last token's target
    loss_mask: np.ndarray  # bool [stop - start], which targets count in the loss


def main(argv: Sequence[str] | ConfigDict) -> None:
    """Runs the command line `argv`: prints the batches, the checks' results and the speed, or answers --help.

    Raises UserError for a mistake in the command or its data; TransientError as `configured` and `open_sources` do.
    """
    config = configured(argv, USAGE)
    if config is None:
        return
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    inputs = InputSpec.of(config, tokenizer, run_rules(config.run, config.checkpoint))
    data, _ = open_sources(inputs, config.evaluation)
    count, process, length = config.tools.process_count, config.tools.process_index, config.batch.max_target_length
    micro_batches = config.step.gradient_accumulation_steps
    global_batch, rows = rows_of_process(config.batch.per_device_batch_size, micro_batches, count, process)
    schedule = BatchSchedule.of(config.batch, lambda size, _: rows_of_process(size, micro_batches, count, process)[0])
    has_stream = any(map(is_stream, data.sources))
    if count > 1 and (has_stream or schedule.ramp):
        ramped = "with enable_rampup_batch_size, a process's rows depend on the mesh"
        why = (
            "this dataset is streamed per process, and only the first process's stream is here"
            if has_stream
            else ramped
        )
        raise UserError(f"process_count={count}: {why}. Leave out process_count to see all rows on this host")
    about_data = describe_data(train_specs(config.data), data)
    about_data += few_documents(inputs, data, global_batch, config.run.steps)
    print_header(
        [
            ("data", "\n".join(about_data)),
            ("tokenizer", describe_tokenizer(config.data.tokenizer_type, tokenizer)),
            ("step", f"{global_batch} rows x {length} = {global_batch * length:,} tokens"),
            *([("batch ramp", schedule.describe(config.run.steps))] if schedule.ramp else []),
            ("rows", f"{rows[0]} to {rows[-1]}, of process {process} of {count}"),
            *([("conversations", describe_conversations(inputs, data))] if config.data.use_sft else []),
        ]
    )
    # Some data have a packing position that depends on earlier batches: create all batches before the first one shown.
    first = config.tools.inspect_first_step
    computed = not has_stream and all(rows_per_epoch(inputs, source) is not None for source in data.sources)
    skipped, begin = (0, first) if computed else (first, 0)
    position = DataPosition(rows_taken=schedule.rows_before(begin))
    batches = train_batches(inputs, data, rows, global_batch, position, schedule, begin)
    shown = list(itertools.islice(batches, skipped, skipped + config.tools.inspect_num_steps))
    mixture = Mixture(data.weights)
    for step, batch in enumerate(shown, start=first):
        for index, row in enumerate(batch.rows):
            number = schedule.rows_before(step) + int(row)
            name = data.names[mixture.assign(number, global_batch, config.data.data_shuffle_seed)[0]]
            title = f"step {step}, row {row}" + f" ({name})" * bool(name)
            cuts = batch.cuts[index] if config.data.use_sft else None
            show("\n".join(_lines(title, batch.arrays, index, tokenizer, cuts)))
    summary = _summary(shown, batches)
    batches.close()
    # Decoding hides the special tokens of a chat template, so such documents cannot encode to the same ids.
    is_chat = config.data.use_sft and tokenizer and tokenizer.chat_template
    if tokenizer and not (has_stream or is_chat):
        summary.append(("round trip", _round_trip(inputs, data)))
    print_header(summary)


def rows_of_process(per_device_batch_size: float, micro_batches: int, count: int, index: int) -> tuple[int, np.ndarray]:
    """Returns the global batch size for `count` hosts like this one, and the numbers of host `index`'s rows.

    Raises UserError if there is no such host, or if the batch size is not divisible by `count`.
    """
    if index >= count:
        raise UserError(f"process_index={index} must be less than process_count={count}")
    rows = per_device_batch_size * jax.local_device_count() * count * micro_batches
    if rows != round(rows) or round(rows) % count:
        raise UserError(
            f"per_device_batch_size={per_device_batch_size:g} on {count} processes of "
            f"{jax.local_device_count()} devices is {rows:g} rows per batch, not divisible by {count} processes"
        )
    share = round(rows) // count
    return round(rows), np.arange(index * share, (index + 1) * share)


def segments(batch: RowArrays, row: int) -> list[Segment]:
    """Splits one row of a batch into its segments, without padding."""
    result = []
    ids = batch["segment_ids"][row]
    for number in range(1, int(ids.max()) + 1):
        columns = np.flatnonzero(ids == number)
        start, stop = int(columns[0]), int(columns[-1]) + 1
        tokens = np.append(batch["tokens"][row, start:stop], batch["targets"][row, stop - 1])
        result.append(Segment(start, stop, tokens, batch["loss_mask"][row, start:stop] == 1))
    return result


def _lines(title: str, batch: RowArrays, row: int, tokenizer: Tokenizer | None, cuts: np.ndarray | None) -> list[str]:
    in_row = segments(batch, row)
    used, length = sum(segment.stop - segment.start for segment in in_row), batch["tokens"].shape[1]
    in_loss = sum(int(segment.loss_mask.sum()) for segment in in_row)
    lines = [f"{title}: documents {len(in_row)}, tokens {used} of {length}, in the loss {in_loss}"]
    for segment in in_row:
        if cuts is not None:  # chat templates begin and end conversations in their own way
            begins = segment is not in_row[0] or not cuts[0]
            ends = segment is not in_row[-1] or not cuts[1]
        else:
            begins = tokenizer is None or segment.ids[0] == tokenizer.bos
            ends = tokenizer is None or segment.ids[-1] == tokenizer.eos
        place = f"  {segment.start:>6} to {segment.stop:<6}"
        edges = f"{'begins' if begins else 'continues':9}  {'ends' if ends else 'truncated':9}"
        ids = " ".join(map(str, segment.ids[:_SHOWN_IDS])) + " ..." * (len(segment.ids) > _SHOWN_IDS)
        lines.append(f"{place}  {edges}  ids {ids}")
        if tokenizer:
            decode = tokenizer.decode if cuts is None else tokenizer.decode_spelled
            lines.append(f"      {_shown(decode(segment.ids))}")
            if not segment.loss_mask.all():
                edges = np.flatnonzero(np.diff(segment.loss_mask, prepend=False)) + 1
                runs = [decode(ids) for ids in np.split(segment.ids, edges)[1::2]]
                lines.append(f"      in the loss: {_shown(' | '.join(runs))}")
    return lines


def _shown(text: str) -> str:
    if len(text) > _WIDTH:
        text = f"{text[: _WIDTH * 2 // 3]} ... {text[-_WIDTH // 3 :]}"
    return repr(printable(text))


def _summary(shown: list[HostBatch], batches: Iterator[HostBatch]) -> list[tuple[str, str]]:
    arrays, begin = [batch.arrays for batch in shown], time.perf_counter()
    while (seconds := time.perf_counter() - begin) < _MEASURED_SECONDS:
        arrays.append(next(batches).arrays)
    looked_at = arrays[: len(shown) + _CHECKED_BATCHES]
    filled = np.concatenate([batch["segment_ids"] > 0 for batch in looked_at])
    in_loss = np.concatenate([batch["loss_mask"] for batch in looked_at])
    documents = sum(batch["segment_ids"].max(axis=1).sum() for batch in looked_at)
    tokens = sum(batch["tokens"].size for batch in arrays[len(shown) :])
    return [
        ("checked", f"{counted(len(shown), 'batch')} shown, and {len(looked_at) - len(shown)} after, to measure speed"),
        ("filled", f"{filled.mean():.2%} of their tokens; the rest is padding"),
        ("in the loss", f"{in_loss.mean():.2%} of their tokens"),
        ("documents", f"{documents / len(filled):.2f} per row"),
        ("speed", f"{tokens / seconds:,.0f} tokens per second on this machine"),
    ]


def _round_trip(inputs: InputSpec, data: TrainData) -> str:
    tokenizer, checked, different = inputs.tokenizer, 0, []
    assert tokenizer
    for name, source in zip(data.names, data.sources, strict=True):
        if isinstance(source, RowSource):
            read, count = row_reader(inputs, source, name), _CHECKED_BATCHES
        else:
            read, count = DocumentStream(inputs, source, name).documents, _CHECKED_DOCUMENTS
        encoded = [document.ids for n in range(count) for document in read(n)]
        whole = [ids for ids in encoded if len(ids) and ids[0] == tokenizer.bos and ids[-1] == tokenizer.eos]
        checked += len(whole)
        different += [ids for ids in whole if not np.array_equal(tokenizer.encode(tokenizer.decode(ids)), ids)]
    result = f"{checked - len(different)} of {checked} documents decode to text that encodes to the same ids"
    return result + (f"; this one does not: {_shown(tokenizer.decode(different[0]))}" if different else "")
