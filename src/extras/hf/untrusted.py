"""Guards against untrusted files of downloaded models, with processes limited in CPU time and memory.

They render chat templates, and try each tokenizer.json once before this process loads it.
"""

import contextlib
import datetime
import functools
import json
import math
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from src import FOLDER
from src.system.errors import UserError
from src.system.json_text import well_formed

if TYPE_CHECKING:
    from src.data.types import Message, Shown  # imports numpy, for which the rendering process has no memory

CPU_SECONDS = 10  # limit for one conversation, which normally takes a thousandth of a second
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24
TRIAL_SECONDS = 20  # limit of CPU time; a vocabulary of 250,000 normally takes one or two seconds
TRIAL_MEMORY_BYTES = 8 << 30
_SHOWN = 300  # characters of a template's error that the user sees
_ROOT = str(FOLDER.parent)
_TEXTS = (
    "",
    "a b\n",
    *(2000 * chr(code) + end for code in range(0x21, 0x7F) for end in "!~"),
    2000 * " ",
    500 * "1a! ",
    300 * "e\u0301\u4e2d\U0001f600",
    500 * "</s>",
    "\x00\ufffd\u2581",
)
_passed: set[str] = set()  # digests of files that passed `try_tokenizer`


def _python(call: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {_ROOT!r}); import {__name__} as here; here.{call}"]


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limits this process's memory, and its CPU time from now on (SIGXCPU ends it), and disables core files."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_seconds
    limits = {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_AS: (memory_bytes, memory_bytes)}
    # Only root may raise a hard limit, such as one set by `ulimit -t`.
    limits[resource.RLIMIT_CPU] = seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]
    for limit, most in limits.items():
        with contextlib.suppress(ValueError):  # macOS does not support every limit
            resource.setrlimit(limit, most)


# ---- Chat templates


