"""Comparisons on the page (systems, GPU counts, simulated and measured runs, eager and compiled runs), and
the order of the charts.

Systems are compared on the same work: how much faster each is than a reference, and whether they compute the
same. Rows that must compute the same differ only in settings that decide how it is computed (system,
wrapping, prefetch, ...). For these rows

    speed    each system's best row against the reference's, round by round if runs were repeated: the runs
             of a round took place next to each other, so that drift of the machine affects both
    losses   every row against the reference's, step by step; a system that computes something else does not
             count as faster
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fsdpbench.base.files.documents import typed_rows
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.effects import effects
from fsdpbench.reports.pages.ranking import Metric, Ranked, label, short_label
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.pages.whole_run import (
    Chart,
    Table,
    axis,
    breakdown,
    chart_text,
    effect_chart,
    scatter,
    throughput_against_memory,
)

_COLOURS = ("--compute", "--exposed", "--allreduce", "--reduce", "--gather", "--copy")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
# More lines than this cannot be distinguished.
MOST_LINES = 6
_COMPILE = "compile"
_MOST_PAIRS = 6
_PHASES = display.WORDS["phases"]
Pair = tuple[Configuration, Configuration]
"""The eager and the compiled configuration of otherwise equal settings; both finished."""
COMPUTED = (
    "model", "gpus", "seq", "batch", "grad_accum", "tp", "cp", "param_dtype", "lora", "lora_targets",
    "lora_base", "optimizer", "optimizer_dtype", "linear_dtype", "clip", "implementation", "seed",
)  # fmt: skip
"""Settings that decide the result of training, or the samples in a step (with `tp` and `cp` a batch belongs
to a group of ranks); all other settings decide how it is computed."""
_REFERENCES = ("torch-fsdp2", "torch-fsdp1", "torch-ddp", "single")
_NEAR = {"fp32": 1e-4}
_NEAR_LOW_PRECISION = 0.01
"""Greatest relative difference of equal losses. Sums in another order change a fp32 loss by 1e-6 per step or
less; gradients that are not reduced at all changed the loss of a tiny GPT by 3e-4 in seven steps."""


def scaling(ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric) -> Chart | None:
    """Return a chart of throughput per GPU over GPU counts, one line per set of otherwise equal settings."""
    others = [name for name in varying if name not in ("gpus", "gpus_per_node", "gpus_used_per_node")]
    lines: dict[str, dict[int, Ranked]] = {}
    for entry in ranked:
        if entry.throughput and entry.row.config.gpus:
            lines.setdefault(label(entry.row, others), {}).setdefault(entry.row.config.gpus, entry)
    long_enough = [points for points in lines.values() if len(points) > 1]
    if not long_enough:
        return None
    counts = sorted({gpus for points in long_enough for gpus in points})
    data = [
        _scaling_line(dict(sorted(points.items())), others, metric, place)
        for place, points in enumerate(long_enough[:MOST_LINES])
    ]
    ticks = {"tickvals": counts, "ticktext": [str(gpus) for gpus in counts]}
    layout = {
        "height": 400,
        "xaxis": axis("GPUs", type="log", **ticks, zeroline=False),
        "yaxis": axis(metric.words, rangemode="tozero", zeroline=False),
    }
    rows = [row for points in long_enough for row in _scaling_rows(dict(sorted(points.items())), others)]
    table = Table(("configuration", "GPUs", metric.words, "of the fewest GPUs'"), tuple(rows))
    cut = len(long_enough) - MOST_LINES
    note = f"The best {MOST_LINES} lines; the table has {cut} more." if cut > 0 else ""
    return Chart("scaling", "Lines of throughput per GPU over GPU counts.", data, layout, table, note=note)


def _scaling_line(
    points: dict[int, Ranked], others: Sequence[str], metric: Metric, place: int
) -> dict[str, object]:
    first = next(iter(points.values()))
    return scatter(
        "lines+markers",
        chart_text(short_label(first.row, others), 50),
        list(points),
        [entry.throughput for entry in points.values()],
        line={"color": f"var({_COLOURS[place]})", "width": 2},
        marker={"symbol": _SYMBOLS[place], "size": 8},
        customdata=[[entry.row.folder.name] for entry in points.values()],
        hovertemplate="%{x} GPUs<br>%{y:.5~g} " + metric.words + "<extra>%{fullData.name}</extra>",
    )


def _scaling_rows(points: dict[int, Ranked], others: Sequence[str]) -> list[tuple[str, ...]]:
    first = next(iter(points.values()))
    return [
        (
            label(first.row, others),
            str(gpus),
            display.number(entry.throughput, 4),
            display.percent((entry.throughput or 0.0) / (first.throughput or 1.0)),
        )
        for gpus, entry in points.items()
    ]


def predicted_and_measured(ranked: Sequence[Ranked], varying: Sequence[str]) -> Chart | None:
    """Return a chart of simulated over measured step times of equal settings; None without such pairs."""
    # A profile and a driver name the same hardware differently.
    others = [name for name in varying if name not in ("device", "hardware")]
    pairs = _pairs(ranked, others)
    if not pairs:
        return None
    predicted = [(one.row.result.step_time_s or 0.0) * 1e3 for one, _ in pairs]
    measured = [(other.row.result.step_time_s or 0.0) * 1e3 for _, other in pairs]
    top = 1.05 * max(*predicted, *measured)
    line = {"color": "var(--muted)", "width": 1, "dash": "dot"}
    runs = [[other.row.folder.name, chart_text(short_label(other.row, others), 80)] for _, other in pairs]
    hover = "%{customdata[1]}<br>measured %{x:.4g} ms, predicted %{y:.4g} ms<extra></extra>"
    marker = {"color": "var(--compute)", "size": 9}
    about = {"marker": marker, "customdata": runs, "hovertemplate": hover}
    data = [
        scatter("lines", "equal", [0, top], [0, top], line=line, hoverinfo="skip"),
        scatter("markers", "configurations", measured, predicted, **about),
    ]
    layout = {
        "height": 400,
        "xaxis": axis("measured step, ms", rangemode="tozero"),
        "yaxis": axis("predicted step, ms", rangemode="tozero"),
    }
    rows = tuple(
        (
            label(other.row, others),
            display.number(one),
            display.number(two),
            display.signed_percent(one / two - 1),
        )
        for (_, other), one, two in zip(pairs, predicted, measured, strict=True)
    )
    errors = [abs(one / two - 1) for one, two in zip(predicted, measured, strict=True)]
    table = Table(("configuration", "predicted, ms", "measured, ms", "error"), rows)
    mean = display.percent(sum(errors) / len(errors))
    note = f"Mean error {mean}, worst {display.percent(max(errors))} over {len(pairs)}."
    return Chart(
        "predicted", "Scatter of predicted over measured step times.", data, layout, table, note=note
    )


def _pairs(ranked: Sequence[Ranked], names: Sequence[str]) -> list[tuple[Ranked, Ranked]]:
    """Return pairs of simulated and measured runs with the same settings."""
    simulated = {_identity(e, names): e for e in reversed(ranked) if e.throughput and e.row.device == "sim"}
    return [
        (simulated[_identity(entry, names)], entry)
        for entry in ranked
        if entry.throughput and entry.row.device == "cuda" and _identity(entry, names) in simulated
    ]


def _identity(entry: Ranked, names: Sequence[str]) -> tuple[str, ...]:
    settings = entry.row.settings
    return tuple(display.setting(settings[name]) if name in settings else display.NOTHING for name in names)


@dataclass(frozen=True)
class Words:
    """The texts of the section that shows `chart`, a row of `sections.csv`; `short`: for the navigation."""

    chart: str
    title: str
    short: str
    lead: str


_WORDS = {row.chart: row for row in typed_rows(__file__, "sections.csv", Words)}


def sections(ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric) -> list[tuple[Chart, Words]]:
    """Return the charts that this run has figures for, with the words of their sections."""
    drawn = (
        breakdown(ranked, varying, metric),
        throughput_against_memory(ranked, varying, metric),
        effect_chart(effects(ranked)),
        scaling(ranked, varying, metric),
        predicted_and_measured(ranked, varying),
    )
    return [(chart, _WORDS[chart.name]) for chart in drawn if chart is not None]


def compiled_pairs(ranked: Sequence[Ranked]) -> list[Pair]:
    """Return all pairs, those of the best configurations first."""
    rows = [entry.row for entry in ranked if entry.throughput and entry.row.result.step_time_s]
    eager = {_rest(row): row for row in rows if display.setting(row.settings.get(_COMPILE)) == "false"}
    compiled = [row for row in rows if display.setting(row.settings.get(_COMPILE)) == "true"]
    pairs = [(eager[_rest(row)], row) for row in compiled if _rest(row) in eager]
    places = {id(row): place for place, row in enumerate(rows)}
    return sorted(pairs, key=lambda pair: min(places[id(row)] for row in pair))


def _rest(row: Configuration) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((name, display.setting(value)) for name, value in row.settings.items() if name != _COMPILE)
    )


def fusion_table(
    ranked: Sequence[Ranked], varying: Sequence[str], held: Mapping[str, Mapping[str, int]]
) -> Table | None:
    """Return a row for each figure of each pair; None if nothing ran both ways. `held`: bytes alive at the
    peak of each folder's trace, by the phase that allocated them."""
    lines: list[tuple[str, ...]] = []
    others = [name for name in varying if name != _COMPILE]
    for pair in compiled_pairs(ranked)[:_MOST_PAIRS]:
        title = label(pair[0], others)
        for name, before, after, words in _figures(pair, held):
            change = display.signed_percent(after / before - 1) if before else ""
            lines.append((title, name, words(before), words(after), change))
    return Table.of(("configuration", "figure", "eager", "compiled", "change"), lines)


