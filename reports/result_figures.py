"""Computation of a result's figures from the ranks' records (times, memory, FLOPs) and the trace analysis.

tflops_per_gpu          = model FLOPs per step and rank / step_time_s / 1e12
hardware_tflops_per_gpu = the same with recomputation
mfu, hfu                = those two / peak of the compute dtype

Times are the slowest rank's: the median of its timed steps, and its mean traced step, whose parts sum to it
in whole nanoseconds. Memory peaks are the greatest over ranks and steps. Unknown figures are None. The rows
of `reports.figures` name the function of each figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, methodcaller
from statistics import mean, median, quantiles

from fsdpbench.reports.analysis.figures import CollectiveFigures, communication_dict
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis, late_dict
from fsdpbench.reports.analysis.records import seconds
from fsdpbench.reports.rank_record import RankRecord
from fsdpbench.reports.result import PeakMemory


@dataclass(frozen=True)
class Ran:
    """The ranks of one configuration: one record for each, and the analysis of their traces."""

    records: Sequence[RankRecord]
    analysis: Analysis

    @cached_property
    def first(self) -> RankRecord:
        """The first rank's record, for values that all ranks share; an empty record if there is none."""
        return self.records[0] if self.records else RankRecord(0, 1, "", samples_per_step=None)

    @cached_property
    def step_time(self) -> float | None:
        """The slowest rank's median step, seconds."""
        medians = [median(each.step_times_s) for each in self.records if each.step_times_s]
        return max(medians) if medians else None

    @cached_property
    def slowest(self) -> RankAnalysis | None:
        """The rank with the longest mean traced step; None if nothing was traced."""
        return max(self.analysis.ranks, key=lambda rank: rank.mean_step.total, default=None)

    @cached_property
    def memory(self) -> list[list[dict[str, int | None]]]:
        """The memory by step of each rank that recorded it."""
        return [each.memory_per_step for each in self.records if each.memory_per_step]

    def rate(self, amount: float | None, unit: float = 1.0) -> float | None:
        """Return `amount`, a quantity per step, divided by the step time (and by `unit`)."""
        return None if amount is None or not self.step_time else amount / self.step_time / unit

    def rate_of(self, name: str) -> float | None:
        """Return a field of the first rank's record, such as `samples_per_step`, divided by the step time."""
        return self.rate(getattr(self.first, name))

    def flops(self, kind: str) -> float | None:
        """Return the FLOP/s of a kind, in 10^12; the mean over ranks if they differ (stages of a
        pipeline)."""
        known = [each.flops_per_step[kind] for each in self.records if kind in each.flops_per_step]
        return self.rate(mean(known) if known else None, 1e12)

    def share_of_peak(self, kind: str) -> float | None:
        """Return the FLOP/s of a kind as a share of the peak of the compute dtype."""
        reached, peak = self.flops(kind), self.first.peak_flops
        return reached * 1e12 / peak if reached is not None and peak else None


step_time = attrgetter("step_time")
samples_per_s = methodcaller("rate_of", "samples_per_step")
tokens_per_s = methodcaller("rate_of", "tokens_per_step")
tflops, hardware_tflops = methodcaller("flops", "model"), methodcaller("flops", "hardware")
mfu, hfu = methodcaller("share_of_peak", "model"), methodcaller("share_of_peak", "hardware")


def peak_memory(ran: Ran) -> dict[str, int | None] | None:
    """Return the peaks over steps and ranks, bytes."""
    if not ran.memory:
        return None
    steps = [step for rank in ran.memory for step in rank]
    return {
        kind: max((value for step in steps if (value := step.get(kind)) is not None), default=None)
        for kind in PeakMemory.__struct_fields__
    }


def alloc_retries(ran: Ran) -> float | None:
    """Return the allocator's retries per step, averaged over steps, on the rank with the most."""
    return max(
        (sum(step["alloc_retries"] or 0 for step in rank) / len(rank) for rank in ran.memory), default=None
    )


def ooms(ran: Ran) -> int | None:
    """Return the number of out-of-memory errors over all ranks and steps."""
    return sum(step["ooms"] or 0 for rank in ran.memory for step in rank) if ran.memory else None


def _traced(compute: Callable[[Ran, RankAnalysis], object]) -> Callable[[Ran], object]:
    """Return a function that computes a figure of the slowest traced rank; None if nothing was traced."""
    return lambda ran: None if ran.slowest is None else compute(ran, ran.slowest)


traced_step_time = _traced(lambda ran, slowest: seconds(slowest.mean_step.total))
time_s = _traced(lambda ran, slowest: slowest.mean_step.to_dict())
overlap_fraction = _traced(lambda ran, slowest: slowest.overlap_fraction)
trace_trusted = _traced(lambda ran, slowest: all(rank.trusted for rank in ran.analysis.ranks))
trace_warnings = _traced(
    lambda ran, slowest: [
        f"rank {rank.rank}: {line}" for rank in ran.analysis.ranks for line in rank.warnings
    ]
)
verdict = _traced(lambda ran, slowest: slowest.verdict.to_dict() if slowest.verdict else None)
late_all_gathers = _traced(lambda ran, slowest: late_dict(slowest.gathers))
work = _traced(lambda ran, slowest: slowest.work.to_dict(max(len(slowest.steps), 1)))
communication = _traced(lambda ran, slowest: _mean_communication(slowest))


def _mean_communication(rank: RankAnalysis) -> dict[str, dict[str, float | int | None]]:
    """Return counts, bytes and times of a mean step; the bandwidth is over all steps."""
    steps = max(len(rank.steps), 1)

    def mean(figures: CollectiveFigures) -> dict[str, float | int | None]:
        values = figures.to_dict()
        for key in ("count", "bytes", "wire_bytes", "time_s", "exposed_s"):
            value = values[key]
            if value is not None:
                # Steps are usually alike, so a mean count is usually a whole number.
                values[key] = (
                    value // steps if isinstance(value, int) and value % steps == 0 else value / steps
                )
        return values

    together = communication_dict(rank.communication)
    return {name: mean(rank.communication.get(name, CollectiveFigures())) for name in together}


def loss(ran: Ran) -> list[float] | None:
    """Return the mean over ranks for each step; None if a rank has no losses (simulated tensors)."""
    losses = [record.losses for record in ran.records]
    known = [each for each in losses if each is not None]
    if not known or len(known) < len(losses):
        return None
    return [sum(values) / len(values) for values in zip(*known, strict=False)]


def measured(ran: Ran) -> dict[str, list[float] | float | None] | None:
    """Return how the slowest rank's step time was measured: its samples (seconds), their spread, the warm-up,
    and the profiler's overhead. None if nothing was timed."""
    timed = [record for record in ran.records if record.step_times_s]
    if not timed:
        return None
    slowest = max(timed, key=lambda record: median(record.step_times_s))
    samples, profiled = slowest.step_times_s, slowest.profiler_step_times_s
    return {
        "step_times_s": samples,
        "spread": spread(samples),
        "warmup_times_s": slowest.warmup_times_s,
        "warmup_stable": slowest.warmup_stable,
        "profiler_overhead": median(profiled) / median(samples) - 1 if profiled else None,
    }


def spread(samples: Sequence[float]) -> float | None:
    """Return the distance between the quartiles as a share of the median, which one slow step does not change
    much. None for a single sample."""
    if len(samples) < 2:
        return None
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)