class ChatTemplate:
    """Renders a chat template as `transformers` does: with messages, special tokens by name, and a few functions.

    `tool_source`, if given, formats conversations with tools. Templates come with downloaded weights. Jinja2's sandbox
    keeps them from Python's internals and from changing their inputs, but not from endless loops or gigabytes of text.
    Therefore a separate process renders them, which the kernel limits to `CPU_SECONDS` per conversation and to
    `MEMORY_BYTES`. The process starts with the first conversation; any thread may call `render`. Error messages name
    `where`, the template's file. Raises UserError if a source is not a Jinja2 template.
    """

    def __init__(self, source: str, tool_source: str | None, tokens: Mapping[str, str], where: str) -> None:
        if tool_source is not None:
            # Jinja2 removes the newline after a tag, and one at a template's end.
            both = (each.removesuffix("\n") for each in (tool_source, source))
            source = "{% if tools is not none %}\n" + "{%+ else %}\n".join(both) + "{%+ endif %}"
        self._setup, self._where = {"source": source, "tokens": dict(tokens)}, where
        self._lock = threading.Lock()
        self._process: Any = None  # subprocess.Popen, with pipes
        try:
            _environment().parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of {where} can't be read: line {error.lineno}: {error}") from None
        except RecursionError:
            raise UserError(f"the chat template of {where} can't be read: it is nested too deeply") from None

    def render(
        self, messages: "Sequence[Message]", parts: Sequence[tuple[int, bool]], shown: "Shown" = None
    ) -> list[str]:
        """Renders parts of a conversation, each to a string; the template also gets the variables `shown`, JSON values.

        A part is a number of messages, from the first on, and its `add_generation_prompt`. Raises UserError if the
        template rejects the conversation, fails, or takes too long or too much memory.
        """
        shown = {"strftime_now": datetime.datetime.now().isoformat(), **(shown or {})}
        request = {"messages": messages, "parts": parts, "shown": shown}
        with self._lock:
            try:
                reply = self._ask(request)
            except BaseException:  # such as Ctrl-C: the next request must not read this reply
                if self._process:
                    self._end()
                raise
        if "error" in reply:
            raise UserError(f"the chat template of {self._where} rejects the conversation: {reply['error']}")
        return list(map(well_formed, reply["texts"]))

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            command = _python(f"serve({CPU_SECONDS}, {MEMORY_BYTES})")
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            # In a new session, so that Ctrl-C does not reach it.
            process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True)
            self._process = process
            self._send(self._setup)
        self._send(request)
        if line := self._process.stdout.readline():
            return json.loads(line)
        if (code := self._end()) == -signal.SIGXCPU:
            return {"error": f"it did not finish within {CPU_SECONDS} seconds"}
        return {"error": f"its process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"}

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_ask` notices that the process ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _end(self) -> int:
        """Kills the process if it still runs; returns its exit code, or minus the signal that ended it."""
        process, self._process = self._process, None
        process.kill()
        process.communicate()
        return process.returncode


def serve(cpu_seconds: int, memory_bytes: int) -> None:
    """Renders conversations until stdin ends, in the process of a `ChatTemplate`; both exchange lines of JSON.

    The first line has the template and special tokens; each further one is a request, answered on stdout with its texts
    or an error.
    """
    # A scheduler may send SIGTERM to all processes of a job; this one ends when stdin closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup = json.loads(sys.stdin.readline())
    template = None
    for line in sys.stdin:
        request = json.loads(line)
        _limit(cpu_seconds, memory_bytes)
        try:
            template = template or _environment().from_string(setup["source"])
            shown: dict[str, Any] = {"tools": None, "documents": None, **setup["tokens"], **request["shown"]}
            shown["strftime_now"] = datetime.datetime.fromisoformat(shown["strftime_now"]).strftime
            texts = [
                template.render(messages=request["messages"][:count], add_generation_prompt=prompts, **shown)
                for count, prompts in request["parts"]
            ]
            reply = {"texts": texts}
            if (longest := max(map(len, texts))) > MAX_CHARACTERS:
                reply = {"error": f"it wrote {longest:,} characters, more than {MAX_CHARACTERS:,}"}
        except MemoryError:
            reply = {"error": f"it takes more than {memory_bytes >> 20:,} MiB"}
        except Exception as error:  # a template is a program, and may raise anything
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            reply = {"error": f"{kind}{error}"[:_SHOWN]}
        print(json.dumps(reply), flush=True)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # Plain JSON: Jinja2's own filter would escape it for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _Generation(jinja2.ext.Extension):
    """Outputs the content of `{% generation %}`, which some templates use to mark the assistant's turns, unchanged."""

    tags: Any = frozenset({"generation"})

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Parses the block as a scope, so that assignments inside it stay local."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# ---- Tokenizers


def try_tokenizer(file: Path, digest: str) -> None:
    """Raises UserError if loading a tokenizer.json, or encoding short texts, crashes the process or takes too long.

    The `tokenizers` package trusts files: some crash the process, others take minutes for a line of text. `digest` is
    of the file's content: each content is tried once.
    """
    if digest in _passed:
        return
    with file.open("rb") as data:
        done = subprocess.run(_python(f"trial({TRIAL_SECONDS})"), stdin=data, capture_output=True, check=False)
    if done.returncode == 0:
        _passed.add(digest)
        return
    took_long = done.returncode == -signal.SIGXCPU
    problem = f"took more than {TRIAL_SECONDS} seconds of CPU time" if took_long else "crashed the process"
    raise UserError(
        f"tokenizer_path: {file} can't be used: loading it, or encoding a few short texts, {problem}. Fetch the file "
        "from the model's publisher again; if it is unchanged, regenerate it from the original tokenizer"
    )


def trial(seconds: int) -> None:
    """Loads and uses the tokenizer on stdin, within limits; ignores Python exceptions, which actual use reports."""
    _limit(seconds, TRIAL_MEMORY_BYTES)
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(sys.stdin.buffer.read())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")
        tokenizer.post_processor = None
    except Exception:  # actual loading reports this
        return
    for text in _TEXTS:
        try:
            tokenizer.decode(tokenizer.encode(text).ids)
        except Exception:  # for example, the vocabulary has no unknown token
            continue
