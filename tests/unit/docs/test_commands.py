"""Every command that the documentation tells people to type is one that the program takes."""

import argparse
import re
import shlex
from unittest import mock

import jsonargparse
import pytest

from docs.generator.command_reference import help_of, verbs_of
from gnmr_megatron.cli.main import VERBS, main
from tests.conftest import ROOT
from tests.unit.docs.pages import PAGES, TEXTS, blocks, commands, in_backticks

LINES = sorted({line for text in TEXTS.values() for line in commands(text)})
SCRIPTS = sorted(
    {
        found
        for text in TEXTS.values()
        for block in blocks(text, "sh", "text")
        for found in re.findall(r"(launch/[\w.]+) (--.*)", block.replace("\\\n", " "))
    }
)


class ParsedError(Exception):
    """A verb has read its arguments and would begin."""


def stopping(read):
    def read_and_stop(*args, **kwargs):
        raise ParsedError(read(*args, **kwargs))

    return read_and_stop


def until_parsed(arguments):
    """Let a verb read its arguments, and stop it before it does anything."""
    ours, plain = jsonargparse.ArgumentParser, argparse.ArgumentParser
    with (
        mock.patch.object(ours, "parse_args", stopping(ours.parse_args)),
        mock.patch.object(plain, "parse_args", stopping(plain.parse_args)),
    ):
        return main(arguments)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder in which the commands find the files that they name."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "calibrated.yaml").write_text("gnmr: {alpha: 2.0}\n")
    (tmp_path / "checkpoints/llama").mkdir(parents=True)
    (tmp_path / "checkpoints/llama/config.yaml").write_text("model: {num_layers: 4}\n")
    for name in ("quickstart", "deeper"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("name: earlier\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("line", LINES)
def test_a_command_is_read_by_its_verb(line):
    verb, *options = shlex.split(re.sub(r"\bRUN\b", "runs/quickstart", line))[1:]
    assert verb in VERBS
    if options:
        with pytest.raises(ParsedError):
            until_parsed([verb, *options])


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_what_a_launch_script_hands_on_is_read_by_train(script, options):
    assert (ROOT / script).exists()
    with pytest.raises(ParsedError):
        until_parsed(["train", *shlex.split(options, comments=True)])


def test_a_wrong_command_would_be_found(capsys):
    assert until_parsed(["train", "--gnmr.alfa", "2"]) == 2
    with pytest.raises(SystemExit):
        until_parsed(["summary", "runs/quickstart", "--no-such-option"])
    assert "did you mean `gnmr.alpha`" in capsys.readouterr().err


@pytest.mark.parametrize("page", TEXTS)
def test_commands_in_the_text_name_verbs_and_options_that_there_are(page):
    mentions = [
        item.split() for item in in_backticks(TEXTS[page]) if item.startswith("gnmr-megatron ")
    ]
    for _, verb, *rest in mentions:
        if verb == "VERB":
            continue
        assert verb in VERBS, (page, verb)
        inner = rest[:1] if rest and rest[0] in verbs_of(verb) else []
        for option in rest:
            if option.startswith("--") and "." not in option:
                assert f"{option} " in help_of(verb, *inner) + " ", (page, verb, option)


def test_every_verb_is_told_of_in_a_page():
    told = {line.split()[1] for line in LINES}
    told |= {
        item.split()[1]
        for text in PAGES.values()
        for item in in_backticks(text)
        if item.startswith("gnmr-megatron ")
    }
    assert told >= set(VERBS)
