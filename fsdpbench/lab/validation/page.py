"""The validation as one offline page: predicted against published, and the table behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from markupsafe import Markup

from fsdpbench.lab.validation.coverage import Judged, groups_of
from fsdpbench.lab.validation.held_out import HeldOut
from fsdpbench.lab.validation.judge import Bar
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Figure
from fsdpbench.lab.validation.text import systems_of
from fsdpbench.reports.pages import shell


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
        identity=id,
        predictions=predictions,
        bars=bars,
        held_out=held_out,
        groups=groups_of(judged),
        intervals={(id(each.prediction), each.figure): each for each in judged},
        systems=systems_of(predictions),
        chart=Markup(chart),
    )


def _chart(predictions: Sequence[Prediction]) -> go.Figure:
    """Error of the step time of each case, by group."""
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
