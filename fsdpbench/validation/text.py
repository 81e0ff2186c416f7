"""Predicted beside published, as Markdown: for a terminal, for the docs, for a file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fsdpbench.validation.judge import Bar, group_errors
from fsdpbench.validation.predict import Prediction


def as_markdown(predictions: Sequence[Prediction], bars: Sequence[Bar], system: str) -> str:
    """Bars first, then the error of each group, then every case."""
    lines = [f"{len(predictions)} published runs, simulated with `{system}`.", ""]
    if bars:
        lines += ["| bar | wanted | reached | |", "|---|---|---|---|"]
        lines += [
            f"| {b.name} | {b.wanted} | {b.reached} | {'met' if b.met else '**not met**'} |" for b in bars
        ]
        lines.append("")
    lines += ["| group | cases | step time: mean error | worst | bias |", "|---|--:|--:|--:|--:|"]
    for group, errors in group_errors(predictions).items():
        mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
        lines.append(
            f"| {group} | {len(errors)} | {mean:.1%} | {worst:.1%} | {statistics.fmean(errors):+.1%} |"
        )
    lines += ["", "| case | figure | published | predicted | error |", "|---|---|--:|--:|--:|"]
    for prediction in predictions:
        lines += _rows(prediction)
    return "\n".join(lines) + "\n"


def _rows(prediction: Prediction) -> list[str]:
    rows = []
    for figure, published in prediction.case.published.items():
        predicted, error = prediction.predicted(figure), prediction.error(figure)
        shown = prediction.result["status"] if predicted is None else _number(predicted)
        what = "step time " if figure.is_speed else ""
        rows.append(
            f"| {prediction.case.name} | {figure.words} | {_number(published)} | {shown} "
            f"| {'' if error is None else f'{what}{error:+.1%}'} |"
        )
    return rows


def as_dict(predictions: Sequence[Prediction], bars: Sequence[Bar], system: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "system": system,
        "bars": [{"name": b.name, "wanted": b.wanted, "reached": b.reached, "met": b.met} for b in bars],
        "cases": [
            {
                "name": p.case.name,
                "group": p.case.group,
                "source": p.case.source,
                "hardware": p.case.hardware,
                "status": p.result["status"],
                "figures": [
                    {
                        "figure": figure.name.lower(),
                        "published": published,
                        "predicted": p.predicted(figure),
                        "error": p.error(figure),
                    }
                    for figure, published in p.case.published.items()
                ],
            }
            for p in predictions
        ],
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
