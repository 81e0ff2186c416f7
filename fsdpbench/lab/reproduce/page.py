"""The offline page: one section a figure, with chart, claims, assumptions and the trace that explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.engine.results.provenance import versions
from fsdpbench.lab.reproduce.charts import chart_of, number
from fsdpbench.lab.reproduce.claims import LEAST_LEVEL, LEAST_RATIO, PART_OF_EFFECT, Kind
from fsdpbench.lab.reproduce.outcome import Judged, Outcome, Verdict, counted
from fsdpbench.lab.reproduce.traced import TracedRun, facts_table, told
from fsdpbench.reports.pages import shell
from fsdpbench.reports.pages.display import NOTHING, percent
from fsdpbench.reports.pages.whole_run import Chart, Table

_SCRIPTS = (f"{shell.ASSETS}/theme.js", f"{shell.ASSETS}/timeline.js", "lab/reproduce/page.js")


@dataclass(frozen=True)
class _Contrast:
    """One contrast on the page."""

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
    def holding(self) -> int:
        return _count(self.outcome.claims, Verdict.HOLDS)

    @property
    def tests(self) -> int:
        """Claims that test something."""
        return len(self.outcome.claims) - _count(self.outcome.claims, Verdict.TAKEN)


def write_page(
    path: Path,
    publication: str,
    outcomes: Sequence[Outcome],
    traced: Sequence[Sequence[Sequence[TracedRun]]],
    seconds: float,
) -> None:
    """Write the page, with the `traced` runs of each figure; scripts are inside, nothing is loaded."""
    sections = [_section(publication, outcome, runs) for outcome, runs in zip(outcomes, traced, strict=True)]
    shell.write_page(
        path,
        "lab/reproduce/page.html.jinja",
        scripts=_SCRIPTS,
        publication=publication,
        sections=sections,
        summary=_summary(sections),
        holding=sum(section.holding for section in sections),
        tests=sum(section.tests for section in sections),
        directions=sum(
            claim.same_direction
            for outcome in outcomes
            for claim in outcome.claims
            if claim.verdict is not Verdict.TAKEN
        ),
        counts=counted(outcomes),
        verdicts=Verdict,
        not_holding=_not_holding(sections),
        rule=_RULE,
        versions=versions(),
        seconds=seconds,
    )


def _section(publication: str, outcome: Outcome, traced: Sequence[Sequence[TracedRun]]) -> _Section:
    contrasts = [
        _Contrast(why, told(runs), facts_table(runs) if runs else None, runs)
        for why, runs in zip(outcome.figure.words.why, traced, strict=True)
    ]
    return _Section(
        outcome,
        chart_of(outcome),
        Table(_COLUMNS, tuple(map(_row, outcome.claims))) if outcome.claims else None,
        _variants(outcome) if outcome.tried else None,
        contrasts,
        f"fsdpbench reproduce {publication} --only {outcome.figure.name}",
    )


_RULE = (
    "One rule makes all bounds, from the published values alone. A ratio of two published values may be off "
    f"by {PART_OF_EFFECT:.0%} of the published effect (on a logarithmic scale, both ways), by "
    f"{LEAST_RATIO:.0%}, or by what reading the values off the image leaves open, whichever is largest. A "
    f"single value may be off by {LEAST_LEVEL:.0%} or by its reading. Runs out of memory must be as many. "
    "There must be no retries where none were published, and some where some were. Where settings are not "
    "published, a claim holds only if it holds under all plausible ones that were simulated."
)
_COLUMNS = ("claim", "bounds", "published", "simulated", "under other settings", "verdict")


def _not_holding(sections: Sequence[_Section]) -> Table:
    """The claims that do not hold, first those that hold under no plausible settings."""
    rows = [
        (section.name, *_row(claim))
        for verdict in (Verdict.FAILS, Verdict.DEPENDS, Verdict.UNKNOWN, Verdict.TAKEN)
        for section in sections
        for claim in section.outcome.claims
        if claim.verdict is verdict
    ]
    return Table(("figure", *_COLUMNS), tuple(rows))


def _row(each: Judged) -> tuple[str, ...]:
    kind, others = each.claim.kind, each.others
    span = (min(others), max(others)) if others else ()
    return (
        each.claim.words,
        _bounds(each),
        _value(each.published, kind),
        _value(each.simulated, kind),
        " to ".join(dict.fromkeys(_value(value, kind) for value in span)),
        f"{each.verdict.value}: {each.claim.taken}" if each.claim.taken else each.verdict.value,
    )


def _bounds(each: Judged) -> str:
    low, high, kind = each.bounds.low, each.bounds.high, each.claim.kind
    if math.isinf(high):
        return f"at least {low:g}"
    return f"{low:g}" if low == high else f"{_value(low, kind)} to {_value(high, kind)}"


def _count(claims: Sequence[Judged], verdict: Verdict) -> int:
    return sum(each.verdict is verdict for each in claims)


def _value(value: float | None, kind: Kind) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if kind is Kind.RATIO else number(value) if kind is Kind.LEVEL else f"{value:g}"


def _variants(outcome: Outcome) -> Table:
    rows = tuple(
        (
            each.variant.words,
            each.variant.contradicts,
            str(len(each.values)),
            percent(each.mean_error, 0),
            percent(outcome.mean_error_of(each), 0),
            str(sum(value is None for value in each.values.values())) if None in each.values.values() else "",
        )
        for each in outcome.tried
    )
    columns = (
        "other settings",
        "what is stated",
        "points",
        "mean error with them",
        "as assumed",
        "without a value",
    )
    return Table(columns, rows)


def _summary(sections: Sequence[_Section]) -> Table:
    rows = tuple(
        (
            section.name,
            section.outcome.figure.words.title,
            str(len(section.outcome.points)),
            f"{section.holding} of {section.tests}" if section.outcome.claims else "",
            percent(section.outcome.mean_error),
            _range_of(section.outcome.mean_errors),
            percent(section.outcome.worst_error),
            "" if not section.outcome.points else "not in full" if section.outcome.figure.is_open else "yes",
        )
        for section in sections
    )
    columns = (
        *("figure", "of", "points", "claims that hold", "mean error", "under other settings", "worst"),
        "settings published",
    )
    return Table(columns, rows)


def _range_of(errors: Sequence[float]) -> str:
    """Mean errors under all plausible settings."""
    return f"{percent(min(errors), 0)} to {percent(max(errors), 0)}" if len(errors) > 1 else ""
