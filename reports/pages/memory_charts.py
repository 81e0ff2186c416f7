"""Charts of memory over time, in a trace and over the steps of a soak, with the allocator's retries."""

from collections.abc import Sequence
from typing import Any

from fsdpbench.reports.analysis import RankAnalysis
from fsdpbench.reports.analysis.activity import find_activity
from fsdpbench.reports.analysis.memory import MemoryCurve, Retry, device_clock, memory_curve
from fsdpbench.reports.analysis.units import fsdp_spans
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import GIB, WORDS
from fsdpbench.reports.pages.whole_run import Chart, Table, axis, capacity_line, rule, scatter
from fsdpbench.reports.readers import Trace
from fsdpbench.reports.result import SoakReport

_MS = 1_000_000
_BY_DEVICE = ", by the device's clock"


def memory_chart(
    trace: Trace, analysis: RankAnalysis, capacity: float | None, most_points: int
) -> Chart | None:
    """Return the chart of one rank; None if the trace has no memory events.

    Args:
        analysis: the analysis of `trace`.
        capacity: bytes of the device's memory, if known.
        most_points: the most points of a line.
    """
    origin = analysis.steps[0].start if analysis.steps else None
    clock = device_clock(find_activity(trace, fsdp_spans(trace)))
    curve = memory_curve(trace, max_points=most_points, origin=origin, clock=clock)
    if not len(curve):
        return None
    lines = [
        _line(curve, "allocated", "var(--compute)", {"fill": "tozeroy", "fillcolor": "var(--fill)"}),
        *([_line(curve, "active", "var(--gather)", {})] if len(curve.active) else []),
        _line(curve, "reserved", "var(--muted)", {}),
    ]
    if len(curve.retry_time):
        lines.append(_retries(curve))
    starts = [(step.index, (step.start - analysis.steps[0].start) / _MS) for step in analysis.steps]
    rules = [rule("x", at, {"color": "var(--line)", "width": 1}) | {"layer": "below"} for _, at in starts]
    title = f"ms from the start of the first traced step{_BY_DEVICE * bool(clock)}"
    layout = _layout(title, capacity, rules) | {"annotations": [_step_words(*start) for start in starts]}
    return Chart("memory", "", lines, layout, _table(curve, capacity, analysis.memory.retries))


def _line(curve: MemoryCurve, kind: str, colour: str, fill: dict[str, object]) -> dict[str, object]:
    values = {"reserved": curve.reserved, "active": curve.active}.get(kind, curve.allocated)
    x = [round(time / _MS, 3) for time in curve.time.tolist()]
    y = [round(value / GIB, 3) for value in values.tolist()]
    template = f"%{{y:.2f}} GiB {kind} at %{{x:.1f}} ms<extra></extra>"
    return _lines_of(kind, x, y, {"shape": "hv", "width": 1.4, "color": colour}, fill, template)


def _lines_of(
    name: str, x: list[Any], y: list[float], line: dict[str, object], fill: dict[str, object], template: str
) -> dict[str, object]:
    """Return a line for plotly: `y` in GiB over `x`."""
    style = line | {"simplify": False}
    return scatter("lines", name, x, y, line=style, **fill, hovertemplate=template)


def _retry_marks(x: list[Any], y: list[float], words: list[str], template: str) -> dict[str, object]:
    """Return marks of allocator retries at `y` GiB, with `words` as their texts."""
    marker = {"symbol": "triangle-down", "size": 11, "color": "var(--exposed)"}
    about = {"customdata": words, "hovertemplate": f"{template}<extra></extra>"}
    return scatter("markers", "allocator retry", x, y, marker=marker, **about)


def _retries(curve: MemoryCurve) -> dict[str, object]:
    """Return a mark for every retry, at the height of the reserved memory before it."""
    place = [max(0, int(i)) for i in curve.time.searchsorted(curve.retry_time, side="right") - 1]
    asked = zip(curve.retry_bytes.tolist(), curve.retry_freed.tolist(), strict=True)
    return _retry_marks(
        [round(time / _MS, 3) for time in curve.retry_time.tolist()],
        [round(int(curve.reserved[i]) / GIB, 3) for i in place],
        [f"asked for {display.size(size)}, freed {display.size(freed)}" for size, freed in asked],
        "allocator retry at %{x:.1f} ms: %{customdata}",
    )


