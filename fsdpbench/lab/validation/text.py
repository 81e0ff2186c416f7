"""Predicted beside published: as Markdown, as JSON values, and as one offline page."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import plotly.graph_objects as go
from markupsafe import Markup

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
    """Return `bars` first, then errors in sample and held out, by chip, every case, and what each assumes."""
    systems = ", ".join(f"`{name}`" for name in systems_of(predictions))
    lines = [f"{len(predictions)} published runs, simulated with {systems}.", ""]
    lines += [*bar_lines(bars), ""] if bars else []
    groups = group_errors(predictions)
    rows = []
    for group, errors in groups.items():
        mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
        rows.append(f"{group} | {len(errors)} | {mean:.1%} | {worst:.1%} | {statistics.fmean(errors):+.1%}")
    lines += _table("group | cases | step time: mean error | worst | bias", 1, rows)[1:]
    lines += [*_apart(judged), *_held_out(held_out)]
    intervals = {(id(each.prediction), each.figure): each for each in judged}
    cases = [row for prediction in predictions for row in _rows(prediction, intervals)]
    lines += _table("case | | figure | published | predicted | error | 90 % interval", 3, cases)
    lines += _out_of_memory(predictions)
    assumed = dict.fromkeys((p.case.group, p.case.assumed) for p in predictions if p.case.assumed)
    lines += _table("of | assumed, not published", 2, [f"{group} | {what}" for group, what in assumed])
    return "\n".join(lines) + "\n"


def _table(head: str, texts: int, rows: Sequence[str]) -> list[str]:
    """Return a table behind an empty line, the first `texts` columns left; nothing without rows."""
    places = ["---"] * texts + ["--:"] * (head.count("|") + 1 - texts)
    return ["", f"| {head} |", f"|{'|'.join(places)}|", *(f"| {row} |" for row in rows)] if rows else []


def systems_of(predictions: Sequence[Prediction]) -> list[str]:
    """The systems that simulated them."""
    return sorted({p.result.stored("config.system") or p.case.system for p in predictions})


def _apart(judged: Sequence[Judged]) -> list[str]:
    """Errors by source, chip, size and length: sources that constants were fitted to, and the others."""
    lines: list[str] = []
    groups = groups_of(judged)
    for fitted, title in ((True, "In sample: constants were fitted to these sources."), (False, "Held out.")):
        part = [group for group in groups if group.fitted is fitted]
        rows = [
            f"{g.by} | {g.name} | {len(g.judged)} | {g.mean:.1%} | {g.worst:.1%} | {g.bias:+.1%} "
            f"| {g.inside} of {len(g.judged)} | {g.half_width:.1%}"
            for g in part
        ]
        head = "by | | runs | mean error | worst | bias | inside their interval | median half width"
        lines += ["", title, *_table(head, 2, rows)] if rows else []
    return lines


def _out_of_memory(predictions: Sequence[Prediction]) -> list[str]:
    """Runs of which it was published that memory did not suffice."""
    rows = [
        f"{p.case.group} | {p.case.name} | {p.case.how} | out of memory | {p.result.status}"
        for p in predictions
        if p.case.ran_out
    ]
    return _table("of | case | | published | predicted", 5, rows)


def _held_out(held_out: Sequence[HeldOut]) -> list[str]:
    rows = [
        f"{h.hardware} | {len(h.own)} | {h.own_mean:.1%} | {h.keys_from} | {h.foreign_mean:.1%} "
        f"| {h.foreign_bias:+.1%}"
        for h in held_out
    ]
    head = "runs on | cases | mean error, own keys | fitted keys of | mean error with them | bias"
    return _table(head, 1, rows)


def _rows(
    prediction: Prediction, intervals: Mapping[tuple[int, Figure], Judged] = MappingProxyType({})
) -> list[str]:
    rows = []
    for figure, published in prediction.case.published.items():
        predicted, error = prediction.predicted(figure), prediction.error(figure)
        shown = prediction.result.status.value if predicted is None else _number(predicted)
        what = "step time " if figure.is_time else ""
        rows.append(
            f"{prediction.case.name} | {prediction.case.how} | {figure.words} "
            f"| {_number(published)} | {shown} "
            f"| {'' if error is None else f'{what}{error:+.1%}'} "
            f"| {_interval(intervals.get((id(prediction), figure)))}"
        )
    return rows


def _interval(judged: Judged | None) -> str:
    if judged is None:
        return ""
    low, high = map(_number, judged.interval)
    return f"{low} to {high}{'' if judged.inside else ', outside'}"


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