def _figures(
    pair: Pair, held: Mapping[str, Mapping[str, int]]
) -> list[tuple[str, float, float, Callable[[float], str]]]:
    """Return name, both values and format of each figure that both sides know."""
    asked: tuple[tuple[str, Callable[[Configuration], float | None], Callable[[float], str]], ...] = (
        ("step time, ms", lambda row: row.result.step_time_s, display.milliseconds),
        ("kernels a step", lambda row: _of(row.result.work, "kernels"), display.count),
        ("copies a step", lambda row: _of(row.result.work, "copies"), display.count),
        (
            "read and written a step by kernels that memory limits, GiB",
            lambda row: _of(row.result.memory_traffic, "bytes"),
            display.gib,
        ),
        ("reserved, GiB", lambda row: row.result.reserved, display.gib),
    )
    found: list[tuple[str, float, float, Callable[[float], str]]] = []
    for name, value, words in asked:
        before, after = map(value, pair)
        if before is not None and after is not None:
            found.append((name, before, after, words))
    eager, compiled = (held.get(row.folder.name, {}) for row in pair)
    if eager and compiled:
        for phase in dict.fromkeys([*eager, *compiled]):
            title = f"at the peak, {_PHASES.get(phase, phase)}, GiB"
            found.append((title, eager.get(phase, 0), compiled.get(phase, 0), display.gib))
    return found


