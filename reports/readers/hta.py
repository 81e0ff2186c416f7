"""HolisticTraceAnalysis (package `traceinsight`, `import hta`; extra `hta`): a second computation of overlap,
and what it adds: the critical path, idle causes, the queues of launched kernels, trace diff.

HTA is imported only here, and only when called: it imports all of JupyterLab.  Its known faults are avoided:
times are not rounded to microseconds, the last step is kept, and synchronization records, which HTA would
count as computation, are removed."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsdpbench.base.errors import UsageError
from fsdpbench.base.reading import printable

_SIDES = ("before", "after")
_NO_ROUNDING = "HTA_DISABLE_NS_ROUNDING"


class HtaMissingError(UsageError):
    """Raised if HTA is not installed."""


def hta_available() -> bool:
    """Return whether the extra `hta` is installed, without importing HTA."""
    return importlib.util.find_spec("hta") is not None


def hta_overlap(trace: Path | str) -> float:
    """Return the overlap fraction as HTA computes it, to its precision of 0.0001. Raises `HtaMissingError`.

    The trace must hold a `ProfilerStep#` annotation and a collective.
    """
    analysis = _load(trace)
    events = analysis.t.traces[0]
    sync = analysis.t.symbol_table.get_sym_id_map().get("cuda_sync", -1)
    analysis.t.traces[0] = events[events["cat"] != sync]
    with _quiet():
        table = analysis.get_comm_comp_overlap(visualize=False)
    return float(table["comp_comm_overlap_pctg"].iloc[0]) / 100


def hta_critical_path(trace: Path | str, step: int) -> dict[str, float]:
    """Return seconds of one step's critical path by their bound ("gpu_compute_bound",
    "gpu_communication_bound", "cpu_bound", "gpu_kernel_launch_overhead", "gpu_kernel_kernel_overhead").

    Args:
        trace: a trace with launches and, for waits between streams, synchronization records.
        step: index of the step, from 0.

    Raises:
        HtaMissingError: the extra `hta` is not installed.
        ValueError: HTA finds no critical path in the trace.
    """
    analysis = _load(trace)
    with _quiet():
        graph, found = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=step)
        if not found:
            raise ValueError(f"{trace}: HTA finds no critical path in step {step}")
        path = graph.get_critical_path_breakdown()
    sums = path.groupby("bound_by")["duration"].sum()
    return {str(bound): float(time) / 1e6 for bound, time in sums.items() if bound and time > 0}


def hta_queue_length(trace: Path | str) -> dict[int, float]:
    """Return the average number of launched kernels that wait, by stream. Raises `HtaMissingError`."""
    analysis = _load(trace)
    with _quiet():
        table = analysis.get_queue_length_summary(ranks=[0])
    means = table["queue_length"]["mean"]
    return {int(stream): float(mean) for (_, stream), mean in means.items()}


def hta_idle_causes(trace: Path | str) -> dict[int, dict[str, float]]:
    """Return seconds of idle time by stream and HTA's categories ("host_wait", "kernel_wait", "other"). HTA
    counts a stream as idle even while another one works. Raises `HtaMissingError`."""
    analysis = _load(trace)
    with _quiet():
        table, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    found: dict[int, dict[str, float]] = {}
    for _, row in table.iterrows():
        found.setdefault(int(row["stream"]), {})[str(row["idle_category"])] = float(row["idle_time"]) / 1e6
    return found


class KernelChange(NamedTuple):
    """The number of runs of a kernel before and after, and their total times (s)."""

    count_before: float
    count_after: float
    time_before_s: float
    time_after_s: float

    @property
    def by(self) -> float:
        """Return the change of time, s."""
        return self.time_after_s - self.time_before_s


def hta_trace_diff(before: Path | str, after: Path | str) -> dict[str, KernelChange]:
    """Return the change of each kernel, by name, over all steps.

    Raises:
        HtaMissingError: the extra `hta` is not installed.
        ValueError: a trace has no steps.
    """
    sides = [_load(trace) for trace in (before, after)]
    with _quiet():
        from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

        labeled = [LabeledTrace(label=name, t=side.t) for name, side in zip(_SIDES, sides, strict=True)]
        first, second = labeled
        table = TraceDiff.compare_traces(
            first,
            second,
            control_iteration=first.iterations(),
            test_iteration=second.iterations(),
            device_type=DeviceType.GPU,
        )
    return {
        str(name): KernelChange(
            *(float(row[f"{side}_counts"]) for side in _SIDES),
            *(float(row[f"{side}_total_duration"]) / 1e6 for side in _SIDES),
        )
        for name, row in table.iterrows()
    }


def _load(trace: Path | str) -> Any:
    if not hta_available():
        raise HtaMissingError("HolisticTraceAnalysis is not installed: pip install 'fsdpbench[hta]'")
    os.environ[_NO_ROUNDING] = "1"
    with _quiet():
        from hta.configs.env_options import HTAEnvOptions
        from hta.trace_analysis import TraceAnalysis

        # HTA read the variable at its first import, which may have been elsewhere.
        HTAEnvOptions.instance().set_disable_ns_rounding(True)
        files = {0: str(Path(trace).resolve())}
        return TraceAnalysis(trace_files=files, include_last_profiler_step=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence HTA: it logs messages without use here, and pandas 2.2 warns about its use of pandas."""
    logger = logging.getLogger("hta")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


