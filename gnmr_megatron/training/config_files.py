"""From YAML files and command-line overrides to a RunConfig."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, did_you_mean
from gnmr_megatron.training.checkpoint_files import split_resume
from gnmr_megatron.training.config import RunConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def run_parser(prog: str, *, description: str, epilog: str) -> ArgumentParser:
    """A parser of all settings of a run; parse with `parse_run`."""
    parser = _parser(prog, description=description, epilog=epilog)
    parser.usage = "%(prog)s [--config FILE] [--SECTION.KEY VALUE ...] [--resume RUN]"
    parser.add_argument(
        "--config", action="config", help="YAML file of settings; later options override it"
    )
    parser.add_class_arguments(RunConfig, None)
    return parser


def changes_parser(prog: str, *, description: str, epilog: str) -> ArgumentParser:
    """A parser of the controller's settings alone, `--gnmr.KEY VALUE`; parse with `parse_changes`."""
    parser = _parser(prog, description=description, epilog=epilog)
    parser.add_class_arguments(ControlConfig, "gnmr")
    return parser


def _parser(prog: str, *, description: str, epilog: str) -> ArgumentParser:
    return ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )


def parse_changes(
    parser: ArgumentParser, arguments: Sequence[str]
) -> tuple[dict[str, Any], argparse.Namespace]:
    """The controller's settings that were given, without the defaults of others; and all options.

    Raises:
        ConfigError: an unknown option, with a suggestion, or a value of another type.
    """
    try:
        options = parser.parse_args(list(arguments))
        given = parser.parse_args(list(arguments), defaults=False)
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), list(parser.get_defaults().keys()))) from error
    return given.as_dict().get("gnmr", {}), argparse.Namespace(**options.as_dict())


class _HelpFormatter(DefaultHelpFormatter):
    """Types and defaults of each setting, and description and examples as they were written."""

    def _fill_text(self, text: str, _width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))


def parse_run(
    parser: ArgumentParser, arguments: Sequence[str]
) -> tuple[RunConfig, argparse.Namespace]:
    """Read files and overrides.

    A section may name another file (`model: ../models/llama_60m.yaml`, relative to the file that says so).

    Raises:
        ConfigError: with file and line where a file is wrong, a suggestion for an unknown key, and one line for
            each value out of range.
    """
    for path in _values("--config", arguments):
        _check_keys(Path(path), RunConfig, prefix="")
    try:
        parsed = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), _dotted_keys())) from error
    values = parsed.as_dict()
    sections, problems = {}, []
    for name, section in _sections(RunConfig).items():
        try:
            sections[name] = section(**_settings(values[name], section, prefix=f"{name}."))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    scalars = {
        f.name: values[f.name] for f in dataclasses.fields(RunConfig) if f.name not in sections
    }
    return RunConfig(**scalars, **sections), argparse.Namespace(**values)