def _of(figures: Mapping[str, Any] | None, name: str) -> float | None:
    value = (figures or {}).get(name)
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A system's best throughput over the reference's: the median, the lowest and the highest over rounds of
    repeated runs. `rounds` 1: one run each, without a spread."""

    system: str
    row: Configuration
    reference: str
    ratio: float
    low: float
    high: float
    rounds: int
    losses: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which a row's loss differs from the reference's."""

    row: Configuration
    reference: Configuration
    step: int
    loss: float
    expected: float

    @property
    def sentence(self) -> str:
        """Return the difference in words."""
        return (
            f"{self.row.system} computes something else than {self.reference.system}: its loss in "
            f"step {self.step} is {self.loss:.6g}, not {self.expected:.6g} ({self.row.name})."
        )


def ratios(view: RunView) -> list[Ratio]:
    """Return each system against the reference, on the work of the fastest row: the reference first, then the
    fastest first. Empty if only one system did that work."""
    finished = [row for row in view.with_status(Status.OK) if row.result.step_time_s]
    if not finished:
        return []
    fastest = max(finished, key=lambda row: row.result.samples_per_s_per_gpu or 0.0)
    group = [row for row in finished if _work(row) == _work(fastest)]
    best: dict[str, Configuration] = {}
    for row in sorted(group, key=lambda row: row.result.step_time_s or 0.0):
        best.setdefault(row.system, row)
    if len(best) < 2:
        return []
    reference = best[_reference(best)]
    wrong = {difference.row.folder for difference in differences(view)}
    found = [_ratio(row, reference, wrong) for row in best.values()]
    return sorted(found, key=lambda each: (each.row is not reference, -each.ratio))


def differences(view: RunView) -> list[Difference]:
    """Return every row whose losses are known and differ from those of the reference for its work."""
    groups: dict[tuple[object, ...], list[Configuration]] = {}
    for row in view.with_status(Status.OK):
        if row.result.loss:
            groups.setdefault(_work(row), []).append(row)
    found = []
    for rows in groups.values():
        by_system: dict[str, Configuration] = {}
        for row in rows:
            by_system.setdefault(row.system, row)
        reference = by_system[_reference(by_system)]
        known = (_difference(row, reference) for row in rows if row is not reference)
        found += [difference for difference in known if difference is not None]
    return found


def _work(row: Configuration) -> tuple[object, ...]:
    return tuple(row.settings.get(name) for name in COMPUTED)


def _reference(systems: Mapping[str, Configuration]) -> str:
    """Return PyTorch's own system if there is one, else the first."""
    return next((name for name in _REFERENCES if name in systems), next(iter(systems)))


def _ratio(row: Configuration, reference: Configuration, wrong: set[Path]) -> Ratio:
    own, other = _rounds(row), _rounds(reference)
    pairs = list(zip(own, other, strict=True)) if len(own) == len(other) else [(median(own), median(other))]
    rounds = sorted(theirs / ours for ours, theirs in pairs)
    losses = "-" if not row.result.loss else "differ" if row.folder in wrong else "equal"
    return Ratio(
        row.system, row, reference.system, median(rounds), rounds[0], rounds[-1], len(rounds), losses
    )


def _rounds(row: Configuration) -> list[float]:
    repeats = row.result.repeats
    if repeats is not None and repeats.step_time_s:
        return repeats.step_time_s
    return [row.result.step_time_s or 0.0]


def _difference(row: Configuration, reference: Configuration) -> Difference | None:
    near = _NEAR.get(str(row.settings.get("param_dtype")), _NEAR_LOW_PRECISION)
    # Warm-up ends when steps are stable, so one run may have more steps than the other.
    for step, (own, expected) in enumerate(
        zip(row.result.loss or (), reference.result.loss or (), strict=False), start=1
    ):
        if own is None or expected is None or own != own or expected != expected:
            continue
        if abs(own - expected) > near * max(abs(expected), 1e-6):
            return Difference(row, reference, step, own, expected)
    return None
