"""The offline page: one section a figure, with chart, claims, assumptions and the trace that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fsdpbench.files.whole_files import write_whole
from fsdpbench.reports.page.charts.whole_run import Chart, Table
from fsdpbench.reports.page.display import percent
from fsdpbench.reports.page.offline import island, own_file, policy
from fsdpbench.reproduce.charts import chart_of, number
from fsdpbench.reproduce.outcome import Judged, Outcome
from fsdpbench.reproduce.traced import TracedRun, facts_table, told
from fsdpbench.results.provenance import versions

_PARTS_OF_REPORT = ("theme.js", "timeline.js")


@dataclass(frozen=True)
class _Contrast:
    """What one contrast shows on the page."""

    why: str
    found: str
    table: Table | None
    runs: Sequence[TracedRun]


@dataclass(frozen=True)
class _Section:
    """One figure on the page."""

    outcome: Outcome
    chart: Chart | None
    claims: Table | None
    variants: Table | None
    contrasts: Sequence[_Contrast]
    command: str

    @property
    def name(self) -> str:
        return self.outcome.figure.name

    @property
    def same(self) -> int:
        return sum(each.same is True for each in self.outcome.claims)


def write_page(
    path: Path,
    publication: str,
    outcomes: Sequence[Outcome],
    traced: Sequence[Sequence[Sequence[TracedRun]]],
    seconds: float,
) -> None:
    """Write the page; scripts and styles are inside, nothing is loaded."""
    plotly = Markup(get_plotlyjs())
    script = Markup(
        "\n".join([*(own_file(f"page/assets/{name}") for name in _PARTS_OF_REPORT), _own("page.js")])
    )
    sections = [_section(publication, outcome, runs) for outcome, runs in zip(outcomes, traced, strict=True)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(_own("page.html.jinja")).render(
        publication=publication,
        policy=policy(plotly, script),
        css=Markup(own_file("page/assets/report.css")),
        plotly=plotly,
        script=script,
        island=island,
        sections=sections,
        summary=_summary(sections),
        same=sum(section.same for section in sections),
        claims=sum(len(section.outcome.claims) for section in sections),
        versions=versions(),
        seconds=seconds,
    )
    write_whole(path, text)


def _own(name: str) -> str:
    return resources.files("fsdpbench.reproduce").joinpath(name).read_text(encoding="utf-8")


def _section(publication: str, outcome: Outcome, traced: Sequence[Sequence[TracedRun]]) -> _Section:
    contrasts = [
        _Contrast(why, told(runs), facts_table(runs) if runs else None, runs)
        for why, runs in zip(outcome.figure.words.why, traced, strict=True)
    ]
    return _Section(
        outcome,
        chart_of(outcome),
        _claims(outcome.claims) if outcome.claims else None,
        _variants(outcome) if outcome.tried else None,
        contrasts,
        f"fsdpbench reproduce {publication} --only {outcome.figure.name}",
    )


def _claims(claims: Sequence[Judged]) -> Table:
    rows = tuple(
        (
            each.claim.words,
            _bound(each),
            _value(each.published, each.claim.unit),
            _value(each.simulated, each.claim.unit),
            {True: "the same", False: "not the same", None: "not known"}[each.same],
        )
        for each in claims
    )
    return Table(("what the figure says", "as", "published", "simulated", "verdict"), rows)


def _bound(each: Judged) -> str:
    unit = each.claim.unit
    if each.claim.least is not None:
        return f"at least {_plain(each.claim.least)} {unit}".strip()
    return f"at most {_plain(each.claim.most)} {unit}".strip()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:.3f} {unit}" if unit == "x" else f"{value:g}" if not unit else f"{number(value)} {unit}"


def _variants(outcome: Outcome) -> Table:
    rows = tuple(
        (
            each.words,
            str(len(each.values)),
            percent(each.mean_error, 0),
            percent(outcome.mean_error_of(each), 0),
            str(sum(value is None for value in each.values.values())) if None in each.values.values() else "",
        )
        for each in outcome.tried
    )
    columns = ("other settings", "points", "mean error with them", "as assumed", "without a value")
    return Table(columns, rows)


def _summary(sections: Sequence[_Section]) -> Table:
    rows = tuple(
        (
            section.name,
            section.outcome.figure.words.title,
            str(len(section.outcome.points)),
            percent(section.outcome.mean_error),
            percent(section.outcome.worst_error),
            f"{section.same} of {len(section.outcome.claims)}" if section.outcome.claims else "",
            "" if not section.outcome.points else "not in full" if section.outcome.figure.is_open else "yes",
        )
        for section in sections
    )
    columns = ("figure", "of", "points", "mean error", "worst", "claims reproduced", "settings published")
    return Table(columns, rows)
