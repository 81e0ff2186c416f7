"""Charts of the whole run on the page, in their order, and the words around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.reports.pages import comparisons
from fsdpbench.reports.pages import whole_run as charts
from fsdpbench.reports.pages.effects import effects
from fsdpbench.reports.pages.ranking import Metric, Ranked
from fsdpbench.reports.pages.whole_run import Chart


@dataclass(frozen=True, slots=True)
class Section:
    """One chart's section on the page; `short` is its name in the navigation."""

    chart: Chart
    title: str
    short: str
    lead: str


def sections(ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric) -> list[Section]:
    """Return the sections that this run has figures for."""
    drawn: tuple[tuple[Chart | None, str, str, str], ...] = (
        (
            charts.breakdown(ranked, varying, metric),
            "Where the step goes",
            "Step breakdown",
            "One bar a configuration, by its place. A click on a bar shows its timeline. Places are by the "
            "timed steps; with allocator retries the traced step may be longer or shorter than their median.",
        ),
        (
            charts.throughput_against_memory(ranked, varying, metric),
            "Throughput against memory",
            "Memory",
            "Up and to the left is better; numbers are places on the Pareto front.",
        ),
        (
            charts.effect_chart(effects(ranked)),
            "Effect of each setting",
            "Effects",
            "What each value changes against the best configuration's, all other settings held equal.",
        ),
        (
            comparisons.peers(ranked, varying, metric),
            "Systems side by side",
            "Systems",
            "The best configuration of each system; the effect above compares them with equal settings.",
        ),
        (
            comparisons.scaling(ranked, varying, metric),
            "Scaling over GPUs",
            "Scaling",
            "Throughput of one GPU as their number grows, all else equal; a flat line is perfect scaling.",
        ),
        (
            comparisons.predicted_and_measured(ranked, varying),
            "Predicted and measured",
            "Predicted",
            "Simulated step times over those measured with the same settings.",
        ),
    )
    return [Section(chart, title, short, lead) for chart, title, short, lead in drawn if chart is not None]
