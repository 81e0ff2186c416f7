"""`fsdpbench validate`: compare the simulation with published measurements."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import ExitCode, UsageError
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.values import PossiblePath
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.lab.validation.runs.case import Case


@click.command("validate")
@click.option("--runs", type=PossiblePath(), multiple=True)
@click.option("--system")
@click.option("--only")
@click.option("--held-out/--no-held-out", default=True)
@click.option("-o", "--output", type=PossiblePath(), default=Path("runs/validate"))
@click.option("--json", "as_json", is_flag=True)
def command(
    runs: tuple[Path, ...], system: str | None, only: str | None, held_out: bool, output: Path, as_json: bool
) -> None:
    """Simulate published runs and compare the predicted with the published figures.

    \b
    fsdpbench validate --runs published.csv

    Exits with 1 if a target accuracy is missed.
    """
    fork_server.start("sim")
    from fsdpbench.base.writing import write_whole
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.lab.validation.coverage import (
        compare_held_out,
        held_out_cases,
        interval_bars,
        judge,
        judged_runs,
    )
    from fsdpbench.lab.validation.paper_network import network_predictions, predict
    from fsdpbench.lab.validation.runs.case import known_cases
    from fsdpbench.lab.validation.runs.runs_file import cases_of_file
    from fsdpbench.lab.validation.text import as_dict, as_markdown, write_page
    from fsdpbench.sweep.planning import check_systems

    if system is not None:
        check_systems([system], installed=False)
    rows = [row for path in runs for row in _chosen(cases_of_file(path), only)]
    cases = _chosen(known_cases(), only) + rows
    network = [p for p in network_predictions() if p.case in _chosen([p.case], only)]
    if not cases and not network:
        raise UsageError(f"--only {only!r}: no case has it in its name or group")
        # Beside the sweep's folder, which may hold nothing else.
    foreign = held_out_cases(rows, output.with_name(f"{output.name}-held-out")) if held_out else []
    both = predict(cases + foreign, system, output, make_progress())
    predictions = network + both[: len(cases)]
    judged = judged_runs(predictions)
    bars = judge(predictions) + interval_bars(judged)
    shares = compare_held_out(predictions, both[len(cases) :])
    text = as_markdown(predictions, bars, shares, judged)
    write_whole(output / "validation.md", text)
    write_page(output / "validation.html", predictions, bars, shares, judged)
    show_as(as_dict(predictions, bars, shares, judged), text, as_json=as_json)
    tell(f"Page: {output / 'validation.html'}")
    if not all(bar.met for bar in bars):
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))


def _chosen(cases: "list[Case]", only: str | None) -> "list[Case]":
    return [case for case in cases if only is None or only in case.name or only in case.group]
