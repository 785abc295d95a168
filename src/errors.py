"""The exceptions that are answers, and the one place where a command ends: its last line and its exit code."""

import contextlib
import difflib
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake in what the user typed or supplied: what is wrong, what was expected, what to change."""


class TransientError(Exception):
    """A failure that the same command may not meet again, such as a store that does not answer or a lost process."""


# Exit codes.
FAULT = 1
MISTAKE = 2
TRY_AGAIN = 75  # sysexits.h, EX_TEMPFAIL: schedulers tell it from a mistake and a fault
INTERRUPTED = 130  # as shells report Ctrl-C
NOBODY_READS = 141  # as shells report a broken pipe

SHOWN = 5  # of a list in a message


def clipped(text: str, most: int = 2000) -> str:
    """Returns `text` without its middle where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"


def first_few(items: Iterable[str], separator: str = ", ", near: str = "") -> str:
    """Returns the first five of a list, "and 7 more" if it has more; with `near`, those most similar to it first."""
    items = list(items)
    if near:
        items.sort(key=lambda item: difflib.SequenceMatcher(None, near, item).ratio(), reverse=True)
    shown, left_out = separator.join(items[:SHOWN]), len(items) - SHOWN
    return f"{shown}{' ' if separator == ', ' else separator}and {left_out} more" if left_out > 0 else shown


def counted(count: int, noun: str) -> str:
    """Returns "1 layer", "2,000 layers": a number and what it counts."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def run_command(main: Callable[[Sequence[str]], object], *, may_exit: bool = False) -> None:
    """Runs `main(argv)` as a command of its own, and ends the process with an exit code where all did not go well.

    A `UserError` is one line and exit code 2, a `TransientError` 75, Ctrl-C 130; an output that nobody reads any more,
    as in `| head`, ends it with 141 and no word. Anything else is a fault, of this code or of a user's: one line, exit
    code 1, and the traceback in a file, in the run's folder where there is one (`in_run_folder`); or it is a disk that
    is full, 2, or one or a store that may have failed for a time, 75. An int that `main` returns is the exit code.
    Whatever the end, the other processes of the job are told of it and end too.

    Args:
        main: the command.
        may_exit: `main` ends the process by itself, as argparse does; otherwise that is a fault of the code it called.
    """
    try:
        code = main(sys.argv[1:])
        if sys.stdout:
            sys.stdout.flush()
    except UserError as error:
        end(MISTAKE, f"error: {error}")
    except TransientError as error:
        end(TRY_AGAIN, f"error: {error}")
    except KeyboardInterrupt as error:
        end(INTERRUPTED, f"interrupted{_and(kept(_run_folder(error)))}")
    except BaseException as error:
        if isinstance(error, SystemExit) and may_exit:
            raise
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            end(NOBODY_READS, "")
        if job := _processes():
            job.await_news()  # what broke here may have been the end of another process, which is the better answer
        code, what = _judged(error)
        end(code, f"error: {what}. {_written_down(error)}{_and(kept(_run_folder(error)))}")
    if type(code) is int and code:
        sys.exit(code)


@contextlib.contextmanager
def in_run_folder(folder: Path) -> Iterator[None]:
    """Gives each exception that passes the run's folder, so that `run_command` knows it."""
    try:
        yield
    except BaseException as error:
        error.run_folder = folder  # type: ignore[attr-defined]
        raise


def kept(folder: Path | None) -> str:
    """Says which checkpoint in a run's folder stands, from which it goes on; empty for a command that has no folder."""
    if folder is None:
        return ""
    try:
        from src.checkpoint.restore import is_unfinished, steps_in  # which a command that has a folder has imported

        checkpoints = folder / "checkpoints"
        steps = [step for step in steps_in(checkpoints) if not is_unfinished(checkpoints / str(step))]
    except Exception:  # of a store, its client's own types
        steps = []
    if not steps:
        return "no checkpoint was saved"
    return f"the checkpoint of step {max(steps)} in {folder} stands"


def end(code: int, message: str, *, at_once: bool = False) -> NoReturn:
    """Prints the message and ends the process, and with it its job: the other processes are told.

    A process of a job ends at once, or it would wait at its end for the others; so does any process with `at_once`,
    from any thread.
    """
    if job := _processes():
        job.tell(code, message)
    if at_once or (job and job.number() is not None):
        end_now(code, message)
    _print(message)
    sys.exit(code)


def end_now(code: int, message: str) -> NoReturn:
    """Prints the message and ends the process as it is, from any thread, without a word to its job."""
    _print(message)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # shows the cursor, which a progress bar hides
        sys.stdout.flush()
    os._exit(code)


def _processes() -> Any:
    """The module of that name, if this program uses it: it imports JAX, for which a mistake need not wait."""
    return sys.modules.get("src.processes")


def _print(message: str) -> None:
    if message and sys.stderr:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def _and(text: str) -> str:
    return f"; {text}" if text else ""


def _run_folder(error: BaseException) -> Path | None:
    return getattr(error, "run_folder", None)


def _summary(error: BaseException) -> str:
    """The exception and its place, in one line."""
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{where}"


def _judged(error: BaseException) -> tuple[int, str]:
    """The exit code of what nobody has answered, and what it was: a fault, or what a disk or a store did."""
    from src.storage_errors import Failure, failure_of  # it needs this module

    failure = Failure.OTHER if isinstance(error, BrokenPipeError) else failure_of(error)  # of a process, not a store
    if failure is Failure.FULL:
        where = f" to write to {folder}" if (folder := _run_folder(error)) else ""
        return MISTAKE, f"no space is left{where}: make room. It was {_summary(error)}"
    if failure is Failure.TRANSIENT:
        return TRY_AGAIN, f"a disk or a store failed, maybe for a time: try again. It was {_summary(error)}"
    return FAULT, f"unexpected {_summary(error)}"


def _written_down(error: BaseException) -> str:
    """Writes the traceback to the run's folder, or to a temporary one where that is not possible; says where it is."""
    text = "".join(traceback.format_exception(error))
    process = (_processes() and _processes().number()) or 0
    name = time.strftime(f"traceback-%Y-%m-%d-%H-%M-%S-process-{process}.txt")
    for folder_of in (lambda: _run_folder(error), lambda: Path(tempfile.mkdtemp(prefix="mintext-"))):
        with contextlib.suppress(Exception):  # there is none, or it can't be written to; of a store, its client's types
            file = folder_of() / name
            file.write_text(text)
            return f"The traceback is in {file}"
    return f"The traceback, which could not be written to a file:\n{text}"


def _nobody_reads() -> bool:
    """Whether the other end of the output is closed; if so, what is still to be written there goes nowhere."""
    closed = False
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            closed = True
    return closed
