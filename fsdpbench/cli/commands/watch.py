"""`fsdpbench watch`: a sweep seen from outside, its page rewritten as results arrive, until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base import interruption
from fsdpbench.base.errors import BenchError, CannotJudgeError, ExitCode, UsageError
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import MOST_SECONDS, PlaceForFile, Positive, PossiblePath

if TYPE_CHECKING:
    from fsdpbench.cli.terminal.watch_view import View
    from fsdpbench.reports.pages import LivePage
    from fsdpbench.sweep.sweep_state import SweepFolder, SweepState

_LOOK_S = 0.5
_SLURM_S = 5.0
_GRACE_S = 3.0
"""How long a lock that is released may be ahead of the last result: network file systems tell in any
order."""


@click.command("watch")
@click.argument("folder", type=PossiblePath())
@click.option("-o", "--output", type=PlaceForFile(), help="The page (default: FOLDER/report.html).")
@click.option("--no-page", is_flag=True, help="Only the terminal; write nothing.")
@click.option(
    "--wait", type=Positive(MOST_SECONDS), default=60.0, show_default=True, metavar="S",
    help="Seconds to wait for a sweep in FOLDER to begin.",
)  # fmt: skip
@click.option(
    "--timeout", type=Positive(MOST_SECONDS), metavar="S", help="Stop watching after this many seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Where it stood at the end, as one JSON object.")
def command(
    folder: Path, output: Path | None, no_page: bool, wait: float, timeout: float | None, as_json: bool
) -> None:
    """Watch a sweep that runs in FOLDER, here, on another machine, or as Slurm jobs, until it ends.

    \b
    fsdpbench watch runs/gpt-2.8b-8x-a100-80gb

    A table in the terminal, one line an event where stderr is a file, and the sweep's page, rewritten as
    results arrive; it loads itself again in the browser. It may be started before the sweep.

    Example: fsdpbench watch runs/gpt-2.8b-8x-a100-80gb

    Exit code 0 all answered, 4 some configurations failed, 5 the sweep ended before it was done, 3 --timeout
    was reached, 2 no sweep began within --wait.
    """
    from fsdpbench.cli.terminal.watch_view import best_words, headline, make_view
    from fsdpbench.reports.pages import LivePage
    from fsdpbench.sweep.sweep_state import SweepFolder

    page = None if no_page else LivePage(folder, output or folder / "report.html")
    view = make_view(quiet=as_json)
    last: SweepState | None = None
    ending: BenchError | None = None
    with interruption.unwinding():  # else a cursor that is hidden stays so
        try:
            for state in _looks(SweepFolder(folder), view, wait, timeout):
                last = state
                _write(page, state, is_over=False)
        except BenchError as error:
            ending = error
        finally:
            view.end()
    if last is None:
        raise ending or UsageError(f"{folder}: no sweep")
    over = ending is None or not last.is_held
    if _write(page, last, is_over=over) and page is not None:
        tell(f"wrote {page.target}")
    if as_json:
        show_json(_record(folder, last, ending))
    else:
        show("\n".join(line for line in (headline(last), best_words(last)) if line))
    if ending is not None:
        raise ending
    if last.failed:
        raise click.exceptions.Exit(int(ExitCode.SOME_FAILED))


def _write(page: LivePage | None, state: SweepState, is_over: bool) -> bool:
    try:
        return page is not None and page.update(len(state.ended), is_over=is_over)
    except OSError as error:
        assert page is not None
        raise BenchError(
            f"{page.target}: cannot be written ({error.strerror}); --no-page does without"
        ) from None


def _looks(folder: SweepFolder, view: View, wait: float, timeout: float | None) -> Iterator[SweepState]:
    """Each look at the folder, until the sweep has ended well. Raises what else can come."""
    from fsdpbench.sweep.sweep_state import slurm_words

    began = time.monotonic()
    free_since: float | None = None
    slurm, slurm_at = "", -_SLURM_S
    last: SweepState | None = None
    was_held = False
    while True:
        now = time.monotonic()
        state = folder.look()
        if state is None and last is not None:
            raise BenchError(f"{folder.path}: the folder was removed while it was watched")
        if state is not None:
            last = state
            was_held |= state.is_held
            if state.is_held and now - slurm_at >= _SLURM_S:
                slurm, slurm_at = slurm_words(folder.path), now
            view.show(state, slurm if state.is_held else "")
            yield state
            free_since = None if state.is_held else free_since or now
            if state.is_done and not state.is_held:
                return
        if timeout is not None and now - began >= timeout:
            _timed_out(folder.path, last, timeout)
        if was_held and free_since is not None and now - free_since >= _GRACE_S:
            assert last is not None
            raise BenchError(_died(folder.path, last))
        if not was_held:
            view.waiting(_why_waiting(folder.path, last))
            if now - began >= wait:
                _never_began(folder.path, last, wait)
        time.sleep(_LOOK_S)


def _why_waiting(folder: Path, state: SweepState | None) -> str:
    if state is not None:
        done = f"{len(state.ended)} of {len(state.points)} are done"
        return f"waiting for the sweep in {folder} to resume: {done}"
    return f"waiting for a sweep in {folder}"


def _died(folder: Path, state: SweepState) -> str:
    return (
        f"{folder}: the sweep ended with {len(state.ended)} of {len(state.points)} configurations done "
        "(stopped, or its process is gone); what is finished is kept, the same command resumes"
    )


def _timed_out(folder: Path, state: SweepState | None, timeout: float) -> None:
    done = f"{len(state.ended)} of {len(state.points)} configurations are done" if state else "no sweep began"
    raise CannotJudgeError(f"{folder}: {done} after {timeout:g} s (--timeout); the sweep is not disturbed")


def _never_began(folder: Path, state: SweepState | None, wait: float) -> None:
    if state is not None:
        raise BenchError(
            f"{folder}: no sweep runs there ({wait:g} s waited, --wait), and {len(state.ended)} of "
            f"{len(state.points)} configurations are done; the sweep's command resumes"
        )
    what = "is not a sweep's folder (no sweep.toml in it)" if folder.is_dir() else "does not exist"
    raise UsageError(f"{folder} {what}, and no sweep began there within {wait:g} s (--wait)")


def _record(folder: Path, state: SweepState, ending: BenchError | None) -> dict[str, object]:
    """Where the sweep stood at the end, for programs."""
    return {
        "schema": 1,
        "folder": str(folder),
        "configurations": len(state.points),
        "ended": [{"name": each.name, "status": each.result.status.value} for each in state.ended],
        "failed": state.failed,
        "over": state.is_done and not state.is_held,
        "problem": str(ending) if ending is not None else None,
    }
