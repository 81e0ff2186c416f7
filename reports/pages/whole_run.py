"""Charts of the whole run, as plotly figures in plain dictionaries, each with its table.

Colors are written as `var(--name)`, and the page resolves them when it draws, so that one figure serves the
light, the dark and the printed page. Plotly interprets some HTML in texts, so every name from a run goes
through `chart_text`.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.reports.analysis.figures import TimeParts
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.effects import Effect
from fsdpbench.reports.pages.ranking import Metric, Ranked, label, pareto_front, short_label
from fsdpbench.reports.result import StepParts

# More bars than this say no more than the table, and slow the page down.
MOST_BARS = 30
PARTS = display.WORDS["charts"]["step"]


@dataclass(frozen=True, slots=True)
class Table:
    """The figures behind a chart: one header per column, every cell a text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> frozenset[str]:
        """Return the columns of figures: every cell in them starts with a digit, a sign or a dash."""
        filled = [row for row in self.rows if any(row)]
        return frozenset(
            name
            for place, name in enumerate(self.columns)
            if filled and all(row[place][:1] in "0123456789+−–-" or not row[place] for row in filled)
        )

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> "Table | None":
        """Return the table of these rows; None if there are none."""
        found = tuple(rows)
        return cls(tuple(columns), found) if found else None


@dataclass(frozen=True, slots=True)
class Chart:
    """A plotly figure (`data`, `layout`), its changes for a narrow window, and its table."""

    name: str
    summary: str
    data: list[dict[str, object]]
    layout: dict[str, object]
    table: "Table"
    narrow: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def figure(self) -> dict[str, object]:
        """Return the chart as a dictionary for plotly."""
        return {"data": self.data, "layout": self.layout, "narrow": self.narrow}


def island_table(table: "Table | None") -> dict[str, object] | None:
    """Return a table as a dictionary for the page's scripts; None for no table."""
    if table is None:
        return None
    return {"columns": table.columns, "rows": table.rows, "numeric": sorted(table.numeric)}


def rule(axis: str, at: float, line: dict[str, object]) -> dict[str, object]:
    """Return a plotly shape: a straight line across the chart, where `axis` (`x` or `y`) is `at`."""
    across = "y" if axis == "x" else "x"
    place = {f"{axis}0": at, f"{axis}1": at, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
    return {"type": "line", "line": line, **place}


def capacity_line(capacity: float, axis: str) -> dict[str, object]:
    """Return the line of a device's memory (bytes) on an axis in GiB."""
    return rule(axis, capacity / display.GIB, {"color": "var(--exposed)", "width": 1, "dash": "dash"})


def named_places(names: Sequence[str], edge: float = 0.4) -> dict[str, object]:
    """Return a plotly axis with a name at each whole number, the first on top, and `edge` of room."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - edge, edge - 1],
        "automargin": True,
        "zeroline": False,
    }


def axis(title: str, **more: Any) -> dict[str, object]:
    """Return a plotly axis with a title."""
    return {"title": {"text": title}, **more}


def scatter(mode: str, name: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, object]:
    """Return a plotly scatter trace; `mode`: `lines`, `markers` or both."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def error_bars(above: Sequence[float], below: Sequence[float], **more: Any) -> dict[str, object]:
    """Return plotly error bars around points, which extend `above` and `below` each point."""
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **more}


def part_bars(
    steps: Sequence[StepParts | TimeParts], scales: Sequence[float], hover: str, **more: Any
) -> list[dict[str, object]]:
    """Return stacked bars: the four parts of each step, multiplied by `scales`. `hover`: the hover text, with
    `PART` for the part's name."""
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "y": list(range(len(steps))),
            "x": [getattr(step, part) * scale for step, scale in zip(steps, scales, strict=True)],
            "marker": {"color": colour},
            "hovertemplate": f"{hover.replace('PART', words)}<extra></extra>",
            **more,
        }
        for part, words, colour in PARTS
    ]


def part_layout(title: str, names: Sequence[str], each: int) -> dict[str, object]:
    """Return the layout of `part_bars`: `names` beside the bars, `each` pixels per bar, the title below."""
    return {
        "barmode": "stack",
        "bargap": 0.3,
        "height": 110 + each * len(names),
        "xaxis": axis(title, rangemode="tozero"),
        "yaxis": named_places(names) | {"showgrid": False},
    }


def chart_text(text: str, longest: int = 60) -> str:
    """Return a name for a chart: cut to `longest` characters, and with plotly's markup escaped."""
    text = " ".join(text.split())
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return html.escape(text, quote=False)


