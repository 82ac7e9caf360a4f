"""Fills the page of settings from `RunConfig`: type, default, meaning and limits of every key.

Limits are what the settings refuse: each key is tried with values at its edges, and the refusals are quoted.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.config import RunConfig

MARKER = "<!-- generated: settings -->"
PAGE = "settings.md"
NO_SETTINGS = {"checkpoint.json"}  # what is spelled alike
TRIED: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (-1, 0, 1, 3),
    float: (-1.0, 0.0, 2.0, math.inf),
    str: ("",),
    list: ([], [0.0]),
}
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key, as the page shows it."""

    key: str
    type: str
    default: str
    meaning: str
    limits: tuple[str, ...]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with all settings; in other pages, settings in backticks become links to it."""
    if MARKER in markdown:
        return markdown.replace(MARKER, render())
    return markdown if page.file.src_uri == PAGE else link_settings(markdown)


def sections() -> dict[str, type]:
    """Dataclass of each section of a run's settings; that of the keys without a section is ``."""
    hints = get_type_hints(RunConfig)
    found = {f.name: hints[f.name] for f in dataclasses.fields(RunConfig)}
    return {"": RunConfig, **{k: v for k, v in found.items() if dataclasses.is_dataclass(v)}}


def settings_of(section: str) -> Iterator[Setting]:
    """The keys of a section in the order of its dataclass."""
    kind = sections()[section]
    hints = get_type_hints(kind)
    meanings = {item.arg_name: item.description for item in parse_from_object(kind).params}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        key = f"{section}.{field.name}" if section else field.name
        yield Setting(
            key=key,
            type=_type(hints[field.name]),
            default=_plain(getattr(kind(), field.name)),
            meaning=inspect.cleandoc(meanings[field.name] or ""),
            limits=tuple(_limits(kind, field.name, hints[field.name], key)),
        )


def known_keys() -> set[str]:
    """All keys, dotted."""
    return {setting.key for section in sections() for setting in settings_of(section)}


def render() -> str:
    """A heading for each section and key."""
    lines: list[str] = []
    for section, kind in sections().items():
        if section:
            description = parse_from_object(kind).short_description
            lines += [f"## `{section}` {{ #{section} }}", "", description or "", ""]
        else:
            lines += ["## Of the whole run", ""]
        for setting in settings_of(section):
            lines += [f"### `{setting.key}` {{ #{setting.key} }}", ""]
            lines += [f"{setting.type} · default `{setting.default}`", ""]
            lines += [" ".join([setting.meaning, *setting.limits]), ""]
    return "\n".join(lines)


def link_settings(markdown: str) -> str:
    """Settings in backticks, such as `gnmr.alpha` or `gnmr.mode: monitor`, as links; not in code and headings.

    One that does not exist becomes a link to an anchor that does not exist, which ends a strict build.
    """
    names = "|".join(name for name in sections() if name)
    setting = re.compile(rf"(?<!\[)(`((?:{names})\.\w+)(?:: [^`\n]+)?`)(?!\])")
    parts = re.split(r"(^```.*?^```|^#.*?$|^ {4}.*?$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [setting.sub(_link, part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match[str]) -> str:
    return found[1] if found[2] in NO_SETTINGS else f"[{found[1]}]({PAGE}#{found[2]})"


def _limits(kind: Any, name: str, hint: Any, key: str) -> Iterator[str]:
    """What the dataclass says to values at the edges, each thing once."""
    seen = {}
    for value in _tried(hint):
        try:
            kind(**{name: value})
        except ConfigError as error:
            message = str(error).replace("\n", " ")
            own = re.match(rf"{re.escape(key)}: (\S+) (.*)", message)
            if own is None:
                seen.setdefault(message, f"{message}.")
            elif own[2].startswith("must "):
                seen.setdefault(own[2], f"M{own[2][1:]}.")
            else:
                seen.setdefault(own[2], f"`{own[1]}` {own[2]}.")
    yield from seen.values()


def _tried(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _tried(part)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield from TRIED.get(get_origin(hint) or hint, ())


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return ", or ".join(_type(part) for part in arguments)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}s" if arguments[0] in NAMES else "list of mappings"
    if origin is dict:
        return "mapping" if arguments[0] is str else f"{{step: {_type(arguments[1])}}}"
    return NAMES.get(hint, str(hint))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
