"""`fsdpbench reproduce`: a publication's figures, published and simulated, in one chart each."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import SomeFailedError, UsageError, unknown
from fsdpbench.base.files.documents import to_json
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import MOST_JOBS, PossiblePath, whole
from fsdpbench.engine.results.store import disk_errors
from fsdpbench.lab.reproduce.catalogue import NAMES, PUBLICATION, figures
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.lab.reproduce.outcome import Outcome

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
    """Return the figures named by `--only`. Raises `UsageError`."""
    if only is None:
        return []
    names = [name.strip().lower() for name in only.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--only {only!r} names no figure; there are {', '.join(NAMES)}")
    for name in names:
        if name not in NAMES:
            raise unknown("figure", name, NAMES, "fsdpbench reproduce --help")
    return names


def _print(outcomes: "list[Outcome]") -> None:
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
