"""Nothing that a command says commands the terminal, whatever is in a name, a path or a cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from fsdpbench.cli import output

HOSTILE = "a\x1b[2J\x07b[bold]c[/x]:smile:"
CLI = Path(output.__file__).parent


def test_text_and_errors_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(HOSTILE + "\n" + "x" * 1_000_000)
    output.tell(HOSTILE)
    output.show("two\nlines\r")
    shown = capsys.readouterr()
    error, note = shown.err.splitlines()
    assert error.startswith(r"fsdpbench: a\x1b[2J\x07b")
    assert len(error) < 1100
    assert note == r"a\x1b[2J\x07b[bold]c[/x]:smile:"
    assert shown.out == "two\nlines\\r\n"


def test_tables_are_printable_and_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE))
    table.add_row(HOSTILE)
    console = output.make_console()
    console.print(table)
    console.print(HOSTILE)
    shown = capsys.readouterr().out
    assert shown.count(r"\x1b[2J") == 4
    assert shown.count("[bold]c[/x]") == 4
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown)


def test_commands_print_nothing_past_it() -> None:
    past = re.compile(
        r"(?<![\w.])print\(|click\.echo|(?<!Printable)\bConsole\(|click\.Path\(|type=(int|float)\b"
    )
    for path in CLI.rglob("*.py"):
        if path.name not in ("output.py", "values.py"):
            assert not past.search(path.read_text()), path.name