def breakdown(ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric) -> Chart | None:
    """Return the four parts of each traced step, which sum to it, the best configuration on top.

    If steps differ in their work (another batch, another sequence length), bars are times for equal work.
    """
    timed = [entry for entry in ranked if entry.throughput and entry.row.result.time_s]
    if not timed:
        return None
    shown = timed[:MOST_BARS]
    scales, unit = _scales(shown, metric)
    names = [f"{entry.place}  {chart_text(short_label(entry.row, varying), 46)}" for entry in shown]
    data = part_bars(
        [parts for entry in shown if (parts := entry.row.result.time_s)],
        [1e3 * scale for scale in scales],
        f"%{{customdata[1]}}<br>PART %{{x:.4g}} {unit}",
        customdata=[[entry.row.folder.name, text] for entry, text in zip(shown, names, strict=True)],
    )
    cut = f"The first {len(shown)} of {len(timed)}; the table below has all." * (len(shown) < len(timed))
    narrow = {"yaxis": {"ticktext": [str(entry.place) for entry in shown]}}
    summary = (
        "Stacked bars: compute only, overlapped, exposed communication and idle time of each traced step."
    )
    layout = part_layout(f"traced step, {unit}", names, 24)
    return Chart("breakdown", summary, data, layout, _breakdown_table(timed, varying), narrow, cut)


def _scales(shown: Sequence[Ranked], metric: Metric) -> tuple[list[float], str]:
    """Return the factor for each step's time, and the resulting unit."""
    work = [(entry.throughput or 0.0) * (entry.row.result.step_time_s or 0.0) for entry in shown]
    if not min(work) > 0 or max(work) / min(work) < 1.001:
        return [1.0] * len(shown), "ms"
    amount = 1000 if metric.counts_tokens else 1
    unit = "ms for 1,000 tokens" if metric.counts_tokens else "ms for a sample"
    return [amount / each for each in work], unit


def _breakdown_table(timed: Sequence[Ranked], varying: Sequence[str]) -> "Table":
    rows = []
    for entry in timed:
        parts = entry.row.result.time_s
        figures = [display.milliseconds(getattr(parts, part)) for part, _, _ in PARTS]
        overlap = display.percent(entry.row.result.overlap_fraction)
        step = display.milliseconds(entry.row.result.traced_step_time_s)
        rows.append((str(entry.place), label(entry.row, varying), *figures, step, overlap))
    columns = ("#", "configuration", *(f"{words}, ms" for _, words, _ in PARTS), "traced step, ms", "overlap")
    return Table(columns, tuple(rows))


def throughput_against_memory(
    ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric
) -> Chart | None:
    """Return the finished configurations by peak reserved memory and throughput, with the Pareto front; None
    if there are fewer than two."""
    shown = [entry for entry in ranked if entry.throughput and entry.row.result.reserved]
    if len(shown) < 2:
        return None
    calm = [entry for entry in shown if not entry.row.result.alloc_retries_per_step]
    retried = [entry for entry in shown if entry.row.result.alloc_retries_per_step]
    front = pareto_front(shown)
    line = {"color": "var(--muted)", "width": 1.5, "dash": "dot"}
    speeds = [entry.throughput for entry in front]
    data = [
        scatter("lines", "Pareto front", _memory_gib(front), speeds, line=line, hoverinfo="skip"),
        _points(calm, front, varying, metric, "no retries", "var(--compute)", "circle"),
    ]
    if retried:
        data.append(
            _points(retried, front, varying, metric, "allocator retries", "var(--exposed)", "diamond")
        )
    capacity = max((entry.row.capacity_bytes or 0.0 for entry in shown), default=0.0)
    memories = _memory_gib(shown)
    least, most = min(memories), max(*memories, capacity / display.GIB)
    margin = 0.05 * (most - least or most)
    bounds = [least - margin, most + margin]
    layout = {
        "height": 400,
        "xaxis": axis("peak reserved memory, GiB", zeroline=False, range=bounds),
        "yaxis": axis(metric.words, zeroline=False),
    }
    if capacity:
        layout["shapes"] = [capacity_line(capacity, "x")]
        layout["annotations"] = [_capacity_words(capacity)]
    summary = "Scatter of throughput against peak reserved memory; a dotted line joins the Pareto front."
    return Chart("memory-scatter", summary, data, layout, _scatter_table(shown, front, varying, metric))


def _memory_gib(entries: Sequence[Ranked]) -> list[float]:
    return [(entry.row.result.reserved or 0.0) / display.GIB for entry in entries]


def _points(
    entries: Sequence[Ranked],
    front: Sequence[Ranked],
    varying: Sequence[str],
    metric: Metric,
    words: str,
    colour: str,
    symbol: str,
) -> dict[str, object]:
    on_front = {id(entry) for entry in front}
    hover = "%{customdata[1]}<br>%{y:.5~g} " + metric.words + "<br>%{x:.1f} GiB reserved<extra></extra>"
    line = {"color": "var(--surface)", "width": 1}
    names = [f"{entry.place}  {chart_text(short_label(entry.row, varying), 80)}" for entry in entries]
    return scatter(
        "markers+text",
        words,
        _memory_gib(entries),
        [entry.throughput for entry in entries],
        text=[str(entry.place) if id(entry) in on_front else "" for entry in entries],
        textposition="top center",
        customdata=[[entry.row.folder.name, name] for entry, name in zip(entries, names, strict=True)],
        hovertemplate=hover,
        marker={"color": colour, "symbol": symbol, "size": 9, "line": line},
    )


