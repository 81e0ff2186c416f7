"""The table of figures: one row a figure of a result, which every list of figures is read from.

Results hold what rows compute, the index and the exports have a column for each `flat` row, the gate judges
those with `judged`, pages show those with a `column`, the schema describes those with `words`, and
`reports.consistency` checks the range of each.  A new figure is one row, and the function that computes it.
Relations between figures are the rows of `result_rules.csv`.

The order is that in which people read figures; that of `result.json` is the order of `Result`'s fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdpbench.reports import result_figures as ranks
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.result import PeakMemory, Result, StepParts
from fsdpbench.reports.result_figures import Ran, Record


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER where a change is only worth knowing."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


class Judged(Enum):
    """Whether the gate judges a figure. WITNESS: it does not, but keeps it in a baseline, since it binds
    those that are judged. MEASURED: it does where a step is not exact."""

    NO = "no"
    WITNESS = "witness"
    MEASURED = "measured"
    YES = "yes"


_NANOSECOND = 1e-9
"""Clocks and traces count them: no step takes less, nor does what it computes."""

_SOME = 1e-6
"""A mean over steps of what every step has at least once in a while."""

LARGEST = 2.0**63
"""No time, size or count of a step is beyond it, and sums and differences below it stay finite."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure, or a part of a result that holds some.

    Args:
        path: dotted place in `result.json` (`*`: any name), or a name that `reports.consistency` derives.
        name: in the index, in exports and in the gate, where that is not the path.
        unit: `s`, `B`, or nothing for counts and shares.
        worse: the direction in which it gets worse.
        judged: what the gate does with it.
        flat: whether the index and the exports have a column of it.
        in_index: its column in the index, where that is not its name.
        column: its header in the page's table, none without; `{each}` is `GPU` or `rank`.
        form: how people see it, the name of a function in `reports.page.display`.
        warned: whether the page marks values other than 0.
        rate: whether it is an amount over the step time: its interval is that of the step time, the other way
            round, and over repeated runs it follows the step time.
        least, most: what no run is beyond; None where it has no range.
        least_judged: a higher bound in the gate.
        alone: why no relation binds it.
        kind: its type in JSON.
        words: what it is, for the schema.
        always: whether results of configurations that did not run have it too, as null.
        computed: how it is made of records and traces; None for what a part holds, or the bench adds.
        since: the version that had it first.
    """

    path: str
    name: str = ""
    unit: str = ""
    worse: Worse = Worse.HIGHER
    judged: Judged = Judged.NO
    flat: bool = False
    in_index: str = ""
    column: str = ""
    form: str = "number"
    warned: bool = False
    rate: bool = False
    least: float | None = None
    most: float = math.inf
    least_judged: float = 0.0
    alone: str = ""
    kind: str = "number"
    words: str = ""
    always: bool = True
    computed: Callable[[Ran], object] | None = None
    since: str = "0.1.0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path)
        object.__setattr__(self, "in_index", self.in_index or self.name)

    def of(self, result: Result) -> Any:
        """Return what `result` holds of it, by its types; None where it holds nothing."""
        return result.at(self.path)

    def stored(self, result: Result) -> Any:
        """Return the value of this figure in the file of `result`; None if it is missing."""
        return result.stored(self.path)


def _rate(path: str, words: str, computed: Callable[[Ran], object], **others: Any) -> Figure:
    return Figure(
        path=path, words=words, worse=Worse.LOWER, rate=True, flat=True, computed=computed,
        **{"least": 0.0, **others},
    )  # fmt: skip


def _part(name: str, words: str, *, judged: Judged = Judged.NO, **others: Any) -> Figure:
    return Figure(
        path=f"time_s.{name}", name=f"{name}_s", in_index=f"time_{name}_s", unit="s", flat=True, least=0.0,
        words=words, judged=judged, form="milliseconds", **others,
    )  # fmt: skip


def _peak(kind: str, column: str = "") -> Figure:
    return Figure(
        path=f"peak_memory_bytes.{kind}", name=f"peak_{kind}_bytes", unit="B", judged=Judged.YES, flat=True,
        column=column, form="gib", least=1.0, least_judged=1.0, words="bytes",
    )  # fmt: skip


def _collective(kind: str) -> tuple[Figure, ...]:
    path, judged = f"communication.{kind}", Judged.YES
    return (
        Figure(path=f"{path}.count", name=f"{kind}_count", judged=judged, least=0.0),
        Figure(path=f"{path}.bytes", name=f"{kind}_bytes", unit="B", judged=judged, least=0.0),
    )


def _ranges(paths: str, least: float = 0.0, most: float = math.inf, alone: str = "") -> tuple[Figure, ...]:
    """Figures that are shown, stored and judged nowhere on their own."""
    return tuple(Figure(path=path, least=least, most=most, alone=alone) for path in paths.split())


def _alone(path: str, why: str) -> Figure:
    return Figure(path=path, alone=why)


FIGURES: tuple[Figure, ...] = (
    Figure(
        path="step_time_s", unit="s", judged=Judged.YES, flat=True, column="step, ms", form="milliseconds",
        least=_NANOSECOND, least_judged=_NANOSECOND, computed=ranks.step_time,
        words="median of the timed steps, slowest rank, seconds",
    ),
    # What disturbs a step only ever adds to it: the fastest one of a run is the least disturbed.
    Figure(path="fastest_step_s", unit="s", judged=Judged.MEASURED, least_judged=_NANOSECOND),
    _rate("samples_per_s_per_gpu", "samples a second and GPU", ranks.samples_per_s),
    _rate(
        "tokens_per_s_per_gpu", "tokens a second and GPU; null for models without tokens", ranks.tokens_per_s
    ),
    _rate(
        "tflops_per_gpu", "model FLOPs (no recomputation) a second and GPU, in 10^12", ranks.tflops,
        column="TFLOPS/{each}",
    ),
    _rate("hardware_tflops_per_gpu", "with recomputation", ranks.hardware_tflops),
    _rate(
        "mfu", "model FLOPs over the peak of the compute dtype", ranks.mfu, most=2.0, column="MFU",
        form="percent",
    ),
    _rate("hfu", "hardware FLOPs over the same peak", ranks.hfu, most=2.0, column="HFU", form="percent"),
    Figure(
        path="overlap_fraction", worse=Worse.LOWER, judged=Judged.YES, flat=True, column="overlap",
        form="percent", least=0.0, most=1.0, computed=ranks.overlap_fraction,
        words="communication hidden under computation over all communication",
    ),
    Figure(
        path="time_s", kind="object", computed=ranks.time_s,
        words="seconds of a step by what the device did; the four parts sum to the step",
    ),
    _part("compute_only", "computation, no communication"),
    _part("overlapped", "both", judged=Judged.WITNESS),
    _part(
        "exposed_communication", "communication, no computation", judged=Judged.YES, column="exposed, ms"
    ),
    _part("idle", "neither", judged=Judged.WITNESS),
    # All computation: what is hidden moves between the two parts, and is computed all the same.
    Figure(path="compute_s", unit="s", judged=Judged.YES, least_judged=_NANOSECOND),
    Figure(
        path="traced_step_time_s", unit="s", judged=Judged.WITNESS, flat=True, form="milliseconds",
        least=_NANOSECOND, computed=ranks.traced_step_time, words="mean traced step, seconds",
    ),
    Figure(path="peak_memory_bytes", kind="object", computed=ranks.peak_memory, words="bytes"),
    _peak("allocated", "allocated, GiB"),
    _peak("active"),
    _peak("reserved", "reserved, GiB"),
    Figure(
        path="alloc_retries_per_step", judged=Judged.YES, flat=True, column="retries a step", form="count",
        warned=True, least=0.0, computed=ranks.alloc_retries,
        words="allocator retries in a mean step, rank with the most",
    ),
    Figure(path="steps_spread", column="spread of steps", form="percent", warned=True),
    Figure(
        path="ooms", judged=Judged.YES, flat=True, column="out of memory", form="count", warned=True,
        least=0.0, computed=ranks.ooms, words="out-of-memory errors that were caught, all ranks",
        alone="errors that were caught; bound by the records alone",
    ),
    Figure(path="communication", kind="object", computed=ranks.communication, words="collectives by kind"),
    *_collective("all_gather"),
    *_collective("reduce_scatter"),
    *_collective("all_reduce"),
    *_ranges("communication.*.roof_share", most=2.0),
    *_ranges("communication.*.*"),
    Figure(path="prefetched_all_gathers", worse=Worse.LOWER, judged=Judged.YES),
    Figure(path="late_all_gathers", judged=Judged.YES),
    Figure(
        path="late_all_gathers", kind="object", always=False, computed=ranks.late_all_gathers,
        words="all-gathers that were not finished in time, by cause",
    ),
    *_ranges("late_all_gathers.* late_all_gathers.causes.*.*"),
    Figure(
        path="work", kind="object", always=False, computed=ranks.work,
        words="kernels, copies and waits for the rate limiter in a mean step",
    ),
    Figure(path="work.kernels", name="kernels", judged=Judged.YES, least=0.0, least_judged=_SOME),
    Figure(
        path="work.copies", name="copies", judged=Judged.YES, least=0.0,
        alone="also counts copies that are not kernels",
    ),
    Figure(
        path="work.limiter_waits", name="limiter_waits", worse=Worse.NEITHER, judged=Judged.YES, least=0.0,
        alone="a unit may wait several times, or not at all",
    ),
    *_ranges("work.*"),
    Figure(
        path="loss", kind="array of number", computed=ranks.loss,
        words="mean loss over ranks, step by step; null on sim",
        alone="depends on the data; bound by the records alone",
    ),
    Figure(
        path="measured", kind="object", computed=ranks.measured,
        words="the samples: step_times_s, spread, warmup_times_s, warmup_stable, profiler_overhead",
    ),
    *_ranges("measured.step_times_s measured.warmup_times_s", least=_NANOSECOND),
    *_ranges("measured.spread"),
    *_ranges("measured.profiler_overhead", least=-1.0),
    _alone("measured.warmup_stable", "by the warm-up's own criterion"),
    Figure(path="interval", kind="object"),
    *_ranges("interval.step_time_s", least=_NANOSECOND),
    *_ranges("interval.level", most=1.0, alone="of the published runs"),
    *_ranges("interval.runs interval.apart", alone="of the published runs"),
    *_ranges("interval.peak_memory_bytes.*"),
    Figure(
        path="trace_trusted", kind="boolean", always=False, computed=ranks.trace_trusted,
        words="whether the trace can be believed", alone="the verdict of the analysis",
    ),
    Figure(
        path="trace_warnings", kind="array of string", always=False, computed=ranks.trace_warnings,
        words="why not, and remarks",
    ),
    Figure(
        path="verdict", kind="object", always=False, computed=ranks.verdict,
        words="what the trace says to change: outcome, sentence, findings",
    ),
    *_ranges("repeats.step_time_s", least=_NANOSECOND),
    *_ranges("repeats.runs", least=1.0),
    *_ranges("repeats.failed repeats.spread"),
    *_ranges("memory_traffic.bytes", alone="of kernels that memory limits, timed by it and by more"),
    *_ranges("memory_traffic.*"),
    *_ranges("soak.steps hardware.memory_bytes", least=1.0),
    *_ranges("soak.steps_done soak.retries"),
    _alone("schema", "the form of the file"),
    _alone("hardware.cores", "of the machine"),
    _alone("graph.*", "counts of one capture"),
    _alone("compilation.*", "counts of the compiler"),
    _alone("buffer_rows.*", "rows of experts, which depend on a capacity"),
)  # fmt: skip

_PLACES = [*Result.__struct_fields__]
_PARTS = [*PeakMemory.__struct_fields__, *StepParts.__struct_fields__]


def flat() -> list[Figure]:
    """Return the figures that the index and the exports have a column of: those of the whole, then parts'."""

    def place(figure: Figure) -> tuple[bool, int, int]:
        head, _, tail = figure.path.partition(".")
        return bool(tail), _index(_PLACES, head), _index(_PARTS, tail)

    return sorted((figure for figure in FIGURES if figure.flat), key=place)


