"""Every command's help begins with a sentence and has examples, which its own parser takes."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from fsdpbench.cli.group import _COMMANDS, command_named


def examples(command: click.Command) -> list[list[str]]:
    """The example lines of a command's help, as words without `fsdpbench`."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    lines = [line for line in lines if line.startswith("fsdpbench ")]
    return [shlex.split(re.split(r" {3,}| > ", line)[0])[1:] for line in lines]


@pytest.mark.parametrize("name", [name for name in _COMMANDS if name != "completion"])
def test_it_says_what_it_does_and_shows_how(name: str) -> None:
    command = command_named(name)
    assert command is not None
    first = " ".join((command.help or "").split("\n\n")[0].split())
    assert re.fullmatch(r"[A-Z][^.]*\.", first), first
    found = examples(command)
    assert found
    for words in found:
        assert words.pop(0) == name
        inner = command
        if isinstance(inner, click.Group):
            inner = inner.commands[words.pop(0)]
        inner.make_context(name, words, resilient_parsing=True)
        assert not {word for word in words if word.startswith("--") and word != "--"} - _options(inner)


def _options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("name", [name for name in _COMMANDS if name not in ("completion", "mcp")])
def test_programs_can_read_what_it_says(name: str) -> None:
    """`completion` prints what a shell reads; `mcp` speaks with a program, in JSON."""
    command = command_named(name)
    inner = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    assert all("--json" in _options(each) for each in inner if each is not None)


@pytest.mark.parametrize("name", _COMMANDS)
def test_no_option_takes_an_empty_value(name: str) -> None:
    """A shell's unset variable, `--hardware "$CHIP"`, is not the default."""
    command = command_named(name)
    assert command is not None
    parts = command.commands.values() if isinstance(command, click.Group) else [command]
    for part in parts:
        for option in part.params:
            if isinstance(option, click.Option) and not option.is_flag and option.flag_value != "":
                values = [""] * option.nargs
                with pytest.raises(click.UsageError) as refused:
                    part.make_context(name, [max(option.opts, key=len), *values])
                assert "--" in refused.value.format_message(), option.opts


@pytest.mark.parametrize("name", ["report", "compare", "analyze", "watch"])
def test_no_path_is_empty(name: str) -> None:
    command = command_named(name)
    assert command is not None
    with pytest.raises(click.UsageError, match="the path is empty"):
        command.make_context(name, ["", ""])
