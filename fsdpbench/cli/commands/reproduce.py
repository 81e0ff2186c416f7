"""`fsdpbench reproduce`: a publication's figures, published and simulated in one chart; and `validate`: the
simulation against published measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import ExitCode, SomeFailedError, UsageError, unknown
from fsdpbench.base.files.documents import to_json
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.output import show, show_as, show_json, tell
from fsdpbench.cli.values import MOST_JOBS, PossiblePath, whole
from fsdpbench.engine.results.store import disk_errors
from fsdpbench.lab.reproduce.catalogue import NAMES, PUBLICATION, figures
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.lab.reproduce.outcome import Outcome
    from fsdpbench.lab.validation.runs.case import Case

_PAGE = "fsdp-paper.html"
_JSON = "fsdp-paper.json"
_RUNS = "runs"
_PROFILES = "profiles"


@click.command("reproduce")
@click.argument("publication", metavar="fsdp-paper")
@click.option("--only", help=f"Figures to do, comma-separated, of {', '.join(NAMES)} (default: all).")
@click.option("-o", "--output", type=PossiblePath(), default=Path("runs/fsdp-paper"))
@click.option("--jobs", type=whole(most=MOST_JOBS))
@click.option("--json", "as_json", is_flag=True)
def command(publication: str, only: str | None, output: Path, jobs: int | None, as_json: bool) -> None:
    """Simulate every figure of the FSDP paper and draw it with the published one, on one offline page.

    \b
    fsdpbench reproduce fsdp-paper --only 6b

    The same command again resumes where it stopped.
    """
    if publication != PUBLICATION:
        raise unknown("publication", publication, (PUBLICATION,), "fsdpbench reproduce --help")
    names = _names(only)
    fork_server.start("sim")
    began = time.monotonic()
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.lab.reproduce.outcome import as_dict, outcome_of
    from fsdpbench.lab.reproduce.page import write_page
    from fsdpbench.lab.reproduce.run import run, traced_runs

    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        chosen = figures(output / _PROFILES, names)
    runs = run(chosen, output / _RUNS, make_progress(), jobs)
    outcomes = [outcome_of(figure, runs) for figure in chosen]
    traced = [traced_runs(figure, runs) for figure in chosen]
    document = as_dict(publication, outcomes, traced)
    with disk_errors(output):
        write_whole(output / _JSON, to_json(document, 1, allow_nan=False))
        write_page(output / _PAGE, publication, outcomes, traced, time.monotonic() - began)
    if as_json:
        show_json(document)
    else:
        _print(outcomes)
    tell(f"Page: {output / _PAGE}")
    if runs.failed:
        raise SomeFailedError(f"{len(runs.failed)} kinds of failure, the first: {runs.failed[0]}")


def _names(only: str | None) -> list[str]:
    """Return the figures that `--only` names. Raises `UsageError`."""
    if only is None:
        return []
    names = [name.strip().lower() for name in only.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--only {only!r} names no figure; there are {', '.join(NAMES)}")
    for name in names:
        if name not in NAMES:
            raise unknown("figure", name, NAMES, "fsdpbench reproduce --help")
    return names


def _print(outcomes: list[Outcome]) -> None:
    from fsdpbench.lab.reproduce.outcome import Verdict, counted
    from fsdpbench.reports.pages.display import percent

    show("figure  points  mean error   worst  claims that hold  of")
    for outcome in outcomes:
        verdicts = counted([outcome])
        tests = sum(verdicts.values()) - verdicts[Verdict.TAKEN]
        claims = f"{verdicts[Verdict.HOLDS]}/{tests}" if tests else ""
        show(
            f"{outcome.figure.name:<6}  {len(outcome.points):>6}  {percent(outcome.mean_error):>10}  "
            f"{percent(outcome.worst_error):>6}  {claims:>16}  {outcome.figure.words.title}"
        )
    counts = counted(outcomes)
    counted_text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    if counted_text:
        show(f"claims: {counted_text}")


@click.command("validate")
@click.option("--runs", type=PossiblePath(), multiple=True)
@click.option("--system")
@click.option("--only")
@click.option("--held-out/--no-held-out", default=True)
@click.option("-o", "--output", type=PossiblePath(), default=Path("runs/validate"))
@click.option("--json", "as_json", is_flag=True)
def validate_command(
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
    # Beside the sweep's folder, which must be empty or a sweep's.
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


def _chosen(cases: list[Case], only: str | None) -> list[Case]:
    return [case for case in cases if only is None or only in case.name or only in case.group]
