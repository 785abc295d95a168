"""Runs chat templates, the Jinja2 programs in Hugging Face folders that write a conversation as one text."""

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
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from src.errors import UserError
from src.json_text import well_formed

if TYPE_CHECKING:
    from src.data.types import Message, Shown  # it imports numpy, which the process that renders has no memory for

CPU_SECONDS = 10  # for one conversation, which takes a thousandth of one
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24
_SHOWN = 300  # characters of an error
_ROOT = str(Path(__file__).parents[2])


class ChatTemplate:
    """Renders a template with what `transformers` shows it: messages, special tokens by name, a few functions.

    Conversations with tools are written by `tool_source`, if there is one. Templates come with downloaded weights.
    Jinja2's sandbox keeps them to strings, but not from endless loops or strings of gigabytes. So a separate process
    renders them, which the kernel limits to `CPU_SECONDS` for a conversation and to `MEMORY_BYTES`. It starts with the
    first conversation; any thread may call `render`. Messages name `where`, the template's file. Raises UserError where
    it is no Jinja2 template.
    """

    def __init__(self, source: str, tool_source: str | None, tokens: Mapping[str, str], where: str) -> None:
        if tool_source is not None:  # Jinja2 takes away the line end after a tag, and one at a template's end
            both = (each.removesuffix("\n") for each in (tool_source, source))
            source = "{% if tools is not none %}\n" + "{%+ else %}\n".join(both) + "{%+ endif %}"
        self._setup = {"source": source, "tokens": dict(tokens)}
        self._where = where
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        try:
            _environment().parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of {where} can't be read: line {error.lineno}: {error}") from None
        except RecursionError:
            raise UserError(f"the chat template of {where} can't be read: it is nested too deeply") from None

    def render(
        self, messages: "Sequence[Message]", parts: Sequence[tuple[int, bool]], shown: "Shown" = None
    ) -> list[str]:
        """Renders parts of a conversation, each as a text; the template is `shown` variables too, in JSON's types.

        A part is how many messages it has, from the first on, and its `add_generation_prompt`. Raises UserError where
        the template refuses the conversation, fails, or takes too long or too much memory.
        """
        shown = {"strftime_now": datetime.datetime.now().isoformat(), **(shown or {})}
        request = {"messages": messages, "parts": parts, "shown": shown}
        with self._lock:
            try:
                reply = self._ask(request)
            except BaseException:  # such as Ctrl-C: the next request must not get this one's reply
                self._end()
                raise
        if "error" in reply:
            raise UserError(f"the chat template of {self._where} refuses the conversation: {reply['error']}")
        return list(map(well_formed, reply["texts"]))

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            serve = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__name__} import serve; serve()"
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            # In a session of its own, as Ctrl-C is not for it.
            self._process = subprocess.Popen([sys.executable, "-c", serve], **streams, start_new_session=True)
            self._stop = weakref.finalize(self, _kill, self._process)
            self._send(self._setup | {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY_BYTES})
        self._send(request)
        if line := self._process.stdout.readline():
            return json.loads(line)
        number = -self._process.wait()
        self._end()
        took_long = f"it was not done after {CPU_SECONDS} seconds"
        return {"error": took_long if number == signal.SIGXCPU else f"its process ended (signal {number})"}

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_ask` finds that it has ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _end(self) -> None:
        self._stop()
        self._process = None


def serve() -> None:
    """Renders conversations, one per line of JSON on stdin, and writes each one's text or error as a line to stdout."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may be sent to all processes of a job: stdin's end ends this
    setup = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # macOS sets no such limit
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
    template = None
    for line in sys.stdin:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = math.ceil(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + setup["cpu_seconds"], resource.RLIM_INFINITY))
        try:
            template = template or _environment().from_string(setup["source"])
            shown = {"tools": None, "documents": None, **setup["tokens"], **request["shown"]}
            shown["strftime_now"] = datetime.datetime.fromisoformat(shown["strftime_now"]).strftime
            texts = [
                template.render(messages=request["messages"][:count], add_generation_prompt=prompts, **shown)
                for count, prompts in request["parts"]
            ]
            reply = {"texts": texts}
            if (longest := max(map(len, texts))) > MAX_CHARACTERS:
                reply = {"error": f"it wrote {longest:,} characters, and {MAX_CHARACTERS:,} are the most"}
        except MemoryError:
            reply = {"error": f"it takes more than {setup['memory_bytes'] >> 20:,} MiB"}
        except jinja2.TemplateError as error:
            reply = {"error": str(error)[:_SHOWN]}
        except Exception as error:  # a template is a program, and fails as one
            reply = {"error": f"{type(error).__name__}: {error}"[:_SHOWN]}
        print(json.dumps(reply), flush=True)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # Plain JSON, where Jinja2's own filter would escape it for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class _Generation(jinja2.ext.Extension):
    """Writes the content of `{% generation %}`, by which some templates mark the assistant's turns, as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the block as a scope, so that its assignments stay inside."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
