"""The page of several run folders: the best of each, its step, and the configurations that they share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fsdpbench.reports.figures import FIGURES
from fsdpbench.reports.pages import display, ranking
from fsdpbench.reports.pages.display import setting
from fsdpbench.reports.pages.html import simulated_words
from fsdpbench.reports.pages.recommendation import plus_minus
from fsdpbench.reports.pages.shell import ASSETS, write_page
from fsdpbench.reports.pages.view import RunView, Status, load_run
from fsdpbench.reports.pages.whole_run import Chart, Table, breakdown

MOST_SHARED = 60


def write_runs_page(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of at least two run folders to `target`, whole or not at all.

    Raises:
        RunFolderError: one of them is not a run folder.
        OSError: `target` cannot be written.
    """
    views = [load_run(folder) for folder in folders]
    names = _names(views)
    runs = [ranking.rank(view) for view in views]
    metrics = {ranking.metric_of(view) for view in views if view.with_status(Status.OK)} or {
        ranking.metric_of(views[0])
    }
    metric = metrics.pop() if len(metrics) == 1 else None
    shared = shared_configurations(runs) if metric else []
    varying = ranking.varying_settings([entry.row for ranked in runs for entry in ranked])
    return write_page(
        target,
        f"{ASSETS}/runs.html.jinja",
        title=" and ".join(names) if len(names) < 4 else f"{len(names)} runs",
        simulated=simulated_words([entry.row for ranked in runs for entry in ranked]),
        sentences=_sentences(names, runs, metric, shared),
        table=_runs_table(names, views, runs, varying),
        chart=_chart(runs, varying, metric),
        shared=_shared_table(names, shared, varying, metric),
        left_out=max(0, len(shared) - MOST_SHARED),
    )


def _names(views: Sequence[RunView]) -> list[str]:
    """Return the folders' names, with the parents' names if some are equal."""
    titles = [view.title for view in views]
    if len(set(titles)) == len(titles):
        return titles
    return [f"{view.folder.resolve().parent.name}/{view.title}" for view in views]


def _sentences(
    names: Sequence[str],
    runs: Sequence[Sequence[ranking.Ranked]],
    metric: ranking.Metric | None,
    shared: "Sequence[Shared]",
) -> list[str]:
    if metric is None:
        return ["The runs count different things (tokens, samples): their throughputs are not compared."]
    sentences = []
    first = runs[0][0].throughput if runs[0] else None
    for number, (name, ranked) in enumerate(zip(names[1:], runs[1:], strict=True), start=1):
        best = ranked[0].throughput if ranked else None
        if not first or not best:
            sentences.append(f"{name if first else names[0]} has no configuration that finished.")
            continue
        words = f"The best of {name} gives {display.signed_percent(best / first - 1)} over that of {names[0]}"
        mean = mean_ratio(shared, number)
        if mean is None:
            sentences.append(f"{words}; they share no configuration that finished.")
            continue
        ratio, low, high, count = mean
        spread = f" ({display.signed_percent(low - 1)} to {display.signed_percent(high - 1)})" * (low != high)
        sentences.append(
            f"{words}; with equal settings {display.signed_percent(ratio - 1)}{spread} over {count}."
        )
    return sentences


def _runs_table(
    names: Sequence[str],
    views: Sequence[RunView],
    runs: Sequence[Sequence[ranking.Ranked]],
    varying: Sequence[str],
) -> Table:
    shown = [ranking.column_of(figure, "GPU") for figure in FIGURES if figure.weight]
    rows = []
    for number, (name, view, ranked) in enumerate(zip(names, views, runs, strict=True), start=1):
        best = ranked[0] if ranked and ranked[0].throughput else None
        finished = sum(entry.throughput is not None for entry in ranked)
        done = f"{finished} of {len(view.configurations)}"
        cells = [display.NOTHING] * (3 + len(shown))
        if best is not None:
            interval = best.row.result.interval
            cells = [
                ranking.label(best.row, varying),
                display.number(best.throughput, 4),
                plus_minus(interval, best.row.result.step_time_s) if interval else display.NOTHING,
                *(figure.text(figure.value(best.row)) for figure in shown),
            ]
        rows.append((str(number), name, done, *cells))
    columns = ("#", "run", "finished", "best", "throughput", "90 %", *(figure.name for figure in shown))
    return Table(columns, tuple(rows))