def _capacity_words(capacity: float) -> dict[str, object]:
    font = {"color": "var(--muted)", "size": 11}
    place = {"x": capacity / display.GIB, "y": 0, "yref": "paper", "xanchor": "right", "yanchor": "bottom"}
    text = f"device memory {display.gib(capacity)} GiB"
    return {"text": text, "showarrow": False, "font": font, **place, "xshift": -4}


def _scatter_table(
    shown: Sequence[Ranked], front: Sequence[Ranked], varying: Sequence[str], metric: Metric
) -> "Table":
    on_front = {id(entry) for entry in front}
    rows = tuple(
        (
            str(entry.place),
            label(entry.row, varying),
            display.gib(entry.row.result.reserved),
            display.number(entry.throughput, 4),
            display.count(entry.row.result.alloc_retries_per_step),
            "yes" if id(entry) in on_front else "no",
        )
        for entry in shown
    )
    return Table(
        ("#", "configuration", "reserved, GiB", metric.words, "retries a step", "on the front"), rows
    )


def effect_chart(found: Sequence[Effect]) -> Chart | None:
    """Return the change of throughput by each value from the best configuration's, others held equal."""
    shown = [effect for effect in found if effect.ratio is not None]
    if not shown:
        return None
    narrow = {"yaxis": {"ticktext": [chart_text(f"{e.name}: {e.value}", 24) for e in shown]}}
    summary = "Change of throughput by setting and value, with intervals, other settings held equal."
    return Chart("effects", summary, _effects(shown), _effect_axes(shown), _effect_table(found), narrow)


def _effects(shown: Sequence[Effect]) -> list[dict[str, object]]:
    places = range(len(shown))
    ends = [x for e in shown for x in (_points_of(e.smallest), _points_of(e.largest), None)]
    rows = [y for place in places for y in (place, place, None)]
    line = {"color": "var(--overlapped)", "width": 7}
    named = [chart_text(f"{e.name}: {e.value} instead of {e.reference}", 90) for e in shown]
    changes = [display.signed_percent((e.ratio or 1) - 1) for e in shown]
    above = [((effect.high or effect.ratio or 1) - (effect.ratio or 1)) * 100 for effect in shown]
    below = [((effect.ratio or 1) - (effect.low or effect.ratio or 1)) * 100 for effect in shown]
    mean = scatter(
        "markers",
        "mean with its 95 % interval",
        [_points_of(effect.ratio) for effect in shown],
        list(places),
        marker={"color": "var(--compute)", "size": 9},
        error_x=error_bars(above, below, color="var(--compute)"),
        customdata=[[named[place], shown[place].pairs, changes[place]] for place in places],
        hovertemplate="%{customdata[0]}<br>%{customdata[2]}, %{customdata[1]} pairs<extra></extra>",
    )
    pairs = "single pairs, smallest to largest"
    return [scatter("lines", pairs, ends, rows, line=line, hoverinfo="skip"), mean]


def _effect_axes(shown: Sequence[Effect]) -> dict[str, object]:
    names = [chart_text(f"{effect.name}: {effect.value}", 46) + _aside(effect) for effect in shown]
    bounds = _range([x for e in shown for x in (e.smallest, e.largest, e.low, e.high, 1.0)])
    changes = axis("change of throughput, %", zeroline=True, zerolinecolor="var(--text)", range=bounds)
    return {"height": 130 + 28 * len(shown), "xaxis": changes, "yaxis": named_places(names)}


def _aside(effect: Effect) -> str:
    """Return a remark to show beside the effect."""
    text = ["with retries"] if effect.with_retries else []
    text += [f"{effect.out_of_memory} out of memory"] if effect.out_of_memory else []
    return f" ({', '.join(text)})" if text else ""


def _range(ratios: Sequence[float | None]) -> list[float]:
    """Return an axis range over all changes, with a margin: plotly's own range cuts thick lines."""
    changes = [(ratio - 1) * 100 for ratio in ratios if ratio is not None]
    margin = 0.06 * (max(changes) - min(changes)) or 1.0
    return [min(changes) - margin, max(changes) + margin]


def _points_of(ratio: float | None) -> float | None:
    return None if ratio is None else (ratio - 1) * 100


def _effect_table(found: Sequence[Effect]) -> "Table":
    def change(ratio: float | None) -> str:
        return display.signed_percent(ratio - 1) if ratio else display.NOTHING

    def interval(low: float | None, high: float | None) -> str:
        if low is None or high is None:
            return display.NOTHING
        return f"{display.signed_percent(low - 1)} to {display.signed_percent(high - 1)}"

    rows = tuple(
        (
            *(each.name, each.value, each.reference, change(each.ratio), interval(each.low, each.high)),
            *(interval(each.smallest, each.largest), change(each.memory)),
            f"{each.pairs} with retries" if each.with_retries else str(each.pairs),
            f"{change(each.other_ratio)} ({each.other_pairs})" if each.other_ratio else "",
            str(each.out_of_memory) if each.out_of_memory else "",
        )
        for each in found
    )
    columns = (
        *("setting", "value", "instead of", "throughput", "95 % interval", "single pairs"),
        *("reserved memory", "pairs", "pairs with retries apart", "out of memory instead"),
    )
    return Table(columns, rows)