def rates() -> list[str]:
    """Return the names of the figures that are an amount over the step time."""
    return [figure.path for figure in FIGURES if figure.rate]


def nothing() -> dict[str, None]:
    """Return the figures of a configuration that did not run, in the order of `result.json`."""
    paths = {figure.path for figure in FIGURES if figure.always and figure.words and "." not in figure.path}
    return dict.fromkeys(sorted(paths | {"interval"}, key=lambda path: _index(_PLACES, path)))


def computed(records: Sequence[Record], analysis: Analysis) -> dict[str, Any]:
    """Return all figures that are made of records and traces; None for what cannot be known.

    Args:
        records: one object a rank (`rank{r}_record.json`).
        analysis: of the same ranks' traces, one configuration.
    """
    ran = Ran(records, analysis)
    made = [(figure.path, figure.computed) for figure in FIGURES if figure.computed is not None]
    made.sort(key=lambda row: _index(_PLACES, row[0]))
    return {path: compute(ran) for path, compute in made}


@functools.cache
def ranges() -> dict[str, tuple[float, float]]:
    """Return least and most of figures by their path, the more special paths first."""
    found = {row.path: (row.least, row.most) for row in FIGURES if row.least is not None}
    return found | {f"interval.{path}": (0.0, math.inf) for path in rates()}


def schema() -> dict[str, Any]:
    """Return the JSON schema of every figure at the top of a result, by name."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        if not figure.words:
            continue
        head, _, tail = figure.path.partition(".")
        if not tail:
            found[head] = found.get(head, {}) | _described(figure)
            continue
        part = found[head]
        part.setdefault("required", []).append(tail)
        part.setdefault("properties", {})[tail] = _described(figure)
        part["additionalProperties"] = False
    return found


def _described(figure: Figure) -> dict[str, Any]:
    kind, _, items = figure.kind.partition(" of ")
    described: dict[str, Any] = {"description": figure.words, "type": [kind, "null"]}
    if kind == "number":
        described["minimum"] = 0
        described |= {"maximum": figure.most} if figure.most == 1 else {}
    return described | ({"items": {"type": items}} if items else {})


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
