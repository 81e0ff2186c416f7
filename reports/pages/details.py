"""Details of one configuration: its timeline, memory, units, phases, settings, files, and findings about its
run: races, differences between ranks, decisions of scripts.

All charts come from the trace of the lowest rank that has one. If that trace cannot be read, the page shows
the error instead of the charts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath

from fsdpbench.reports.analysis import analyze_trace
from fsdpbench.reports.analysis.model import Verdict
from fsdpbench.reports.analysis.processes import Kept, interruptions_held, part_of, suitable_processes, unpack
from fsdpbench.reports.figures import FIGURES
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.memory_charts import soak_chart
from fsdpbench.reports.pages.ranking import Ranked, column_of, short_label
from fsdpbench.reports.pages.trace_parts import held_by_phase, ranks_table, trace_parts
from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.pages.whole_run import Table, island_table
from fsdpbench.reports.readers import TraceError, read_trace
from fsdpbench.reports.result import RaceFinding, RankDifference, Result

Links = Callable[[Configuration], list[dict[str, str]]]

Drawn = tuple[Verdict | None, Mapping[str, int], dict[str, object]]
"""Results from a trace: its verdict, bytes alive at the peak by phase, the content to draw."""

Known = dict[tuple[str, int, int, int], Drawn]
"""Traces that are already drawn, by path, modification time, number of traces and events allowed."""

Workers = Callable[[int], AbstractContextManager[Executor]]
"""Opens a pool of this many processes that draw beside this one."""

# Limits on the timelines of the page, in events of about 25 bytes: for all together, and for each.
_EVENTS_IN_ALL = 180_000
_MOST_EVENTS = 6_000
_MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Detail:
    """One configuration's part of the page. `content`: plain JSON values, which the page's script draws.
    `held`: bytes alive at the peak of its trace, by the phase that allocated them."""

    folder: str
    place: int | None
    words: str
    content: dict[str, object]
    verdict: Verdict | None = None
    held: Mapping[str, int] = field(default_factory=dict)


def build_details(
    ranked: Sequence[Ranked],
    varying: Sequence[str],
    links: Links,
    known: Known | None = None,
    workers: Workers | None = None,
    kept: Kept | None = None,
) -> list[Detail]:
    """Return a detail for every configuration, in the order of the ranking. `known`: drawn for an earlier
    page; `workers`: processes to draw with; `kept`: traces that are already analyzed."""
    traced = [entry.row for entry in ranked if entry.row.traces]
    most = min(_MOST_EVENTS, _EVENTS_IN_ALL // max(1, len(traced)))
    drawn = {} if known is None else known
    if workers is not None:
        _draw_beside(workers, traced, most, drawn, kept or {})
    return [_detail(entry, varying, links, most, drawn, kept or {}) for entry in ranked]


def _detail(
    entry: Ranked, varying: Sequence[str], links: Links, most: int, known: Known, kept: Kept
) -> Detail:
    row = entry.row
    words = (
        f"{entry.place}. {short_label(row, varying)}"
        if entry.place
        else f"{short_label(row, varying)} ({row.status.words})"
    )
    content = {
        "problem": row.problem,
        "warnings": [],
        "verdict": [],
        "retries": [],
        **dict.fromkeys(("timeline", "memory", "memory_note", "held", "held_by_unit", "ranks")),
        **dict.fromkeys(("units", "phases", "idle", "communication")),
        **_soak(row),
        "settings": [[name, display.setting(value)[:2000]] for name, value in row.settings.items()],
        "results": _results(entry),
        "links": links(row),
    }
    verdict: Verdict | None = None
    held: Mapping[str, int] = {}
    if row.traces:
        try:
            verdict, held, drawn = _drawn(row, most, known, kept)
            content |= drawn
        except TraceError as error:
            content["warnings"] = [f"{error.path.name} is not shown: {error.reason}"]
    return Detail(row.folder.name, entry.place, words[:160], content, verdict, held)


def _drawn(row: Configuration, most: int, known: Known, kept: Kept) -> Drawn:
    """Return the trace's verdict, and the parts that need the trace, including the comparison with the traces
    of other ranks. Raises `TraceError`."""
    path = row.traces[0]
    try:
        key = str(path), path.stat().st_mtime_ns, len(row.traces), most
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})") from None
    if key not in known:
        found = unpack(path, kept)
        if found is None:
            trace = read_trace(path)
            found = trace, analyze_trace(trace)
        trace, analysis = found
        ranks = ranks_table(analysis, row.traces[1:])
        judged = {"lead": ranks[0], "table": island_table(ranks[1])} if ranks else None
        content = trace_parts(trace, analysis, row.capacity_bytes, most) | {"ranks": judged}
        known[key] = analysis.verdict, held_by_phase(analysis.memory), content
    return known[key]


def _draw_beside(
    workers: Workers, rows: Sequence[Configuration], most: int, known: Known, kept: Kept
) -> None:
    """Add to `known` what other processes draw. This process draws what is missing, and reports errors."""
    processes = suitable_processes([row.traces[0] for row in rows])
    if processes == 1:
        return
    try:
        with workers(processes) as pool:
            with interruptions_held():
                parts = [part_of(row.traces[0], kept) for row in rows]
                found = pool.map(partial(_drawn_there, most=most), rows, parts)
            for drawn in found:
                known.update(drawn)
    except BrokenProcessPool:
        return


def _drawn_there(row: Configuration, kept: Kept, most: int) -> Known:
    drawn: Known = {}
    with suppress(TraceError, MemoryError):
        _drawn(row, most, drawn, kept)
    return drawn


def _soak(row: Configuration) -> dict[str, object]:
    """Return memory over steps, which replaces the memory of a trace: a soak has no trace."""
    soak = row.result.soak
    chart = None if soak is None else soak_chart(soak, row.capacity_bytes)
    if chart is None:
        return {}
    return {
        "memory": chart.figure(),
        "memory_table": island_table(chart.table),
        "memory_words": chart.summary,
    }


def _results(entry: Ranked) -> list[list[str]]:
    """Return every figure of the result, as text."""
    row = entry.row
    each = "rank" if row.device == "cpu" else "GPU"
    shown = [column_of(figure, each) for figure in FIGURES if figure.column or figure.detail]
    pairs = [("status", row.status.words), *((each.name, each.text(each.value(row))) for each in shown)]
    pairs += _sampling(row.result)
    if row.result.loss:
        known = [value for value in row.result.loss if value is not None]
        ends = " → ".join(display.number(known[place], 5) for place in (0, -1)) if known else display.NOTHING
        pairs.append(("loss", ends))
    return [list(pair) for pair in pairs if pair[1] != display.NOTHING]


def _sampling(result: Result) -> list[tuple[str, str]]:
    """Return how the step time was measured, if it was."""
    pairs = []
    if result.repeats and len(result.repeats.step_time_s) > 1:
        times = [display.milliseconds(time) for time in sorted(result.repeats.step_time_s)]
        pairs.append((f"step over {result.repeats.runs} runs", f"{times[0]} to {times[-1]} ms"))
    if result.measured and len(result.measured.step_times_s) > 1:
        samples = result.measured.step_times_s
        ends = [display.milliseconds(time) for time in (min(samples), max(samples))]
        text = f"{len(samples)}, spread {display.percent(result.measured.spread)}, {ends[0]} to {ends[1]} ms"
        if result.alloc_retries_per_step:
            text += ": not stable, the allocator retries"
        pairs.append(("steps in a run", text))
    if result.measured and result.measured.profiler_overhead is not None:
        pairs.append(("profiler's overhead", display.percent(result.measured.profiler_overhead)))
    return pairs


@dataclass(frozen=True, slots=True)
class Races:
    """All findings of a run folder, each with its configuration, and hints."""

    findings: Sequence[tuple[str, RaceFinding]]
    hints: Table | None


def races(rows: Sequence[Configuration]) -> Races | None:
    """Return the sanitizer's findings in all configurations; None if it did not run."""
    reports = [(row.name, row.result.sanitizer) for row in rows if row.result.sanitizer is not None]
    if not reports:
        return None
    found = [(name, finding) for name, report in reports for finding in report.findings]
    found.sort(key=lambda entry: -entry[1].count)
    hints = [
        (
            hint.kind.replace("_", " ")[:60],
            f"{hint.count:,}",
            (hint.stack or ["unknown"])[0][:120],
            hint.hint[:300],
        )
        for _, report in reports
        for hint in report.hints
    ]
    table = Table.of(("kind", "times", "where", "hint"), hints[:_MOST_FINDINGS])
    return Races(found[:_MOST_FINDINGS], table)


def rank_differences(rows: Sequence[Configuration]) -> list[tuple[str, RankDifference]]:
    """Return the configurations whose ranks differ, by name, each with the first difference."""
    checks = ((row.name, row.result.rank_check) for row in rows)
    return [(name, check.difference) for name, check in checks if check and check.difference]


_MOST_ROWS = 200


def decisions_table(rows: Sequence[Configuration]) -> Table | None:
    """Return the decisions of all configurations, most frequent first; None if there are none."""
    found = [(row.name, decision) for row in rows for decision in row.result.placeholder_decisions or ()]
    found.sort(key=lambda entry: -entry[1].count)
    lines = [
        (
            f"{PurePath(decision.file).name[:80]}:{decision.line}",
            decision.operation[:80],
            json.dumps(decision.answer)[:80],
            f"{decision.count:,}",
            name,
        )
        for name, decision in found[:_MOST_ROWS]
    ]
    if len(found) > _MOST_ROWS:
        lines.append((f"{len(found) - _MOST_ROWS} lines more", "", "", "", ""))
    return Table.of(("line of the script", "question", "answer", "times", "configuration"), lines)
