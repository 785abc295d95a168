"""The one exception for what a user can mend, and how a command ends on it."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence


class UserError(Exception):
    """A mistake in what the user typed or supplied: what is wrong, what was expected, what to change."""


class TransientError(Exception):
    """A failure that the same command may not meet again, such as a store that does not answer or a lost process."""


SHOWN = 5  # of a list in a message


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


TRY_AGAIN = 75  # sysexits.h, EX_TEMPFAIL: schedulers tell it from a mistake (2) and a fault (1)


def run_command(main: Callable[[Sequence[str]], object]) -> None:
    """Runs `main(argv)` as a command of its own: a `UserError` is printed without a traceback, exit code 2.

    A `TransientError` is printed so too, with exit code 75, which says that the same command may be tried again.

    Ctrl-C ends it with exit code 130, an output that nobody reads with 141; what a run has saved by then stays.
    """
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(2)
    except TransientError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(TRY_AGAIN)
    except BrokenPipeError:  # such as of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("interrupted; a run goes on from its last checkpoint", file=sys.stderr, flush=True)
        sys.exit(130)


def _leave(code: int) -> None:
    """Ends the process: one of a job at once, or it would wait at its end for others, which wait for it."""
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