_MOST_NAMES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class HtaOpinion:
    """HTA's figures of one trace; a figure that HTA cannot compute is replaced by the reason, a text.

    overlap_fraction: 0 to 1.  critical_path_s: of the first step, by bound.  idle_causes_s, and queue_length
    (mean number of kernels): by stream.
    """

    trace: str
    overlap_fraction: float | str
    critical_path_s: dict[str, float] | str
    idle_causes_s: dict[int, dict[str, float]] | str
    queue_length: dict[int, float] | str


def hta_opinion(trace: Path) -> HtaOpinion:
    """Return all that HTA finds in a trace. Raises `HtaMissingError`."""
    return HtaOpinion(
        str(trace),
        _tried(lambda: hta_overlap(trace)),
        _tried(lambda: hta_critical_path(trace, 0)),
        _tried(lambda: hta_idle_causes(trace)),
        _tried(lambda: hta_queue_length(trace)),
    )


def hta_changes(before: Path, after: Path) -> dict[str, KernelChange] | str:
    """Return kernels whose count or time changed, largest change first, or the reason why HTA finds none."""
    found = _tried(lambda: hta_trace_diff(before, after))
    if isinstance(found, str):
        return found
    changed = {name: row for name, row in found.items() if row.count_before != row.count_after or row.by}
    return {name: changed[name] for name in sorted(changed, key=lambda name: -abs(changed[name].by))}


def describe_opinion(opinion: HtaOpinion) -> str:
    """Return the lines of `hta_opinion` for a terminal."""
    overlap = opinion.overlap_fraction
    lines = [
        f"HolisticTraceAnalysis on {opinion.trace}",
        f"  overlap             {overlap if isinstance(overlap, str) else f'{100 * overlap:.2f} %'}",
        f"  critical path       {_times(opinion.critical_path_s)}",
        *_by_stream("idle, stream", opinion.idle_causes_s, _times),
        *_by_stream("queue, stream", opinion.queue_length, lambda n: f"{n:.1f} kernels wait on average"),
    ]
    return "\n".join(printable(line) for line in lines)


def _by_stream(words: str, found: dict[int, T] | str, text: Callable[[T], str]) -> list[str]:
    if isinstance(found, str):
        return [f"  {words:<20}{found}"]
    return [f"  {f'{words} {stream}':<20}{text(each)}" for stream, each in sorted(found.items())]


def describe_changes(changes: dict[str, KernelChange] | str) -> str:
    """Return the lines of `hta_changes` for a terminal."""
    if isinstance(changes, str):
        return f"HolisticTraceAnalysis, trace diff: {changes}"
    lines = ["HolisticTraceAnalysis, trace diff: change of time, count before and after (all steps)"]
    lines += [
        f"  {1e3 * row.by:+12.3f} ms  {row.count_before:g} -> {row.count_after:g}  {name[:90]}"
        for name, row in list(changes.items())[:_MOST_NAMES]
    ]
    return "\n".join(printable(line) for line in lines)


def _tried(question: Callable[[], Any]) -> Any:
    """Return HTA's answer, or its error as a line: HTA fails in many ways on unexpected traces."""
    try:
        return question()
    except HtaMissingError:
        raise
    except Exception as error:
        return f"not found ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"


def _times(found: Any) -> str:
    if isinstance(found, str):
        return found
    return (
        ", ".join(f"{name.replace('_', ' ')} {1e3 * time:.3f} ms" for name, time in found.items()) or "none"
    )
