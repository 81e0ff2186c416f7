"""Comparison of predicted and published figures: as Markdown, as JSON, and as an offline page."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go
from markupsafe import Markup

from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.lab.validation.coverage import Bar, HeldOut, Judged, bar_lines, group_errors, groups_of
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Figure
from fsdpbench.reports.pages import shell


def as_markdown(
    predictions: Sequence[Prediction],
    bars: Sequence[Bar],
    held_out: Sequence[HeldOut] = (),
    judged: Sequence[Judged] = (),
) -> str:
    """Return a page: `bars`, errors in sample and held out, by chip, every case, and its assumptions."""
    errors = [
        (group, len(found), statistics.fmean(map(abs, found)), max(map(abs, found)), statistics.fmean(found))
        for group, found in group_errors(predictions).items()
    ]
    return rendered_beside(
        __file__,
        "validation.md.jinja",
        errors=errors,
        bar_lines=bar_lines,
        figures=[(p, *each) for p in predictions for each in p.case.published.items()],
        assumed=dict.fromkeys((p.case.group, p.case.assumed) for p in predictions if p.case.assumed),
        number=_number,
        **_common(predictions, bars, held_out, judged),
    )


def _common(
    predictions: Sequence[Prediction],
    bars: Sequence[Bar],
    held_out: Sequence[HeldOut],
    judged: Sequence[Judged],
) -> dict[str, object]:
    """Return the values that both templates use."""
    return {
        "identity": id,
        "predictions": predictions,
        "bars": bars,
        "held_out": held_out,
        "groups": groups_of(judged),
        "intervals": {(id(each.prediction), each.figure): each for each in judged},
        "systems": systems_of(predictions),
    }


def systems_of(predictions: Sequence[Prediction]) -> list[str]:
    """Return the systems of the simulated runs."""
    return sorted({p.result.stored("config.system") or p.case.system for p in predictions})


def as_dict(
    predictions: Sequence[Prediction],
    bars: Sequence[Bar],
    held_out: Sequence[HeldOut] = (),
    judged: Sequence[Judged] = (),
) -> dict[str, object]:
    """Return plain values: bars, errors by group, held-out profiles, and every case with its figures."""
    intervals = {(id(each.prediction), each.figure): each for each in judged}
    return {
        "schema": 1,
        "bars": [dataclasses.asdict(bar) for bar in bars],
        "groups": [
            {
                "by": g.by,
                "name": g.name,
                "fitted": g.fitted,
                "runs": len(g.judged),
                "mean_error": g.mean,
                "worst_error": g.worst,
                "bias": g.bias,
                "inside": g.inside,
                "median_half_width": g.half_width,
            }
            for g in groups_of(judged)
        ],
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
        "cases": [_case_dict(p, intervals) for p in predictions],
    }


def _case_dict(p: Prediction, intervals: Mapping[tuple[int, Figure], Judged]) -> dict[str, object]:
    return {
        "name": p.case.name,
        "system": systems_of([p])[0],
        "compiled": p.case.compiled,
        "assumed": p.case.assumed or None,
        "group": p.case.group,
        "source": p.case.source,
        "hardware": p.case.hardware,
        "status": p.result.status.value,
        "figures": [
            {
                "figure": figure.name.lower(),
                "published": published,
                "predicted": p.predicted(figure),
                "error": p.error(figure),
                **_interval_dict(intervals.get((id(p), figure))),
            }
            for figure, published in p.case.published.items()
        ],
    }


def _interval_dict(judged: Judged | None) -> dict[str, object]:
    if judged is None:
        return {"interval": None, "inside": None, "because": []}
    because = [reason.value for reason in judged.width.because]
    return {"interval": list(judged.interval), "inside": judged.inside, "because": because}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def write_page(
    path: Path,
    predictions: Sequence[Prediction],
    bars: Sequence[Bar],
    held_out: Sequence[HeldOut] = (),
    judged: Sequence[Judged] = (),
) -> None:
    """Write the page to `path`; plotly's script is embedded, nothing is loaded."""
    chart = _chart(predictions).to_html(full_html=False, include_plotlyjs=True)
    shell.write_page(
        path,
        "lab/validation/page.html.jinja",
        draws=False,
        chart=Markup(chart),
        **_common(predictions, bars, held_out, judged),
    )


def _chart(predictions: Sequence[Prediction]) -> go.Figure:
    """Return a chart of each case's step-time error, by group."""
    figure = go.Figure()
    groups = dict.fromkeys(p.case.group for p in predictions if p.speed is not None)
    for group in groups:
        shown = [p for p in predictions if p.case.group == group and p.step_time_error is not None]
        figure.add_scatter(
            name=group,
            mode="markers",
            x=[_speed(p) for p in shown],
            y=[100 * (p.step_time_error or 0.0) for p in shown],
            text=[p.case.name for p in shown],
            hovertemplate="%{text}<br>%{y:+.1f} %<extra></extra>",
        )
    figure.add_hline(y=0, line_width=1)
    figure.update_layout(
        template="plotly_white",
        height=420,
        yaxis_title="error of the step time, %",
        xaxis={"title": "published: tokens/s/GPU or TFLOPS/GPU", "type": "log"},
        legend={"orientation": "h", "y": 1.15},
    )
    return figure


def _speed(prediction: Prediction) -> float:
    figure: Figure | None = prediction.speed
    assert figure is not None
    return prediction.case.published[figure]
