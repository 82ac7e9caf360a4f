"""Chat templates: from messages to text in which what the model is to write is marked.

Templates are data. They are rendered in Jinja's immutable sandbox, without access to files, modules or the clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gnmr_megatron.errors import DataError

# noncharacters: Unicode keeps them out of text for uses like this
START, END, GUARD = "\ufdd0", "\ufdd1", "\ufdd2"
RESERVED = re.compile(f"[{START}{END}{GUARD}]")
ASSISTANT = "assistant"
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
### {{ message.role | capitalize }}:
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}

{% endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}
### Assistant:
{% endif -%}
"""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A stretch of text, and whether the model is to write it."""

    text: str
    is_completion: bool


class TemplateFailure(Exception):  # noqa: N818  # no error of its own: it becomes a bad record
    """A conversation that the template refuses; the message says why."""


class ChatTemplate:
    """A Jinja2 template with the variables of Hugging Face's: `messages`, `add_generation_prompt`, `bos_token`, ...

    What lies between `{% generation %}` and `{% endgeneration %}` is what the model is to write. In a template without
    them it is what the template adds for a turn of the assistant to the turns before and the generation prompt.

    Args:
        text: the template.
        special_tokens: further variables, such as `eos_token`.

    Raises:
        DataError: the template is malformed.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(text, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"--chat-template: line {error.lineno} is no Jinja2: {error.message}"
            ) from error
        self._marks = _GENERATION.search(text) is not None

    def render(self, messages: Sequence[Message]) -> list[Part]:
        """The conversation in parts.

        Raises:
            TemplateFailure: the template refuses the conversation, or completions cannot be told from the rest.
        """
        try:
            text = self._render(messages)
            return list(_parts(text if self._marks else self._marked(text, messages)))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateFailure(f"the chat template fails: {error}") from error
        except RecursionError:
            raise TemplateFailure("the chat template fails: it calls itself for ever") from None

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        # tools and documents are there in Hugging Face's, and templates ask whether they are none
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    def _marked(self, text: str, messages: Sequence[Message]) -> str:
        """Put marks around what is added for each turn of the assistant."""
        pieces, position = [], 0
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise TemplateFailure(
                    f"the chat template writes messages[{index}] or what is before it otherwise when more follows; "
                    "put {% generation %} and {% endgeneration %} around what the assistant writes"
                )
            pieces += [text[position : len(before)], START, text[len(before) : len(after)], END]
            position = len(after)
        return "".join([*pieces, text[position:]])


class _Generation(Extension):
    """The block `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja's extensions do

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the block's statements, and call `_mark` with what they write."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{START}{caller()}{END}"


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, *, ensure_ascii: bool = False) -> str:
    """JSON as it is, where Jinja's own filter writes it for HTML."""
    written = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    # the guard is taken out of the text again, so it stays a character; a backslash of the text is written twice
    return re.sub(r"(?<!\\)((?:\\\\)*)\\ufdd2", rf"\1{GUARD}", written)


def _parts(marked: str) -> Iterator[Part]:
    for index, piece in enumerate(re.split(f"[{START}{END}]", marked)):
        if piece:
            yield Part(piece, is_completion=index % 2 == 1)
