"""The table of what must hold between the figures of a result, and the range of each figure.

A figure of `result.json` is in at least one rule, or in `UNBOUND` with the reason why no other figure says
anything about it. `tests/bench/check/test_consistency.py` holds every figure to that, and docs/gate.md to this table.

    names        dotted paths in result.json, below; `compute_s` and `fastest_step_s` are computed from others
    f(name)      of a list: median, least, greatest, first, last, count, spread; `medians` of a list of lists
    sum(a.~.b)   over everything in the place of ~
    @            each of `each`
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Relation(Enum):
    """How two sides are related; `words` says it of two figures that are not."""

    EQUAL = "="
    AT_MOST = "<="
    BOTH_ZERO = "zero with"
    NEAR = "near"

    @property
    def words(self) -> str:
        return {
            Relation.EQUAL: "which are one figure",
            Relation.AT_MOST: "which cannot be less",
            Relation.BOTH_ZERO: "and neither is zero without the other",
            Relation.NEAR: "which are near each other",
        }[self]


@dataclass(frozen=True)
class Tolerance:
    """By how much two sides may differ, and why. `factor`: of figures that are only near each other."""

    relative: float
    absolute: float
    reason: str
    factor: float = 1.0


EXACT = Tolerance(0.0, 0.0, "whole numbers, or the same number")
ROUNDING = Tolerance(1e-9, 0.0, "floating point, rounded a few times")
NANOSECONDS = Tolerance(1e-9, 2e-8, "times are whole nanoseconds, and a mean step's parts are rounded down")
TINY = Tolerance(0.0, 1e-3, "a nanosecond of communication may be rounded away")
BYTES = Tolerance(1e-9, 1.0, "ends of intervals are rounded to bytes")
ALIKE = Tolerance(0.0, 0.0, "steps of a simulation are alike, if not always in the last percent", factor=1.1)
OTHER_STEPS = Tolerance(0.0, 0.0, "other steps, perhaps of another rank: a factor of two", factor=2.0)


@dataclass(frozen=True)
class Rule:
    """One relation. `device`: `any`, `sim`, or `real`.  unless: it does not hold where one of these is known
    and not zero.  each: what stands for `*`."""

    left: str
    relation: Relation
    right: str
    tolerance: Tolerance
    device: str = "any"
    unless: tuple[str, ...] = ()
    each: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return self.relation.words

    def holds(self, left: Any, right: Any) -> bool:
        """Whether two values are so related. Raises `TypeError` for what cannot be compared."""
        if isinstance(left, list) and isinstance(right, list):
            pairs = zip(left, right, strict=False)
            return len(left) == len(right) and all(self.holds(*pair) for pair in pairs)
        if isinstance(left, str) or isinstance(right, str):
            return bool(left == right)
        margin = self.tolerance.absolute + self.tolerance.relative * max(abs(left), abs(right))
        if self.relation is Relation.BOTH_ZERO:
            return bool(right == 0 if left == 0 else right != 0 or abs(left) <= margin)
        if self.relation is Relation.NEAR:
            return bool(left <= right * self.tolerance.factor and right <= left * self.tolerance.factor)
        return bool(left - right <= margin and (self.relation is Relation.AT_MOST or right - left <= margin))


EVERY_KIND = ("each kind of collective",)
"""Stands for those that a result has."""

_SPEEDS = (
    *("samples_per_s_per_gpu", "tokens_per_s_per_gpu", "tflops_per_gpu", "hardware_tflops_per_gpu"),
    *("mfu", "hfu"),
)
_KIND = "communication.@"
ONE_SEQUENCE, TWO_SEQUENCES = ("gpt", "llama", "decoder"), ("t5",)
"""Models by the start of their names: tokens of a sample are those of one sequence, or of source and target."""
_PEAKS = ("allocated", "active", "reserved")
_REPEATED = ("repeats.runs",)
_OTHER_STEPS = ("config.script.path", "soak.steps")
_SAMPLES = "config.settings.batch * config.settings.grad_accum / config.settings.tp / config.settings.cp"
_UNTIMED = (*_OTHER_STEPS, "untimed_traced_steps")
_COMMUNICATION = "time_s.overlapped + time_s.exposed_communication"
_EQUAL, _AT_MOST, _BOTH_ZERO, _NEAR = Relation

RULES = (
    # What ran, and how it ended.
    Rule("device", _EQUAL, "config.device", EXACT),
    Rule("is_sim", _AT_MOST, "hardware.simulated", EXACT),
    Rule("hardware.name", _EQUAL, "packaged_profile", EXACT),
    Rule("compiled", _AT_MOST, "config.settings.compile", EXACT),
    Rule("is_ok + has_cause", _EQUAL, "1", EXACT),
    # The step: of the timed steps, and of all runs.
    Rule("step_time_s", _EQUAL, "median(measured.step_times_s)", ROUNDING, unless=_REPEATED),
    Rule("step_time_s", _EQUAL, "median(repeats.step_time_s)", ROUNDING),
    Rule("first(repeats.step_time_s)", _EQUAL, "median(measured.step_times_s)", ROUNDING),
    Rule("repeats.step_time_s", _EQUAL, "medians(repeats.samples_s)", ROUNDING),
    Rule("count(repeats.step_time_s) + repeats.failed", _EQUAL, "repeats.runs", EXACT),
    Rule("repeats.spread", _EQUAL, "spread(repeats.step_time_s)", ROUNDING),
    Rule("measured.spread", _EQUAL, "spread(measured.step_times_s)", ROUNDING),
    Rule("fastest_step_s", _AT_MOST, "step_time_s", ROUNDING, unless=_REPEATED),
    Rule(
        "config.measurement.timed_steps", _AT_MOST, "count(measured.step_times_s)", EXACT, unless=_OTHER_STEPS
    ),
    Rule(
        "config.measurement.warmup_steps", _AT_MOST, "count(measured.warmup_times_s)", EXACT,
        unless=_OTHER_STEPS,
    ),
    # Speeds.
    Rule("samples_per_s_per_gpu * step_time_s", _EQUAL, _SAMPLES, ROUNDING, unless=_OTHER_STEPS),
    Rule(
        "tokens_per_s_per_gpu / samples_per_s_per_gpu", _EQUAL,
        "sequences_a_sample * config.settings.seq", ROUNDING, unless=_OTHER_STEPS,
    ),
    Rule("tflops_per_gpu", _AT_MOST, "hardware_tflops_per_gpu", ROUNDING),
    Rule("mfu * hardware_tflops_per_gpu", _EQUAL, "hfu * tflops_per_gpu", ROUNDING),
    Rule("mfu", _AT_MOST, "hfu", ROUNDING),
    Rule("@ * step_time_s", _EQUAL, "first(interval.@) * last(interval.step_time_s)", ROUNDING, each=_SPEEDS),
    Rule("@ * step_time_s", _EQUAL, "last(interval.@) * first(interval.step_time_s)", ROUNDING, each=_SPEEDS),
    Rule("first(interval.step_time_s)", _AT_MOST, "step_time_s", ROUNDING),
    Rule("step_time_s", _AT_MOST, "last(interval.step_time_s)", ROUNDING),
    # The traced step, its parts, and its work.
    Rule(f"time_s.compute_only + {_COMMUNICATION} + time_s.idle", _EQUAL, "traced_step_time_s", NANOSECONDS),
    Rule("least(measured.step_times_s)", _AT_MOST, "traced_step_time_s", NANOSECONDS, "sim", _UNTIMED),
    Rule("traced_step_time_s", _AT_MOST, "greatest(measured.step_times_s)", NANOSECONDS, "sim", _UNTIMED),
    Rule("traced_step_time_s", _NEAR, "step_time_s", ALIKE, "sim", (*_OTHER_STEPS, "has_retries", "config.jitter.seed")),
    Rule(
        "traced_step_time_s", _NEAR,
        "median(measured.step_times_s) + measured.profiler_overhead * median(measured.step_times_s)",
        OTHER_STEPS, "real", ("many_traced_steps",),
    ),
    Rule("compute_s + time_s.exposed_communication", _AT_MOST, "traced_step_time_s", NANOSECONDS),
    Rule("work.kernels", _BOTH_ZERO, "compute_s", EXACT),
    # Communication.
    Rule(
        "overlap_fraction * time_s.overlapped + overlap_fraction * time_s.exposed_communication",
        _EQUAL, "time_s.overlapped", NANOSECONDS,
    ),
    Rule("1 - overlap_fraction", _BOTH_ZERO, "time_s.exposed_communication", TINY),
    Rule(f"{_KIND}.exposed_s", _AT_MOST, f"{_KIND}.time_s", NANOSECONDS, each=EVERY_KIND),
    Rule(f"{_KIND}.exposed_s", _AT_MOST, "time_s.exposed_communication", NANOSECONDS, each=EVERY_KIND),
    Rule("time_s.exposed_communication", _AT_MOST, "sum(communication.~.exposed_s)", NANOSECONDS),
    Rule(f"{_KIND}.time_s", _AT_MOST, _COMMUNICATION, NANOSECONDS, each=EVERY_KIND),
    Rule(_COMMUNICATION, _AT_MOST, "sum(communication.~.time_s)", NANOSECONDS),
    Rule(f"{_KIND}.count", _BOTH_ZERO, f"{_KIND}.bytes", EXACT, each=EVERY_KIND),
    Rule(f"{_KIND}.count", _BOTH_ZERO, f"{_KIND}.time_s", EXACT, each=EVERY_KIND),
    Rule(f"{_KIND}.wire_bytes", _AT_MOST, f"2 * {_KIND}.bytes", EXACT, each=EVERY_KIND),
    Rule(
        f"{_KIND}.bus_bandwidth_bytes_per_s * {_KIND}.time_s", _AT_MOST, f"{_KIND}.wire_bytes",
        NANOSECONDS, each=EVERY_KIND,
    ),
    Rule(
        f"{_KIND}.bus_bandwidth_bytes_per_s", _AT_MOST, f"{_KIND}.best_bus_bandwidth_bytes_per_s",
        ROUNDING, each=EVERY_KIND,
    ),
    Rule(
        f"{_KIND}.roof_share * {_KIND}.roof_bus_bandwidth_bytes_per_s", _EQUAL,
        f"{_KIND}.bus_bandwidth_bytes_per_s", ROUNDING, each=EVERY_KIND,
    ),
    Rule(
        "late_all_gathers.count", _AT_MOST,
        "config.measurement.traced_steps * communication.all_gather.count", ROUNDING, "sim", _OTHER_STEPS,
    ),
    Rule("late_all_gathers.late", _AT_MOST, "late_all_gathers.count", EXACT),
    Rule("late_all_gathers.prefetched", _AT_MOST, "late_all_gathers.count", EXACT),
    Rule("late_all_gathers.late", _EQUAL, "sum(late_all_gathers.causes.~.count)", EXACT),
    Rule("late_all_gathers.late_s", _EQUAL, "sum(late_all_gathers.causes.~.time_s)", NANOSECONDS),
    Rule("late_all_gathers", _AT_MOST, "communication.all_gather.count", ROUNDING, "sim"),
    Rule("prefetched_all_gathers", _AT_MOST, "communication.all_gather.count", ROUNDING, "sim"),
    # Memory.
    Rule("peak_memory_bytes.allocated", _AT_MOST, "peak_memory_bytes.active", EXACT),
    Rule("peak_memory_bytes.active", _AT_MOST, "peak_memory_bytes.reserved", EXACT),
    Rule("peak_memory_bytes.reserved", _AT_MOST, "hardware.memory_bytes", EXACT),
    Rule("first(interval.peak_memory_bytes.@)", _AT_MOST, "peak_memory_bytes.@", BYTES, each=_PEAKS),
    Rule("peak_memory_bytes.@", _AT_MOST, "last(interval.peak_memory_bytes.@)", BYTES, each=_PEAKS),
    Rule("has_retries", _AT_MOST, "interval.risky", EXACT),
    Rule("soak.retries", _EQUAL, "sum(soak.over_steps.alloc_retries)", EXACT),
    Rule("soak.steps_done", _AT_MOST, "soak.steps", EXACT),
)  # fmt: skip
"""One row a relation. A new figure of a result needs one here, or a reason in `UNBOUND`."""

UNBOUND = {
    "schema": "the form of the file",
    "ooms": "counts errors that were caught; nothing else in the result remembers them",
    "loss": "depends on the data",
    "hardware.cores": "of the machine",
    "measured.warmup_stable": "by the warm-up's own criterion",
    "interval.level": "of the published runs",
    "interval.runs": "of the published runs",
    "interval.apart": "of the published runs",
    "work.copies": "also counts copies that are no kernels",
    "work.limiter_waits": "a unit may wait several times, or not at all",
    "memory_traffic.bytes": "of kernels that memory limits, which are timed by it and by more",
    "trace_trusted": "the analysis' own opinion",
    "graph.*": "counts of one capture",
    "compilation.*": "counts of the compiler",
    "buffer_rows.*": "rows of experts, which depend on a capacity",
}
"""Figures that no other one says anything about, with the reason."""

_ANY = (0.0, math.inf)
_SHARE = (0.0, 1.0)
_TIME = (1e-9, math.inf)

RANGES: dict[str, tuple[float, float]] = {
    "step_time_s": _TIME,
    "traced_step_time_s": _TIME,
    "measured.step_times_s": _TIME,
    "measured.warmup_times_s": _TIME,
    "measured.spread": _ANY,
    "measured.profiler_overhead": (-1.0, math.inf),
    "repeats.step_time_s": _TIME,
    "repeats.runs": (1.0, math.inf),
    "repeats.failed": _ANY,
    "repeats.spread": _ANY,
    **dict.fromkeys(_SPEEDS[:4], _ANY),
    **dict.fromkeys(_SPEEDS[4:], (0.0, 2.0)),
    **{f"interval.{speed}": _ANY for speed in _SPEEDS},
    "interval.level": _SHARE,
    "interval.step_time_s": _TIME,
    "interval.runs": _ANY,
    "interval.apart": _ANY,
    "interval.peak_memory_bytes.*": _ANY,
    "peak_memory_bytes.*": (1.0, math.inf),
    "hardware.memory_bytes": (1.0, math.inf),
    "alloc_retries_per_step": _ANY,
    "ooms": _ANY,
    "time_s.*": _ANY,
    "overlap_fraction": _SHARE,
    "communication.*.roof_share": (0.0, 2.0),
    "communication.*.*": _ANY,
    "late_all_gathers.*": _ANY,
    "late_all_gathers.causes.*.*": _ANY,
    "work.*": _ANY,
    "memory_traffic.*": _ANY,
    "soak.steps": (1.0, math.inf),
    "soak.steps_done": _ANY,
    "soak.retries": _ANY,
}
"""Least and most of each figure that no run is beyond, in its unit; `*` is one part of a name."""
