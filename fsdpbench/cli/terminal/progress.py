"""Progress of a sweep on stderr: a live table in a terminal, otherwise a line per event."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.reading import one_line
from fsdpbench.cli.output import make_console, tell
from fsdpbench.cli.terminal.units import best_words, compiled_words, each, headline, plus_minus, words_of
from fsdpbench.engine.results.residuals.widths import Unknown
from fsdpbench.launch.pool import PointState
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.trials import Progress

_FAILED = (Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.RANK_MISMATCH)
_LAST_SHOWN = 8
_PATIENCE_S = 10.0
_GAP = 2
"""Columns between a name and its figures."""


def make_progress() -> Progress:
    """Return a live table for a terminal, lines for a file or a pipe."""
    console = make_console(stderr=True)
    return LiveProgress(console) if console.is_terminal else PlainProgress()


def describe_result(result: Result) -> str:
    """Return one line on the result of a configuration: its figures, or its status and cause."""
    if result.status is not Status.OK:
        cause = result.message or ""
        if result.status is Status.OOM:
            # Torch's message has many sentences; the first two name the requested size.
            cause = ". ".join(cause.split(". ")[:2])
        text = f"{result.status}: {one_line(cause)}" if cause else str(result.status)
        return f"{text}; measured before: {_figures(result)}" if result.step_time_s else text
    return _figures(result)


def _figures(result: Result) -> str:
    step = result.step_time_s or 0.0
    parts = [f"{step * 1e3:,.1f} ms a step{plus_minus(result.interval, step)}{_unmeasured(result)}"]
    if result.tokens_per_s_per_gpu:
        parts.append(f"{result.tokens_per_s_per_gpu:,.0f} tokens/s/{each(result.device)}")
    if result.overlap_fraction is not None:
        parts.append(f"{result.overlap_fraction:.0%} of communication hidden")
    if result.compiled is not None:
        parts.append(compiled_words([result.compiled]))
    if retries := result.alloc_retries_per_step:
        parts.append(f"{retries:g} allocator {'retry' if retries == 1 else 'retries'} a step")
        parts += _sampled(result)
    if unread := result.unread_settings:
        parts.append(f"no effect: the system never read {', '.join(unread)}")
    return ", ".join(parts)


def _unmeasured(result: Result) -> str:
    """Return the interval and the command that narrows it, if network or links were not measured."""
    interval = result.interval
    because = [] if interval is None else interval.because
    named = next((each.value for each in (Unknown.UNMEASURED, Unknown.PCIE) if each.value in because), None)
    if interval is None or named is None:
        return ""
    low, high = (f"{1e3 * end:,.0f}" for end in interval.step_time_s)
    return f" ({low} to {high} ms: {named})"


def _sampled(result: Result) -> list[str]:
    """Return the range of the step times behind the median; nothing for a single step."""
    times = result.step_times_s
    if len(times) < 2:
        return []
    return [
        f"not stable: median of {len(times)} steps, {min(times) * 1e3:,.1f} to {max(times) * 1e3:,.1f} ms"
    ]


class WaitingProgress(Progress):
    """Progress of one configuration with a time limit in seconds: a changing line in a terminal, otherwise a
    line after 10 s, 20 s, 40 s and so on."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._began = self._asked = time.monotonic()
        self._next_s = _PATIENCE_S
        self._over = self._waits = False

    def begin(self, total: int, already_done: int) -> None:
        self._began = self._asked = time.monotonic()

    def tick(self, states: Callable[[], list[PointState]]) -> None:
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._asked < (1.0 if is_terminal else _PATIENCE_S):
            return
        self._asked = now
        for state in states():
            news = bool(state.waits) and not self._waits
            self._waits = bool(state.waits)
            if not (is_terminal or news or now - self._began >= self._next_s):
                continue
            self._next_s = max(self._next_s, 2 * (now - self._began))
            used = f"{now - self._began:.0f} s, {state.processor_s:.0f} s of them on processors"
            words = f"{state.steps or 'no step yet'} after {used} (--timeout {self._timeout:g})"
            words = f"{words}; {state.waits}" if state.waits else words
            tell(words, end="" if is_terminal else "\n", over=is_terminal)
            self._over = is_terminal

    def end(self) -> None:
        if self._over:
            tell("")


class PlainProgress(Progress):
    """Prints one line per event, for logs."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0

    def begin(self, total: int, already_done: int) -> None:
        self._total, self._done = total, already_done
        if already_done:
            tell(f"{already_done} of {total} configurations are done already")

    def finished(self, config: Config, result: Result) -> None:
        self._done += 1
        tell(f"[{_of(self._done, self._total)}] {words_of(config)}: {describe_result(result)}")


class LiveProgress(Progress):
    """Redraws a table: running configurations, the last that ended, the best so far, the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._running: dict[str, float] = {}
        self._ended: list[tuple[str, Result]] = []
        self._total = 0
        self._before = 0
        self._began = time.monotonic()

    def begin(self, total: int, already_done: int) -> None:
        self._total, self._before, self._began = total, already_done, time.monotonic()
        self._live = Live(self._view(), console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def started(self, config: Config) -> None:
        self._running[words_of(config)] = time.monotonic()
        self.tick()

    def finished(self, config: Config, result: Result) -> None:
        self._running.pop(words_of(config), None)
        self._ended.append((words_of(config), result))
        self.tick()

    def tick(self, states: Callable[[], list[PointState]] = list) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        rows = [(name, described(result)) for name, result in self._ended[-_LAST_SHOWN:]]
        for name, since in self._running.items():
            rows.append((name, Text(f"running {time.monotonic() - since:.0f} s", style="dim")))
        done, left = self._before + len(self._ended), None
        if self._ended and done < self._total:
            left = (time.monotonic() - self._began) / len(self._ended) * (self._total - done)
        failed = sum(result.status in _FAILED for _, result in self._ended)
        racing = sum(result.status is Status.RACE for _, result in self._ended)
        head = headline(_of(done, self._total), failed, left, racing)
        return live_view(head, self._ended, rows, self._console.width)


def live_view(
    head: str, ended: Iterable[tuple[str, Result]], rows: Sequence[tuple[str, Text]], width: int
) -> Group:
    """Return the headline, the best of `ended`, and a table of `rows`, `width` columns wide."""
    lines = [Text(head, style="bold", overflow="ellipsis", no_wrap=True)]
    if best := best_words(ended, width):
        lines.append(Text(best, style="green"))
    return Group(*lines, result_table(rows, width))


def described(result: Result) -> Text:
    """Return the line on a result, coloured unless its status is ok."""
    return Text(describe_result(result), style="" if result.status is Status.OK else "yellow")


def result_table(rows: Sequence[tuple[str, Text]], width: int) -> Table:
    """Return a table of names and lines, one row each, `width` columns wide."""
    # In a narrow terminal the figures are cut, because the end of a name distinguishes it from others.
    longest = max((len(name) for name, _ in rows), default=0)
    room = min(longest, max(24, width * 45 // 100))
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    for name, cell in rows:
        cell.truncate(width - room - _GAP, overflow="ellipsis")
        short = name if len(name) <= room else f"{name[: room - 1]}…"
        table.add_row(Text(short, style=cell.style), cell)
    return table


def _of(done: int, total: int) -> str:
    """Return `3/8`, or `3` if the total is unknown."""
    return f"{done}/{total}" if total else str(done)
