"""`fsdpbench report` and `fsdpbench watch`: the page of a run folder, also during its sweep."""

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base import interruption
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, CannotJudgeError, ExitCode, UsageError, error_text, written
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.cli.output import make_console, show, show_as, tell
from fsdpbench.cli.terminal.units import best_words, headline, words_of
from fsdpbench.cli.values import MOST_SECONDS, PlaceForFile, Positive, PossiblePath

if TYPE_CHECKING:
    from rich.console import Console, Group

    from fsdpbench.reports.pages import LivePage
    from fsdpbench.reports.result import Result
    from fsdpbench.sweep.sweep_state import SweepFolder, SweepState


_LOOK_S = 0.5
_SLURM_S = 5.0
_GRACE_S = 3.0
"""Seconds to wait for the last result after the lock is released: network file systems may reorder them."""


@click.command("watch")
@click.argument("folder", type=PossiblePath())
@click.option("-o", "--output", type=PlaceForFile())
@click.option("--no-page", is_flag=True)
@click.option("--wait", type=Positive(MOST_SECONDS), default=60.0, show_default=True, metavar="S")
@click.option("--timeout", type=Positive(MOST_SECONDS), metavar="S")
@click.option("--json", "as_json", is_flag=True)
def command(
    folder: Path, output: Path | None, no_page: bool, wait: float, timeout: float | None, as_json: bool
) -> None:
    """Watch a sweep that runs in FOLDER, here, on another machine, or as Slurm jobs, until it ends.

    \b
    fsdpbench watch runs/gpt-2.8b-8x-a100-80gb

    A table in the terminal, one line an event where stderr is a file, and the sweep's page, rewritten as
    results arrive; it loads itself again in the browser. It may be started before the sweep.

    Exit code 0 all answered, 4 some configurations failed, 5 the sweep ended before it was done, 3 --timeout
    was reached, 2 no sweep began within --wait.
    """
    from fsdpbench.reports.pages import LivePage
    from fsdpbench.sweep.sweep_state import SweepFolder

    page = None if no_page else LivePage(folder, output or folder / "report.html")
    console = make_console(stderr=True)
    view = View() if as_json else LiveView(console) if console.is_terminal else PlainView()
    last: SweepState | None = None
    ending: BenchError | None = None
    with interruption.unwinding():  # restores a hidden cursor
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
    lines = filter(None, (_headline(last), best_words(_results(last))))
    show_as(_record(folder, last, ending), "\n".join(lines), as_json=as_json)
    if ending is not None:
        raise ending
    if last.failed:
        raise click.exceptions.Exit(int(ExitCode.SOME_FAILED))


def _write(page: "LivePage | None", state: "SweepState", is_over: bool) -> bool:
    with written(page and page.target, "; --no-page does without"):
        return page is not None and page.update(len(state.ended), is_over=is_over)


def _looks(folder: "SweepFolder", view: "View", wait: float, timeout: float | None) -> "Iterator[SweepState]":
    """Yield the state of `folder` twice a second until its sweep is done.

    Raises `UsageError` if no sweep begins within `wait` seconds, `CannotJudgeError` after `timeout` seconds,
    `BenchError` if the sweep stops before it is done.
    """
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
            counts = len(last.ended), len(last.points)
            raise BenchError(error_text("pages.ended", folder.path, *counts))
        if not was_held:
            view.waiting(_why_waiting(folder.path, last))
            if now - began >= wait:
                _never_began(folder.path, last, wait)
        time.sleep(_LOOK_S)


def _why_waiting(folder: Path, state: "SweepState | None") -> str:
    if state is None:
        return f"waiting for a sweep in {folder}"
    return f"waiting for the sweep in {folder} to resume: {len(state.ended)} of {len(state.points)} are done"


def _timed_out(folder: Path, state: "SweepState | None", timeout: float) -> None:
    done = f"{len(state.ended)} of {len(state.points)} configurations are done" if state else "no sweep began"
    raise CannotJudgeError(f"{folder}: {done} after {timeout:g} s (--timeout); the sweep is not disturbed")


def _never_began(folder: Path, state: "SweepState | None", wait: float) -> None:
    if state is not None:
        counts = len(state.ended), len(state.points)
        raise BenchError(error_text("pages.no_sweep", folder, wait, *counts))
    what = "is not a sweep's folder (no sweep.toml in it)" if folder.is_dir() else "does not exist"
    raise UsageError(f"{folder} {what}, and no sweep began there within {wait:g} s (--wait)")


def _record(folder: Path, state: "SweepState", ending: BenchError | None) -> dict[str, object]:
    """Return the last state of the sweep as JSON."""
    return {
        "schema": 1,
        "folder": str(folder),
        "configurations": len(state.points),
        "ended": [{"name": each.name, "status": each.result.status.value} for each in state.ended],
        "failed": state.failed,
        "over": state.is_done and not state.is_held,
        "problem": str(ending) if ending is not None else None,
    }


