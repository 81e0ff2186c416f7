"""`fsdpbench doctor`: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import ExitCode
from fsdpbench.cli.output import show, show_json

if TYPE_CHECKING:
    from fsdpbench.lab.doctor import Finding


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Only look; do not run a small model on each device.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def command(quick: bool, as_json: bool) -> None:
    """Test what this machine can run, and say what is missing for the rest.

    \b
    fsdpbench doctor

    Exits with 5 if something that every command needs does not work.
    """
    from fsdpbench.lab.doctor import Verdict, examine

    findings = examine(try_devices=not quick)
    if as_json:
        show_json({"schema": 1, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        _print(findings, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise click.exceptions.Exit(int(ExitCode.BENCH_FAILED))


def _print(findings: Sequence[Finding], columns: int | None) -> None:
    """One finding a line; on a terminal of `columns` long ones continue below their own beginning."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        head = f"{finding.what:<{width}}  {finding.verdict.value:<7}  "
        for text in filter(None, (finding.detail, finding.way_out)):
            room = None if columns is None else max(30, columns - len(head))
            for line in [text] if room is None else textwrap.wrap(text, room):
                show(head + line)
                head = " " * len(head)