def _layout(title: str, capacity: float | None, rules: Sequence[object] = ()) -> dict[str, object]:
    """Return a layout of GiB over the axis `title`, with `rules` and a line at the device's memory."""
    lines = [*rules, *([capacity_line(capacity, "y")] if capacity else [])]
    x, y = axis(title, zeroline=False), axis("GiB", rangemode="tozero")
    return {"height": 330, "xaxis": x, "yaxis": y, "shapes": lines}


def _step_words(index: int, at: float) -> dict[str, object]:
    font = {"color": "var(--muted)", "size": 11}
    place = {"x": at, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "top", "xshift": 3}
    return {"text": f"step {index}", "showarrow": False, "font": font, **place}


def _table(curve: MemoryCurve, capacity: float | None, retries: Sequence[Retry]) -> Table:
    columns = [
        ("peak allocated", curve.allocated, curve.allocated.argmax()),
        *([("peak active", curve.active, curve.active.argmax())] if len(curve.active) else []),
        ("least allocated", curve.allocated, curve.allocated.argmin()),
        ("peak reserved", curve.reserved, curve.reserved.argmax()),
    ]
    rows = [(words, display.gib(int(values[at])), _at(int(curve.time[at]))) for words, values, at in columns]
    if capacity:
        rows.append(("device memory", display.gib(capacity), ""))
    if not retries:
        return Table(("what", "GiB", "at, ms"), tuple(rows))
    wider = [(*row, "", "") for row in rows]
    asked = zip(curve.retry_time.tolist(), retries, strict=True)
    wider += [
        (
            f"retry {number}",
            display.gib(retry.bytes),
            _at(time),
            _where(retry),
            display.milliseconds(retry.cost and retry.cost / 1e9),
        )
        for number, (time, retry) in enumerate(asked, start=1)
    ]
    return Table(("what", "GiB", "at, ms", "where", "computation stood still, ms"), tuple(wider))


def _where(retry: Retry) -> str:
    step = None if retry.step is None else f"step {retry.step}"
    return ", ".join(each[:60] for each in (step, retry.phase, retry.unit) if each) or "outside the steps"


def _at(ns: int) -> str:
    return f"{ns / _MS:,.1f}"


SOAK_WORDS = (
    "Lines of peak allocated memory, of reserved memory and of free memory in fragments over the steps of "
    "a soak, with allocator retries marked; the table below has the figures."
)
_LINES = WORDS["charts"]["memory"]


def soak_chart(soak: SoakReport, capacity: float | None, most_points: int = 1000) -> Chart | None:
    """Return the chart of a soak, at most `most_points` points per line, each the highest of its neighbors.

    None if the device does not record memory, or if no step finished.
    """
    over = soak.over_steps
    if not over.reserved or None in over.reserved:
        return None
    width = -(-len(over.reserved) // most_points)
    steps = over.training_step[::width]
    lines = []
    for name, words, colour in _LINES:
        bytes_of = [value or 0 for value in getattr(over, name)]
        highest = [max(bytes_of[at : at + width]) for at in range(0, len(bytes_of), width)]
        template = f"%{{y:.2f}} GiB {words} in step %{{x}}<extra></extra>"
        y, style = [round(value / GIB, 3) for value in highest], {"width": 1.4, "color": colour}
        lines.append(_lines_of(words, list(steps), y, style, {}, template))
    retried = [at for at, count in enumerate(over.alloc_retries) if count]
    if retried:
        lines.append(_soak_retries(soak, retried[-most_points:]))
    layout = _layout("training step", capacity)
    return Chart("soak", SOAK_WORDS, lines, layout, _soak_table(soak))


def _soak_retries(soak: SoakReport, places: Sequence[int]) -> dict[str, object]:
    over = soak.over_steps
    return _retry_marks(
        [over.training_step[at] for at in places],
        [round((over.reserved[at] or 0) / GIB, 3) for at in places],
        [display.count(over.alloc_retries[at]) for at in places],
        "step %{x}: %{customdata} retries",
    )


def _soak_table(soak: SoakReport) -> Table:
    over = soak.over_steps
    rows = []
    for name, words, _ in _LINES:
        values = getattr(over, name)
        known = [value or 0 for value in values]
        highest = known.index(max(known))
        rows.append((words, display.gib(known[highest]), str(over.training_step[highest])))
    for words, step in (
        ("last cudaMalloc", soak.last_device_alloc_step),
        (f"first of {soak.retries:,} allocator retries", soak.first_retry_step),
        ("out of memory", soak.out_of_memory_step),
    ):
        if step is not None:
            rows.append((words, "", str(step)))
    return Table(("what", "GiB", "in step"), tuple(rows))
