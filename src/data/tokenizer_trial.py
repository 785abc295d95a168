"""Tries a tokenizer.json in a process of its own, before this process reads it.

Files come with downloaded weights, and the `tokenizers` package trusts them: some end the process that reads them,
others take minutes for a line of text.
"""

import resource
import signal
import subprocess
import sys
from pathlib import Path

from src.errors import UserError

CPU_SECONDS = 20  # for a vocabulary of a quarter of a million, which takes one or two
MEMORY_BYTES = 8 << 30
_ROOT = str(Path(__file__).parents[2])
_TEXTS = (
    "",
    "a b\n",
    2000 * "a" + "!",
    2000 * "x",
    2000 * " ",
    500 * "1a! ",
    300 * "e\u0301\u4e2d\U0001f600",
    500 * "</s>",
    "\x00\ufffd\u2581",
)


_passed: set[str] = set()  # digests of files


def try_tokenizer(file: Path, digest: str) -> None:
    """Raises UserError if reading the file, or some short texts by it, ends its process or takes too long.

    `digest` is of the file's content: each content is tried once.
    """
    if digest in _passed:
        return
    command = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__name__} import trial; trial({CPU_SECONDS})"
    with file.open("rb") as data:
        done = subprocess.run([sys.executable, "-c", command], stdin=data, capture_output=True, check=False)
    if done.returncode == 0:
        _passed.add(digest)
        return
    took_long = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    problem = f"took more than {CPU_SECONDS} seconds of computing" if took_long else "ended its process"
    raise UserError(
        f"tokenizer_path: {file} can't be used: reading it, or a few short texts by it, {problem}. Take the file from "
        "the model's publisher again; if that is the same, write it anew from the tokenizer that it was made of"
    )


def trial(seconds: int) -> None:
    """Reads the tokenizer on stdin and uses it, within limits; errors that Python catches are for the real reading."""
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, MEMORY_BYTES)):
        try:
            resource.setrlimit(limit, (most, most))
        except ValueError:  # macOS sets not every limit
            continue
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(sys.stdin.buffer.read())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")
        tokenizer.post_processor = None
    except Exception:  # the real reading says what is wrong
        return
    for text in _TEXTS:
        try:
            tokenizer.decode(tokenizer.encode(text).ids)
        except Exception:  # such as of a vocabulary without a token for everything else
            continue
