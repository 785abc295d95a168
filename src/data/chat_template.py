"""Chat templates: the Jinja2 programs in Hugging Face folders that write a conversation as one text."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from src.errors import UserError

Message = Mapping[str, Any]
"""{"role": ..., "content": ..., and what else the template reads}."""


class ChatTemplate:
    """A compiled template, which sees what `transformers` shows it: messages, special tokens and a few functions.

    Args:
        source: the template.
        tokens: what the template may call by name: bos_token, eos_token and so on.
        where: the file it is from, for messages.

    Raises:
        UserError: it is not a Jinja2 template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        # Templates come with downloaded weights: the sandbox keeps them to strings.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._tokens = dict(tokens)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of {where} can't be read: line {error.lineno}: {error}") from None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime.datetime | None = None
    ) -> str:
        """The conversation as text; with `add_generation_prompt`, up to where an answer of the assistant begins.

        Args:
            messages: the conversation.
            add_generation_prompt: end with what comes before an answer.
            now: what the template is told of the time; None: what the clock says.

        Raises:
            UserError: the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=(now or datetime.datetime.now()).strftime,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the chat template of {self._where} refuses the conversation: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` around what the assistant says, which some templates mark: here it is written as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block, whose assignments stay inside it."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja2's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
