"""`fsdpbench validate`: the simulation against published measurements."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fsdpbench.errors import ExitCode, UsageError


@click.command("validate")
@click.option("--runs", type=click.Path(path_type=Path), help="CSV of published runs, beside the known ones.")
@click.option("--system", default="torch-fsdp1", help="System that simulates them (default torch-fsdp1).")
@click.option("--only", help="Cases whose name or group contains this text.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("runs/validate"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(runs: Path | None, system: str, only: str | None, output: Path, as_json: bool) -> None:
    """Simulate published runs and print predicted beside published; exit 1 if a bar is not met."""
    from fsdpbench.cli.progress import make_progress
    from fsdpbench.launch.pool import PointPool
    from fsdpbench.systems import get_system
    from fsdpbench.validation.judge import judge
    from fsdpbench.validation.page import write_page
    from fsdpbench.validation.paper import paper_cases
    from fsdpbench.validation.paper_t5 import t5_cases
    from fsdpbench.validation.predict import predict
    from fsdpbench.validation.runs_file import cases_of_file
    from fsdpbench.validation.text import as_dict, as_markdown

    PointPool.warm_up()
    get_system(system)
    cases = paper_cases() + t5_cases() + (cases_of_file(runs) if runs else [])
    cases = [case for case in cases if only is None or only in case.name or only in case.group]
    if not cases:
        raise UsageError(f"--only {only!r}: no case has it in its name or group")
    predictions = predict(cases, system, output, make_progress())
    bars = judge(predictions)
    text = as_markdown(predictions, bars, system)
    (output / "validation.md").write_text(text)
    write_page(output / "validation.html", predictions, bars, system)
    print(json.dumps(as_dict(predictions, bars, system)) if as_json else text)
    click.echo(f"Page: {output / 'validation.html'}", err=True)
    if not all(bar.met for bar in bars):
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))
