"""Runs commands and ends them: prints the error, chooses the exit code, and writes the traceback to a file."""

import contextlib
import faulthandler
import os
import select
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from src.system.errors import BROKEN_PIPE, FAULT, INTERRUPTED, MISTAKE, TRY_AGAIN, TransientError, UserError, show
from src.system.storage_errors import Failure, failure_of

if TYPE_CHECKING:
    from src.system.rendezvous import Job

job: "Job | None" = None  # the connection to the other processes, once this one has joined a job of several


def run_command(main: Callable[[Sequence[str]], object], *, may_exit: bool = False) -> None:
    """Runs `main(argv)` as a command; if it fails, ends the process with an exit code.

    A `UserError` prints its message and exits with 2, a `TransientError` with 75, Ctrl-C with 130, and a closed output,
    as with `| head`, silently with 141. A full disk exits with 2, a disk or store that may work again with 75, and any
    other error with 1: these three also write the traceback to a file, in the run's folder if there is one
    (`checkpoint.run_folder.in_run_folder`). A process that ends by an error tells the other processes of its job, which
    end too. If `main` returns an int, or an object with an `exit_code`, that is the exit code. `may_exit`: `main` may
    raise SystemExit, as argparse does.
    """
    _open_streams()
    if not faulthandler.is_enabled():  # print where a fatal signal occurs, such as in a truncated memory-mapped file
        faulthandler.enable(2, all_threads=False)
    try:
        result = main(sys.argv[1:])
        code = getattr(result, "exit_code", result)
        sys.stdout.flush()
    except (UserError, TransientError) as error:
        end(MISTAKE if isinstance(error, UserError) else TRY_AGAIN, f"error: {error}{_latest_checkpoint(error)}")
    except KeyboardInterrupt as error:
        end(INTERRUPTED, f"interrupted{_latest_checkpoint(error)}")
    except BaseException as error:
        if isinstance(error, SystemExit) and may_exit:
            raise
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            end(BROKEN_PIPE, "")
        if job:
            # This error may be a consequence of another process's end, whose message explains more.
            job.await_news()
        code, message = _code_and_message(error)
        end(code, f"error: {message}. {_write_traceback(error)}{_latest_checkpoint(error)}")
    if type(code) is int and code:
        sys.exit(code)


def _open_streams() -> None:
    """Opens /dev/null for closed standard streams, lest files get their descriptors; lets stdout print any text."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for characters that its encoding lacks; stderr escapes them already


def end(code: int, message: str, *, at_once: bool = False) -> NoReturn:
    """Tells the other processes of its job to end, prints the message, and ends the process with `code`.

    Skips the exit handlers, which would wait for other processes or threads, if any of these holds: `at_once`, the
    process is in a job of several, or a thread of Orbax still runs after a second's wait. In the first two cases any
    thread may call it.
    """
    if job:
        job.tell(code, message)
    # After a failed save, Orbax's threads may wait minutes for each other.
    of_orbax = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]
    if at_once or job or any(thread.join(1) or thread.is_alive() for thread in of_orbax):
        end_now(code, message)
    _print(message)
    sys.exit(code)


def end_now(code: int, message: str) -> NoReturn:
    """Prints the message and ends the process from any thread, without exit handlers and without telling its job."""
    _print(message)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # show the cursor, which the progress bar hides
        sys.stdout.flush()
    os._exit(code)


def _print(message: str) -> None:
    if message and sys.stderr:
        with contextlib.suppress(OSError):
            show(message, sys.stderr)


def _latest_checkpoint(error: BaseException) -> str:
    return f"; {error.latest_checkpoint}" if getattr(error, "latest_checkpoint", "") else ""


def _code_and_message(error: BaseException) -> tuple[int, str]:
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    summary = f"{type(error).__name__}{': ' if text else ''}{text[:300]}{where}"
    # A broken pipe to another process is not a failed store.
    failure = Failure.OTHER if isinstance(error, BrokenPipeError) else failure_of(error)
    if failure is Failure.FULL:
        where = f" to write to {folder}" if (folder := getattr(error, "run_folder", None)) else ""
        return MISTAKE, f"no space is left{where}: make room. The error was {summary}"
    if failure is Failure.TRANSIENT:
        return TRY_AGAIN, f"a disk or a store failed, perhaps temporarily: try again. The error was {summary}"
    return FAULT, f"unexpected {summary}"


def _write_traceback(error: BaseException) -> str:
    """Writes the traceback to the run's folder, or else to a temporary one; returns a sentence that names the file."""
    text = "".join(traceback.format_exception(error))
    process = job.process if job else 0
    name = time.strftime(f"traceback-%Y-%m-%d-%H-%M-%S-process-{process}.txt")
    for folder_of in (lambda: vars(error)["run_folder"], lambda: Path(tempfile.mkdtemp(prefix="mintext-"))):
        with contextlib.suppress(Exception):  # no folder, or not writable: each store's client has its own types
            file = folder_of() / name
            file.write_text(text)
            return f"The traceback is in {file}"
    return f"The traceback, which could not be written to a file:\n{text}"


def _output_is_closed() -> bool:
    """Tells whether the reader of the output has closed it; if so, discards later writes to it."""
    closed = False
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            closed = True
    return closed
