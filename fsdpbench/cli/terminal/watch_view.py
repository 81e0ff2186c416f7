"""What `fsdpbench watch` shows: a table that changes in place on a terminal, one line an event otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fsdpbench.cli.output import make_console, tell
from fsdpbench.cli.terminal.progress import describe_result, shortened, told_apart
from fsdpbench.cli.terminal.units import compiled_words
from fsdpbench.cli.terminal.units import each as each_device
from fsdpbench.reports.result import Status

if TYPE_CHECKING:
    from rich.console import Console, Group

    from fsdpbench.sweep.sweep_state import SweepState

_LAST_SHOWN = 8
_MOST_UNDER_WAY = 6
_GAP = 2


class View(Protocol):
    """Told how the sweep stands, again and again."""

    def waiting(self, why: str) -> None: ...
    def show(self, state: SweepState, slurm: str) -> None: ...
    def end(self) -> None: ...


def make_view(quiet: bool) -> View:
    """The view that fits where stderr goes."""
    if quiet:
        return SilentView()
    console = make_console(stderr=True)
    return LiveView(console) if console.is_terminal else PlainView()


def headline(state: SweepState, slurm: str = "") -> str:
    """`3/8 configurations, 1 failed, about 40 s left`."""
    text = f"{len(state.ended)}/{len(state.points)} configurations"
    if state.failed:
        text += f", {state.failed} failed"
    if state.left_s is not None and state.is_held:
        text += f", about {state.left_s:.0f} s left"
    return f"{text}; Slurm: {slurm}" if slurm else text


def best_words(state: SweepState, width: int | None = None) -> str:
    """The fastest one so far; empty where none has figures."""
    rates = [
        (rate, each)
        for each in state.ended
        if each.result.status is Status.OK and (rate := each.result.tokens_per_s_per_gpu) is not None
    ]
    if not rates:
        return ""
    rate, best = max(rates, key=lambda pair: pair[0])
    told = f"best so far: {rate:,.0f} tokens/s/{each_device(best.result.device)}, "
    if best.result.compiled is not None:
        told += f"{compiled_words([best.result.compiled])}, "
    return told + (best.name if width is None else shortened(best.name, max(24, width - len(told))))


class SilentView:
    """Says nothing."""

    def waiting(self, why: str) -> None: ...
    def show(self, state: SweepState, slurm: str) -> None: ...
    def end(self) -> None: ...


class PlainView(SilentView):
    """One line for each configuration that ends, once, and one for each new state of Slurm's jobs."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._slurm = ""
        self._why = ""
        self._began = False

    def waiting(self, why: str) -> None:
        if why != self._why:
            tell(why)
            self._why = why

    def show(self, state: SweepState, slurm: str) -> None:
        if not self._began:
            tell(headline(state))
            self._told = {each.name: each.changed_ns for each in state.ended}
            self._began = True
        new = [each for each in state.ended if self._told.get(each.name) != each.changed_ns]
        for number, each in enumerate(new, start=len(state.ended) - len(new) + 1):
            tell(f"[{number}/{len(state.points)}] {each.name}: {describe_result(each.result)}")
            self._told[each.name] = each.changed_ns
        if slurm and slurm != self._slurm:
            tell(f"Slurm: {slurm}")
        self._slurm = slurm


class LiveView:
    """Replaced in place several times a second."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def waiting(self, why: str) -> None:
        from rich.text import Text

        self._live.update(Text(why, style="dim"))

    def show(self, state: SweepState, slurm: str) -> None:
        self._live.update(table_of(state, slurm, self._console.width))

    def end(self) -> None:
        self._live.stop()


def table_of(state: SweepState, slurm: str, width: int) -> Group:
    """The headline, the best so far, the last that ended, and what is under way, for rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows: list[tuple[str, Any]] = []
    for each in state.ended[-_LAST_SHOWN:]:
        style = "" if each.result.status is Status.OK else "yellow"
        rows.append((each.name, Text(describe_result(each.result), style=style)))
    shown = state.under_way[:_MOST_UNDER_WAY]
    rows += [(name, Text("under way", style="dim")) for name in shown]
    longest = max((len(name) for name, _ in rows), default=0)
    room = min(longest, max(24, width * 45 // 100))
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    for short, (_, told) in zip(told_apart([name for name, _ in rows], room), rows, strict=True):
        told.truncate(width - room - _GAP, overflow="ellipsis")
        table.add_row(Text(short, style=told.style), told)
    lines: list[Any] = [Text(headline(state, slurm), style="bold", overflow="ellipsis", no_wrap=True)]
    if best := best_words(state, width):
        lines.append(Text(best, style="green"))
    more = len(state.under_way) - len(shown)
    return Group(*lines, table, *([Text(f"and {more} more under way", style="dim")] if more else []))
