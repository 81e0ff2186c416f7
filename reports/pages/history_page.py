"""The page of a history (as `check --history --json` prints it): figures over commits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.shell import ASSETS, write_page
from fsdpbench.reports.pages.whole_run import Chart, Table, axis, chart_text, scatter

_COLOURS = ("--compute", "--gather", "--reduce", "--allreduce", "--exposed", "--copy")
_WORDS = {frozenset([True]): "worse", frozenset([False]): "better", frozenset([None]): "changed"}
MOST_LINES = 24


class Commit(msgspec.Struct, frozen=True):
    """A point of the history; `revision` is None for uncommitted figures."""

    revision: str | None
    date: str
    subject: str


class Series(msgspec.Struct, frozen=True):
    """One figure of one configuration at each commit; None at commits that lack it."""

    configuration: str
    metric: str
    values: list[float | None]
    unit: str


class Step(msgspec.Struct, frozen=True):
    """A figure with a new level from a commit on. `change`: relative; None if the figure was 0. `worse`: None
    if the figure has no better side, or did not move."""

    revision: str | None
    configuration: str
    metric: str
    before: float
    after: float
    change: float | None
    worse: bool | None


class History(msgspec.Struct, frozen=True):
    """The history of the baseline at a path, the oldest commit first. `notes`: what is left out, and why."""

    schema: int
    baseline: str
    commits: list[Commit]
    series: list[Series]
    steps: list[Step]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of one figure at one commit. changes: the smallest and largest relative change; None if a figure
    was 0. word: `worse`, `better`, `mixed` or `changed`."""

    revision: str | None
    date: str
    subject: str
    metric: str
    configurations: int
    changes: tuple[float, float] | None
    word: str

    @property
    def change_words(self) -> str:
        if self.changes is None:
            return "from or to 0"
        low, high = map(_percent, self.changes)
        return low if low == high else f"{low} to {high}"


def step_groups(history: History) -> list[StepGroup]:
    """Return the steps by commit and figure, newest first."""
    groups: dict[tuple[str | None, str], list[Step]] = {}
    for step in history.steps:
        groups.setdefault((step.revision, step.metric), []).append(step)
    commits = {commit.revision: commit for commit in history.commits}
    order = {commit.revision: place for place, commit in enumerate(history.commits)}
    found = [
        StepGroup(
            revision,
            commits[revision].date,
            commits[revision].subject,
            metric,
            len(steps),
            _range([step.change for step in steps]),
            _WORDS.get(frozenset(step.worse for step in steps), "mixed"),
        )
        for (revision, metric), steps in groups.items()
    ]
    return sorted(found, key=lambda group: -order[group.revision])


def write_history_page(history: History, target: Path) -> Path:
    """Write the page, a chart for each figure with a step, to `target` atomically. Raises `OSError`."""
    groups = step_groups(history)
    stepped = {step.metric for step in history.steps}
    metrics = dict.fromkeys(each.metric for each in history.series)
    return write_page(
        target,
        f"{ASSETS}/history.html.jinja",
        title=f"History of {Path(history.baseline).name}",
        history=history,
        groups=groups,
        worse=[step.worse for step in history.steps],
        label=_label,
        charts=[_chart(history, metric) for metric in metrics if metric in stepped],
        table=_table(groups),
        notes=history.notes,
    )


def _percent(change: float) -> str:
    """Return a change with enough digits that it does not read as 0."""
    if abs(change) >= 5e-4:
        return display.signed_percent(change)
    return f"{'−' if change < 0 else '+'}{abs(change) * 100:.2g} %"


def _range(changes: Sequence[float | None]) -> tuple[float, float] | None:
    known = [change for change in changes if change is not None]
    return (min(known), max(known)) if len(known) == len(changes) else None


def _label(revision: str | None) -> str:
    return revision[:9] if revision else "now"


def _chart(history: History, metric: str) -> Chart:
    commits = history.commits
    series = [each for each in history.series if each.metric == metric][:MOST_LINES]
    relative = all(_first(each.values) for each in series)
    steps = {(step.configuration, step.revision) for step in history.steps if step.metric == metric}
    data = []
    for number, each in enumerate(series):
        marks = [11 if (each.configuration, commit.revision) in steps else 4 for commit in commits]
        data.append(_line(each, relative, marks, _COLOURS[number % len(_COLOURS)]))
    every = max(1, len(commits) // 12)
    places = list(range(0, len(commits), every))
    unit = "change since the first, %" if relative else series[0].unit
    ticks = {"tickvals": places, "ticktext": [_label(commits[p].revision) for p in places]}
    layout = {
        "height": 300,
        "showlegend": len(series) <= 6,
        "xaxis": {"tickmode": "array", **ticks},
        "yaxis": axis(unit, zeroline=relative),
    }
    rows = tuple(
        (each.configuration, *(display.NOTHING if v is None else f"{v:.6g}" for v in each.values))
        for each in series
    )
    table = Table(("configuration", *(_label(commit.revision) for commit in commits)), rows)
    narrow = {"showlegend": False, "xaxis": {"tickvals": places[:: max(1, len(places) // 3)]}}
    summary = f"Lines of {metric} over commits; larger marks where a new level begins."
    return Chart(metric.replace("_", "-"), summary, data, layout, table, narrow)


def _line(each: Series, relative: bool, marks: Sequence[int], colour: str) -> dict[str, object]:
    values, base = each.values, _first(each.values) or 1.0
    shown = [None if v is None else 100 * (v / base - 1) if relative else v for v in values]
    known = [display.NOTHING if v is None else f"{v:.6g} {each.unit}" for v in values]
    return scatter(
        "lines+markers",
        chart_text(each.configuration, 40),
        list(range(len(marks))),
        shown,
        line={"color": f"var({colour})", "width": 1.5, "shape": "hv"},
        marker={"size": marks},
        customdata=known,
        hovertemplate="%{customdata}<br>" + chart_text(each.configuration, 70) + "<extra></extra>",
    )


def _first(values: Sequence[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _table(groups: Sequence[StepGroup]) -> Table | None:
    columns = ("commit", "date", "subject", "figure", "configurations", "change", "for the")
    rows = (
        (_label(g.revision), g.date, g.subject[:90], g.metric, str(g.configurations), g.change_words, g.word)
        for g in groups
    )
    return Table.of(columns, rows)