def _settings(values: dict[str, Any], section: type, *, prefix: str) -> dict[str, Any]:
    """The fields of a section; null only where the field takes it, which the parser does not check."""
    hints = get_type_hints(section)
    settings = {f.name: values[f.name] for f in dataclasses.fields(section)}
    for name, value in settings.items():
        if value is None and type(None) not in get_args(hints[name]):
            raise ConfigError(
                f"{prefix}{name}: null is no value for it; leave it out for the default"
            )
    return settings


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved settings so that `--config` reads them back, as those of a new run."""
    settings = dataclasses.asdict(dataclasses.replace(config, resume=None))
    if config.precision.recipe is not None:  # a resume may start elsewhere
        settings["precision"]["recipe"] = str(Path(config.precision.recipe).resolve())
    if config.init_from is not None:
        settings["init_from"] = str(Path(config.init_from).resolve())
    if config.lora.base is not None:
        settings["lora"]["base"] = str(Path(config.lora.base).resolve())
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def with_resume(arguments: Sequence[str]) -> list[str]:
    """Complete `--resume`: alone it means `latest`, and with a run its settings come first unless a file is given."""
    pairs = itertools.pairwise([*arguments, "--"])
    is_bare = [option == "--resume" and following.startswith("--") for option, following in pairs]
    arguments = [
        "--resume=latest" if bare else item for item, bare in zip(arguments, is_bare, strict=True)
    ]
    runs = _values("--resume", arguments)
    if not runs or runs[-1] in ("latest", "auto") or _values("--config", arguments):
        return arguments
    folder, _ = split_resume(Path(runs[-1]))
    return ["--config", str(folder / "config.yaml"), *arguments]


def _sections(config_class: type) -> dict[str, type]:
    hints = get_type_hints(config_class)
    return {
        f.name: hints[f.name]
        for f in dataclasses.fields(config_class)
        if dataclasses.is_dataclass(hints[f.name])
    }


def _values(option: str, arguments: Sequence[str]) -> list[str]:
    """Values of an option, given as `--option VALUE` or `--option=VALUE`."""
    pairs = itertools.pairwise([*arguments, ""])
    return [
        following if argument == option else argument.partition("=")[2]
        for argument, following in pairs
        if (argument == option and following) or argument.startswith(f"{option}=")
    ]


def _check_tags(node: yaml.Node, path: Path) -> None:
    """Refuse values that are no plain ones, such as Python objects."""
    plain = "tag:yaml.org,2002:"
    if not node.tag.startswith(plain) or node.tag.startswith(f"{plain}python"):
        tag = node.tag.replace(plain, "!!")
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: `{tag}` is no plain value; settings run no code"
        )
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for child in pair:
                _check_tags(child, path)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_tags(child, path)


def _check_keys(path: Path, config_class: type, *, prefix: str) -> None:
    """Refuse unknown keys of a file, and of the files that it names, with line and suggestion."""
    try:
        root = yaml.compose(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise ConfigError(f"{path}: is empty; put `key: value` settings there")
    _check_tags(root, path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold `key: value` settings")
    _check_mapping(root, path, config_class, prefix=prefix)


def _check_mapping(root: yaml.MappingNode, path: Path, config_class: type, *, prefix: str) -> None:
    known = [f.name for f in dataclasses.fields(config_class)]
    sections = _sections(config_class)
    for key_node, value in root.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if key not in known:
            raise ConfigError(
                f"{path}:{line}: unknown key `{prefix}{key}`{did_you_mean(key, known)}"
            )
        section = sections.get(key)
        if section is None:
            continue
        if isinstance(value, yaml.MappingNode):
            _check_mapping(value, path, section, prefix=f"{prefix}{key}.")
        elif isinstance(value, yaml.ScalarNode) and value.value.endswith((".yaml", ".yml")):
            _check_keys(path.parent / value.value, section, prefix=f"{prefix}{key}.")
        else:
            raise ConfigError(
                f"{path}:{line}: `{key}` must hold settings, or name a .yaml file that does"
            )


def _explain(message: str, keys: Sequence[str]) -> str:
    """Reword the parser's messages for keys and values given on the command line."""
    unknown = re.search(r"(?:Unrecognized|unrecognized) arguments?: (--?)?([\w.]+)", message)
    if unknown and not unknown[1]:
        return f"unexpected argument '{unknown[2]}'; settings are --SECTION.KEY VALUE"
    if unknown:
        return f"unknown option --{unknown[2]}{did_you_mean(unknown[2], keys)}"
    wrong = re.search(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
    if not wrong:
        return message
    key, text = wrong[1], " ".join(wrong[2].split()).replace("typing.", "")
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    choice = re.search(r"Expected a Literal\[(.*)\]\. Got value: (.*)", text)
    if choice:
        possible = choice[1].replace("'", "").split(", ")
        return f"{key}: no `{choice[2]}`{did_you_mean(choice[2], possible, list_all=True)}"
    union = re.search(r"Subtypes: \[(.*?)\] Errors.*Given value: (.*)", text)
    return f"{key}: {union[2]} is none of {union[1]}" if union else f"{key}: {text}"


def _dotted_keys() -> list[str]:
    sections: dict[str, Any] = _sections(RunConfig)
    keys = [f.name for f in dataclasses.fields(RunConfig) if f.name not in sections]
    for name, section in sections.items():
        keys += [f"{name}.{f.name}" for f in dataclasses.fields(section)]
    return keys