_LAST_SHOWN = 8
_MOST_UNDER_WAY = 6


def _headline(state: "SweepState", slurm: str = "") -> str:
    done = f"{len(state.ended)}/{len(state.points)}"
    text = headline(done, state.failed, state.left_s if state.is_held else None)
    return f"{text}; Slurm: {slurm}" if slurm else text


def _results(state: "SweepState") -> "list[tuple[str, Result]]":
    return [(_words(each.folder), each.result) for each in state.ended]


@cache
def _words(folder: Path) -> str:
    """Return the configuration of a folder in words; the folder's name if no configuration can be read."""
    from fsdpbench.sweep.sweep_state import point_name

    try:
        return words_of(Config.from_dict(read_json_object(folder / "config.json")))
    except (ValueError, UsageError, KeyError, TypeError):
        return point_name(folder.name.removeprefix(".work-"))


class View:
    """The interface of views, which prints nothing; `show` is called with each new state."""

    def waiting(self, why: str) -> None: ...
    def show(self, state: "SweepState", slurm: str) -> None: ...
    def end(self) -> None: ...


class PlainView(View):
    """Prints a line for each configuration that ends and for each new state of Slurm's jobs."""

    def __init__(self) -> None:
        self._shown_ns: dict[str, int] = {}
        self._slurm = ""
        self._why = ""
        self._began = False

    def waiting(self, why: str) -> None:
        if why != self._why:
            tell(why)
            self._why = why

    def show(self, state: "SweepState", slurm: str) -> None:
        from fsdpbench.cli.terminal.progress import describe_result

        if not self._began:
            tell(_headline(state))
            self._shown_ns = {each.name: each.changed_ns for each in state.ended}
            self._began = True
        new = [each for each in state.ended if self._shown_ns.get(each.name) != each.changed_ns]
        for number, each in enumerate(new, start=len(state.ended) - len(new) + 1):
            tell(f"[{number}/{len(state.points)}] {_words(each.folder)}: {describe_result(each.result)}")
            self._shown_ns[each.name] = each.changed_ns
        if slurm and slurm != self._slurm:
            tell(f"Slurm: {slurm}")
        self._slurm = slurm


class LiveView(View):
    """Redraws a table in the terminal four times a second."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def waiting(self, why: str) -> None:
        from rich.text import Text

        self._live.update(Text(why, style="dim"))

    def show(self, state: "SweepState", slurm: str) -> None:
        self._live.update(_table_of(state, slurm, self._console.width))

    def end(self) -> None:
        self._live.stop()


def _table_of(state: "SweepState", slurm: str, width: int) -> "Group":
    """Return headline, best so far, last results and running configurations, `width` columns wide."""
    from rich.console import Group
    from rich.text import Text

    from fsdpbench.cli.terminal.progress import described, live_view

    shown = state.under_way[:_MOST_UNDER_WAY]
    rows = [(name, described(result)) for name, result in _results(state)[-_LAST_SHOWN:]]
    rows += [(_words(folder), Text("under way", style="dim")) for folder in shown]
    more = len(state.under_way) - len(shown)
    view = live_view(_headline(state, slurm), _results(state), rows, width)
    return Group(view, Text(f"and {more} more under way", style="dim")) if more else view


@click.command("report")
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=PossiblePath())
@click.option("-o", "--output", type=PlaceForFile())
@click.option("--format", "form", type=click.Choice(["html", "md", "json", "csv"]), default="html")
@click.option("--json", "form", flag_value="json")
def report_command(folders: tuple[Path, ...], output: Path | None, form: str) -> None:
    """Write the report of a run folder: an offline page, or the ranked table as Markdown, JSON or CSV.

    \b
    fsdpbench report runs/gpt-2.8b-8x-a100-80gb

    Of several folders -o names one page that has them side by side.
    """
    if len(folders) > 1:
        _side_by_side(folders, output, form)
    else:
        _one(folders[0], output, form)


def _side_by_side(folders: tuple[Path, ...], output: Path | None, form: str) -> None:
    from fsdpbench.reports.pages.runs_page import write_runs_page

    if form != "html" or output is None:
        raise UsageError("several folders make one page: -o FILE.html (--format is for one folder)")
    with written(output):
        write_runs_page(folders, output)
    tell(f"wrote {output}")


def _one(folder: Path, output: Path | None, form: str) -> None:
    from fsdpbench.base.writing import write_whole
    from fsdpbench.engine.results.store import REPORT_FILE, Store, refresh_index
    from fsdpbench.reports.pages import write_csv, write_json, write_markdown, write_report

    with written(output or folder):
        if form != "html":
            text = {"md": write_markdown, "json": write_json, "csv": write_csv}[form](folder)
            if output is None:
                show(text)
                return
            write_whole(output, text)
        else:
            output = output or folder / REPORT_FILE
            write_report(folder, output)
            if (folder / "sweep.toml").is_file():
                refresh_index(Store.open(folder))
    tell(f"wrote {output}")
