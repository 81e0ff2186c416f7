"""Systems on one piece of work: how much faster each is than a reference, and whether they compute the same.

Rows that must compute the same are those whose settings differ only in how they do it (system, wrapping,
prefetch, ...). Among them

    speed    each system's best row against the reference's, round by round where runs were repeated: the
             runs of a round took place next to each other, so that a drift of the machine meets both
    losses   every row against the reference's, step by step; a faster system that computes something else is
             no faster system
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fsdpbench.reports.pages.view import Configuration, RunView, Status

COMPUTED = (
    "model", "gpus", "seq", "batch", "grad_accum", "tp", "cp", "param_dtype", "lora", "lora_targets",
    "lora_base", "optimizer", "optimizer_dtype", "linear_dtype", "clip", "implementation", "seed",
)  # fmt: skip
"""What decides the result of training, or how many samples a step has (with `tp` and `cp` a batch is of a
group of ranks); all other settings decide how it is reached."""
_REFERENCES = ("torch-fsdp2", "torch-fsdp1", "torch-ddp", "single")
_NEAR = {"fp32": 1e-4}
_NEAR_LOW_PRECISION = 0.01
"""How far losses may be apart, relative. Sums in another order move a loss in fp32 by 1e-6 a step or less;
gradients that are not reduced at all moved that of a tiny GPT by 3e-4 in seven steps."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A system's throughput over the reference's in its best row: over rounds of repeated runs the median,
    the lowest and the highest. `rounds` 1: one run each, which has no spread."""

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
    """The first step at which a row's loss is not the reference's."""

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
    """Return each system against the reference, on the work of the fastest row; the reference first, then
    fastest first. Empty where one system alone did that work."""
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
    """Return every row whose losses are not those of the reference of its work, where losses are known."""
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
    """Return PyTorch's own system where there is one, else the first."""
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
    # Warm-up ends when steps are stable, so that one may have taken more steps than the other.
    for step, (own, expected) in enumerate(
        zip(row.result.loss or (), reference.result.loss or (), strict=False), start=1
    ):
        if own is None or expected is None or own != own or expected != expected:
            continue
        if abs(own - expected) > near * max(abs(expected), 1e-6):
            return Difference(row, reference, step, own, expected)
    return None
