"""The whole outcome as JSON values: the file beside the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fsdpbench.engine.results.provenance import versions
from fsdpbench.lab.reproduce.outcome import Judged, Outcome, counted
from fsdpbench.lab.reproduce.traced import TracedRun

SCHEMA = 2


def as_dict(
    publication: str, outcomes: Sequence[Outcome], traced: Sequence[Sequence[Sequence[TracedRun]]]
) -> dict[str, object]:
    """Every figure with its points, claims, variants and traces."""
    return {
        "schema": SCHEMA,
        "publication": publication,
        "simulated": True,
        "versions": versions(),
        "claims": {verdict.name.lower(): count for verdict, count in counted(outcomes).items()},
        "figures": [_figure(outcome, runs) for outcome, runs in zip(outcomes, traced, strict=True)],
    }


def _claim(each: Judged) -> dict[str, object]:
    return {
        "words": each.claim.words,
        "kind": each.claim.kind.name.lower(),
        "least": each.bounds.low,
        "most": each.bounds.high if math.isfinite(each.bounds.high) else None,
        "published": each.published,
        "simulated": each.simulated,
        "other_settings": list(each.others),
        "verdict": each.verdict.name.lower(),
        "same_direction": each.same_direction,
        "set_from_it": each.claim.taken or None,
    }


def _figure(outcome: Outcome, traced: Sequence[Sequence[TracedRun]]) -> dict[str, object]:
    figure, words = outcome.figure, outcome.figure.words
    return {
        "name": figure.name,
        "title": words.title,
        "shows": words.shows,
        "source": figure.about.source,
        "read": figure.about.read,
        "unit": figure.about.unit,
        "assumed": list(words.assumed),
        "settings_published": not figure.is_open,
        "mean_error": outcome.mean_error,
        "mean_errors": outcome.mean_errors,
        "worst_error": outcome.worst_error,
        "points": [
            {
                "series": each.point.series,
                "x": each.point.x,
                "published": each.point.published,
                "simulated": each.value,
                "status": each.status.value,
                "error": each.error,
                "interval": each.interval,
                "band": each.band,
            }
            for each in outcome.points
        ],
        "variants": [
            {
                "words": each.variant.words,
                "contradicts": each.variant.contradicts or None,
                "mean_error": each.mean_error,
                "mean_error_assumed": outcome.mean_error_of(each),
                "points": [
                    {"series": series, "x": x, "simulated": value}
                    for (series, x), value in each.values.items()
                ],
            }
            for each in outcome.tried
        ],
        "claims": [_claim(each) for each in outcome.claims],
        "differs": words.differs or None,
        "contrasts": [
            {"why": why, "runs": [{"words": run.words, **dataclasses.asdict(run.facts)} for run in runs]}
            for why, runs in zip(words.why, traced, strict=True)
        ],
    }
