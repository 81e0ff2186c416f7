"""Predicted beside published, as Markdown: for a terminal, for the docs, for a file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fsdpbench.validation.held_out import HeldOut
from fsdpbench.validation.judge import Bar, group_errors
from fsdpbench.validation.predict import Prediction


def as_markdown(
    predictions: Sequence[Prediction], bars: Sequence[Bar], held_out: Sequence[HeldOut] = ()
) -> str:
    """Bars first, then the error of each group, the held-out chips, every case, and what each assumes."""
    systems = ", ".join(f"`{name}`" for name in systems_of(predictions))
    lines = [f"{len(predictions)} published runs, simulated with {systems}.", ""]
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
    lines += [*_held_out(held_out), "", "| case | figure | published | predicted | error |"]
    lines.append("|---|---|--:|--:|--:|")
    for prediction in predictions:
        lines += _rows(prediction)
    lines += _assumptions(predictions)
    return "\n".join(lines) + "\n"


def systems_of(predictions: Sequence[Prediction]) -> list[str]:
    """The systems that simulated them."""
    return sorted({p.result.get("config", {}).get("system", p.case.system) for p in predictions})


def _held_out(held_out: Sequence[HeldOut]) -> list[str]:
    if not held_out:
        return []
    return [
        "",
        "| runs on | cases | mean error, own keys | fitted keys of | mean error with them | bias |",
        "|---|--:|--:|---|--:|--:|",
        *(
            f"| {h.hardware} | {len(h.own)} | {h.own_mean:.1%} | {h.keys_from} | {h.foreign_mean:.1%} "
            f"| {h.foreign_bias:+.1%} |"
            for h in held_out
        ),
    ]


def _assumptions(predictions: Sequence[Prediction]) -> list[str]:
    """What the publications leave open, once a group and assumption."""
    told = dict.fromkeys((p.case.group, p.case.assumed) for p in predictions if p.case.assumed)
    rows = [f"| {group} | {what} |" for group, what in told]
    return ["", "| of | assumed, not published |", "|---|---|", *rows] if rows else []


def _rows(prediction: Prediction) -> list[str]:
    rows = []
    for figure, published in prediction.case.published.items():
        predicted, error = prediction.predicted(figure), prediction.error(figure)
        shown = prediction.result["status"] if predicted is None else _number(predicted)
        what = "step time " if figure.is_time else ""
        rows.append(
            f"| {prediction.case.name} | {figure.words} | {_number(published)} | {shown} "
            f"| {'' if error is None else f'{what}{error:+.1%}'} |"
        )
    return rows


def as_dict(
    predictions: Sequence[Prediction], bars: Sequence[Bar], held_out: Sequence[HeldOut] = ()
) -> dict[str, Any]:
    """The same as JSON: bars, held-out profiles, and every case with its figures."""
    return {
        "schema": 1,
        "bars": [{"name": b.name, "wanted": b.wanted, "reached": b.reached, "met": b.met} for b in bars],
        "held_out": [
            {
                "hardware": h.hardware,
                "cases": len(h.own),
                "mean_error": h.own_mean,
                "keys_from": h.keys_from,
                "mean_error_with_them": h.foreign_mean,
                "bias_with_them": h.foreign_bias,
            }
            for h in held_out
        ],
        "cases": [
            {
                "name": p.case.name,
                "system": systems_of([p])[0],
                "assumed": p.case.assumed or None,
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