def _chart(
    runs: Sequence[Sequence[ranking.Ranked]], varying: Sequence[str], metric: ranking.Metric | None
) -> Chart | None:
    """Return a chart of the best step of each run, numbered as in the table."""
    best = [
        replace(ranked[0], place=number)
        for number, ranked in enumerate(runs, start=1)
        if ranked and ranked[0].throughput
    ]
    chart = breakdown(best, varying, metric) if metric is not None else None
    return None if chart is None else replace(chart, name="steps")


def _shared_table(
    names: Sequence[str], shared: "Sequence[Shared]", varying: Sequence[str], metric: ranking.Metric | None
) -> Table | None:
    if not shared or metric is None:
        return None
    rows = []
    for each in shared[:MOST_SHARED]:
        speeds = [
            display.NOTHING
            if entry is None
            else display.number(entry.throughput, 4)
            if entry.throughput
            else entry.row.status.words
            for entry in each.entries
        ]
        changes = [
            display.NOTHING if (ratio := each.ratio(number)) is None else display.signed_percent(ratio - 1)
            for number in range(1, len(names))
        ]
        rows.append((ranking.label(each.known.row, varying), *speeds, *changes))
    columns = ("configuration", *(f"{name}, {metric.words}" for name in names))
    return Table((*columns, *(f"{name} against {names[0]}" for name in names[1:])), tuple(rows))


_OF_THE_RUN = frozenset({"device", "hardware", "gpus", "gpus_per_node", "gpus_used_per_node", "software"})
"""Settings that may differ between compared runs: where they ran, not what."""


@dataclass(frozen=True)
class Shared:
    """One configuration that at least two runs have. entries: by run, None for a run that lacks it."""

    entries: tuple[ranking.Ranked | None, ...]

    @property
    def known(self) -> ranking.Ranked:
        """Return any of the entries, for its name."""
        return next(entry for entry in self.entries if entry is not None)

    def ratio(self, number: int) -> float | None:
        """Return the throughput of run `number` over that of the first run; None if one has none."""
        first, other = self.entries[0], self.entries[number]
        if first is None or other is None or not first.throughput or not other.throughput:
            return None
        return other.throughput / first.throughput


def shared_configurations(runs: Sequence[Sequence[ranking.Ranked]]) -> "list[Shared]":
    """Return configurations with equal settings, those with the largest change from the first run first."""
    by_settings: dict[tuple[tuple[str, str], ...], list[ranking.Ranked | None]] = {}
    for number, ranked in enumerate(runs):
        for entry in ranked:
            settings = entry.row.settings.items()
            key = tuple(sorted((name, setting(value)) for name, value in settings if name not in _OF_THE_RUN))
            by_settings.setdefault(key, [None] * len(runs))[number] = entry
    found = [Shared(tuple(each)) for each in by_settings.values() if sum(map(bool, each)) > 1]
    return sorted(found, key=_by_change)


def _by_change(shared: "Shared") -> tuple[float, str]:
    ratios = [ratio for number in range(1, len(shared.entries)) if (ratio := shared.ratio(number))]
    return -max((abs(math.log(ratio)) for ratio in ratios), default=0.0), shared.known.row.name


def mean_ratio(shared: "Sequence[Shared]", number: int) -> tuple[float, float, float, int] | None:
    """Return the geometric mean, least and greatest ratio of run `number` to the first, and their count."""
    ratios = [ratio for each in shared if (ratio := each.ratio(number))]
    if not ratios:
        return None
    return math.exp(fmean(map(math.log, ratios))), min(ratios), max(ratios), len(ratios)
