"""From a line of JSON to tokens, and which of them the model is to write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gnmr_megatron.data.corpus import BadRecord, JsonRecord, is_unicode
from gnmr_megatron.data.instruction.options import InstructionOptions
from gnmr_megatron.data.instruction.template import (
    ASSISTANT,
    GUARD,
    RESERVED,
    ChatTemplate,
    Part,
    TemplateFailure,
)
from gnmr_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """One conversation, or prompt and completion.

    Attributes:
        ids: its tokens.
        is_completion: for each token, whether the model is to write it.
        text_bytes: bytes of text.
        is_truncated: whether its end was cut off.
    """

    ids: list[int]
    is_completion: list[bool]
    text_bytes: int
    is_truncated: bool = False


@dataclass(frozen=True)
class LeftOut:
    """An example that is not used, and why."""

    reason: str


TOO_LONG = LeftOut("too long")
NO_COMPLETION = LeftOut("nothing to learn left")
_HOW = (
    'write {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'
)


class _Malformed(Exception):  # noqa: N818  # no error of its own: it becomes a bad record
    """A record that is no example; the message says why."""


class ExampleEncoder:
    """Encodes records.

    Special tokens are what the template writes. The same characters inside of a message, a prompt or a completion are
    text, so that no message can end its own turn.
    """

    def __init__(self, tokenizer: Tokenizer, options: InstructionOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        by_id = {identifier: token for token, identifier in tokenizer.special_tokens.items()}
        end = by_id.get(tokenizer.eod, "")
        tokens = {"bos_token": "", "eos_token": end, **options.special_tokens}
        self._template = ChatTemplate(options.template, tokens)
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )

    def encode(self, record: JsonRecord) -> Example | LeftOut | BadRecord:
        """Tokens of a record."""
        try:
            return self._limited(self._tokens(record.value))
        except (_Malformed, TemplateFailure) as error:
            return BadRecord(record.file, record.line, str(error))

    def _tokens(self, value: Any) -> Example:
        if isinstance(value, dict) and "messages" in value:
            messages = _checked(value["messages"])
            return self._of_parts(self._template.render([self._guarded(m) for m in messages]))
        if not (isinstance(value, dict) and {"prompt", "completion"} <= value.keys()):
            raise _Malformed(f"has neither messages nor prompt and completion; {_HOW}")
        for key in ("prompt", "completion"):
            _check_text(value[key], key)
        if not value["completion"]:
            raise _Malformed("completion is empty; fill it in or remove the line")
        example = self._of_parts(
            [
                Part(self._guard(value["prompt"]), is_completion=False),
                Part(self._guard(value["completion"]), is_completion=True),
            ]
        )
        return Example(
            [*example.ids, self._tokenizer.eod],
            [*example.is_completion, True],
            example.text_bytes,
        )

    def _of_parts(self, parts: Iterable[Part]) -> Example:
        """Each part by itself, as at inference, where the prompt is encoded without what follows."""
        ids: list[int] = []
        is_completion: list[bool] = []
        text_bytes = 0
        for part in parts:
            new = self._encode(part.text, is_first=not ids)
            ids += new
            is_completion += [part.is_completion] * len(new)
            text_bytes += len(part.text.replace(GUARD, "").encode())
        return Example(ids, is_completion, text_bytes)

    def _encode(self, text: str, *, is_first: bool) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._special.finditer(text) if self._special else ():
            ids += self._plain(text[position : match.start()], is_first=is_first and not ids)
            ids.append(self._tokenizer.special_tokens[match[0]])
            position = match.end()
        return ids + self._plain(text[position:], is_first=is_first and not ids)

    def _plain(self, text: str, *, is_first: bool) -> list[int]:
        text = text.replace(GUARD, "")
        if is_first and not self._is_special_inside(text):
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_part(text)

    def _is_special_inside(self, text: str) -> bool:
        return self._special is not None and self._special.search(text) is not None

    def _guarded(self, value: Any) -> Any:
        """A value with all its text guarded, keys too: a template may write any of it."""
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, dict):
            return {self._guard(key): self._guarded(item) for key, item in value.items()}
        return [self._guarded(item) for item in value] if isinstance(value, list) else value

    def _guard(self, text: str) -> str:
        """Break up what is written like a special token; `_plain` takes the guard out again."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)

    def _limited(self, example: Example) -> Example | LeftOut:
        limit = self._options.sequence_length
        is_too_long = limit is not None and len(example.ids) > limit + 1
        if is_too_long:
            if self._options.too_long == "drop":
                return TOO_LONG
            example = Example(
                example.ids[: (limit or 0) + 1],
                example.is_completion[: (limit or 0) + 1],
                example.text_bytes,
                is_truncated=True,
            )
        return example if any(example.is_completion[1:]) else NO_COMPLETION


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _Malformed(f"messages is no list of messages; {_HOW}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _Malformed(f"messages[{index}] is no object; {_HOW}")
        for key in ("role", "content"):
            _check_text(message.get(key), f"messages[{index}].{key}")
        _check_characters(message, f"messages[{index}]")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise _Malformed(
            "no message has the role assistant, so there is nothing to learn; add its answer or remove the line"
        )
    return messages


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _Malformed(f"{where} is no text; {_HOW}")
    _check_characters(value, where)


def _check_characters(value: Any, where: str) -> None:
    """In all text of a value, keys too: none that marks what is learnt, or that no encoding has."""
    if isinstance(value, str):
        if RESERVED.search(value):
            raise _Malformed(f"{where} holds a Unicode noncharacter (U+FDD0 to U+FDD2); remove it")
        if not is_unicode(value):
            raise _Malformed(f"{where} holds half of a surrogate pair; remove it")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_characters(key, where)
            _check_characters(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_characters(item, f"{where}[{index}]")
