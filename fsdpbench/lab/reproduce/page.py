"""The offline page: one section a figure, with chart, claims, assumptions and the trace that explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fsdpbench.engine.results.provenance import versions
from fsdpbench.lab.reproduce.charts import chart_of, number
from fsdpbench.lab.reproduce.claims import LEAST_LEVEL, LEAST_RATIO, PART_OF_EFFECT, Kind
from fsdpbench.lab.reproduce.outcome import Judged, Outcome, Verdict, counted
from fsdpbench.lab.reproduce.traced import TracedRun, summed_up
from fsdpbench.reports.pages import shell
from fsdpbench.reports.pages.display import NOTHING, percent
from fsdpbench.reports.pages.whole_run import Table

_SCRIPTS = (f"{shell.ASSETS}/theme.js", f"{shell.ASSETS}/timeline.js", "lab/reproduce/page.js")


def write_page(
    path: Path,
    publication: str,
    outcomes: Sequence[Outcome],
    traced: Sequence[Sequence[Sequence[TracedRun]]],
    seconds: float,
) -> None:
    """Write the page, with the `traced` runs of each figure; scripts are inside, nothing is loaded."""
    counts = counted(outcomes)
    tests = [claim for each in outcomes for claim in each.claims if claim.verdict is not Verdict.TAKEN]
    shell.write_page(
        path,
        "lab/reproduce/page.html.jinja",
        scripts=_SCRIPTS,
        publication=publication,
        sections=list(zip(outcomes, map(chart_of, outcomes), traced, strict=True)),
        claims_table=lambda outcome: Table(_COLUMNS, tuple(map(_row, outcome.claims))),
        variants_table=_variants,
        summed_up=summed_up,
        summary=_summary(outcomes),
        holding=counts[Verdict.HOLDS],
        tests=len(tests),
        directions=sum(claim.same_direction for claim in tests),
        counts=counts,
        verdicts=Verdict,
        not_holding=_not_holding(outcomes),
        allowed=(PART_OF_EFFECT, LEAST_RATIO, LEAST_LEVEL),
        versions=versions(),
        seconds=seconds,
    )


_COLUMNS = ("claim", "bounds", "published", "simulated", "under other settings", "verdict")


def _not_holding(outcomes: Sequence[Outcome]) -> Table:
    """The claims that do not hold, first those that hold under no plausible settings."""
    rows = [
        (outcome.figure.name, *_row(claim))
        for verdict in (Verdict.FAILS, Verdict.DEPENDS, Verdict.UNKNOWN, Verdict.TAKEN)
        for outcome in outcomes
        for claim in outcome.claims
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
    columns = ("other settings", "what is stated", "points", "mean error with them", "as assumed")
    return Table((*columns, "without a value"), rows)


def _summary(outcomes: Sequence[Outcome]) -> Table:
    rows = tuple(
        (
            each.figure.name,
            each.figure.words.title,
            str(len(each.points)),
            f"{counts[Verdict.HOLDS]} of {len(each.claims) - counts[Verdict.TAKEN]}" if each.claims else "",
            percent(each.mean_error),
            f"{percent(min(errors), 0)} to {percent(max(errors), 0)}" if len(errors) > 1 else "",
            percent(each.worst_error),
            "" if not each.points else "not in full" if each.figure.is_open else "yes",
        )
        for each in outcomes
        for counts, errors in [(counted([each]), each.mean_errors)]
    )
    columns = (
        *("figure", "of", "points", "claims that hold", "mean error", "under other settings", "worst"),
        "settings published",
    )
    return Table(columns, rows)
