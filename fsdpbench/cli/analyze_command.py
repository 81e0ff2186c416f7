"""`fsdpbench analyze`: what a trace says, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fsdpbench.errors import UsageError


@click.command("analyze")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(paths: tuple[Path, ...], as_json: bool) -> None:
    """Overlap, exposed communication, idle time and memory of Kineto traces (files or folders)."""
    from reports.analysis import analyze
    from reports.analysis.text import describe
    from reports.trace import TraceError

    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
    try:
        analysis = analyze(paths)
    except TraceError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(analysis.to_dict()) if as_json else describe(analysis))
