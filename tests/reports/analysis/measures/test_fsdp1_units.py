"""Units of torch's FSDP1, which its annotations do not name, found by the order of its hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.analysis.units import NUMBERED_UNITS

US = 1000
AUTOGRAD = (100, 101)
PREFIX = "FullyShardedDataParallel."


class Fsdp1:
    """Writes the hooks of a root and two units as torch's FSDP1 does: forward on one thread, backward on
    autograd's; a collective inside each hook that issues one."""

    def __init__(self, built: Any) -> None:
        self.built = built
        self.now = 10_000

    def at(self) -> int:
        return self.now * US

    def hook(self, name: str, issue: str | None = None, lane: Any = None, inner: str | None = None) -> None:
        """One hook of 10 us, with `inner` in its second half; `issue`: the collective, in the inner hook
        where there is one."""
        lane = lane or self.built.main
        start = self.at()
        self.built.annotation(PREFIX + name, start, start + 10 * US, lane)
        if inner:
            self.built.annotation(PREFIX + inner, start + 5 * US, start + 9 * US, lane)
            self.built.annotation(PREFIX + "rate_limiter", start + 5 * US, start + 6 * US, lane)
        if issue:
            launch = start + (7 if inner else 3) * US
            self.built.collective(
                issue, launch + 2 * US, launch + 4 * US, launch=launch, lane=lane, elements=80
            )
        self.now += 20

    def forward(self, units: int) -> None:
        began = self.at()
        self.now += 1
        self.hook("_pre_forward", "all_gather")
        for _ in range(units):
            start = self.at()
            self.now += 1
            self.hook("_pre_forward", "all_gather")
            self.compute()
            self.hook("_post_forward")
            self.built.annotation(PREFIX + "forward", start, self.at())
            self.now += 1
        self.hook("_post_forward")
        self.built.annotation(PREFIX + "forward", began, self.at())
        self.now += 1

    def backward(self, units: int, *, recompute: bool = False) -> None:
        """Each unit's gather is prefetched in the turn of the one before; the root is gathered in its own."""
        self.hook("_pre_backward_hook", "all_gather", AUTOGRAD, inner="_pre_backward_prefetch")
        for number in range(units):
            if recompute:
                start = self.at()
                self.now += 1
                self.hook("_pre_forward", None, AUTOGRAD)
                self.hook("_post_forward", None, AUTOGRAD)
                self.built.annotation(PREFIX + "forward", start, self.at(), AUTOGRAD)
                self.now += 1
            last = number == units - 1
            issue = None if last else "all_gather"
            self.hook("_pre_backward_hook", issue, AUTOGRAD, inner="_pre_backward_prefetch")
            self.compute(AUTOGRAD)
            self.hook("_post_backward_hook", "reduce_scatter", AUTOGRAD)
        self.hook("_post_backward_hook", "reduce_scatter", AUTOGRAD)

    def compute(self, lane: Any = None) -> None:
        start = self.at()
        self.built.kernel("gemm", start + 5 * US, start + 9 * US, launch=start, lane=lane or self.built.main)
        self.now += 20

    def analyzed(self, tmp_path: Path) -> RankAnalysis:
        self.built.step(0, 10_000 * US, self.at())
        return analyze([self.built.write(tmp_path / "rank0_trace.json")]).ranks[0]


def counts(rank: RankAnalysis) -> dict[str, dict[str, int]]:
    return {
        unit.unit: {name: figures.count for name, figures in unit.communication.items()}
        for unit in rank.units
    }


def test_units_are_numbered_in_the_order_of_their_forward(tmp_path: Path, trace_builder: Any) -> None:
    job = Fsdp1(trace_builder())
    job.forward(3)
    job.backward(3)
    rank = job.analyzed(tmp_path)
    both = {"all_gather": 2, "reduce_scatter": 1}
    # The root's turn in backward gathers the last unit ahead, and nothing is gathered for itself again.
    assert counts(rank) == {
        "root": {"all_gather": 1, "reduce_scatter": 1},
        "unit.0": both,
        "unit.1": both,
        "unit.2": both,
    }
    assert NUMBERED_UNITS in rank.warnings
    assert rank.work.limiter_waits == 4
    ahead = {gather.unit for gather in rank.gathers if gather.prefetched}
    assert ahead == {"unit.0", "unit.1", "unit.2"}
    assert sum(gather.prefetched for gather in rank.gathers) == 3


def test_a_checkpointed_forward_is_no_new_round(tmp_path: Path, trace_builder: Any) -> None:
    plain, again = Fsdp1(trace_builder()), Fsdp1(trace_builder())
    for job, recompute in ((plain, False), (again, True)):
        for _ in range(2):  # Two microbatches.
            job.forward(2)
            job.backward(2, recompute=recompute)
    assert counts(again.analyzed(tmp_path / "again")) == counts(plain.analyzed(tmp_path / "plain"))


def test_a_backward_that_does_not_fit_stays_unnamed(tmp_path: Path, trace_builder: Any) -> None:
    job = Fsdp1(trace_builder())
    job.forward(2)
    job.backward(1)
    rank = job.analyzed(tmp_path)
    assert counts(rank) == {
        "root": {"all_gather": 1},
        "unit.0": {"all_gather": 1},
        "unit.1": {"all_gather": 1},
    }


def test_a_model_that_is_one_unit(tmp_path: Path, trace_builder: Any) -> None:
    job = Fsdp1(trace_builder())
    for _ in range(2):
        job.forward(0)
        job.backward(0)
    assert set(counts(job.analyzed(tmp_path))) == {"root"}


def test_fsdp2_names_its_own(tmp_path: Path, fsdp_trace: Any) -> None:
    rank = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert {unit.unit for unit in rank.units} == {"blocks.0", "blocks.1"}
    assert NUMBERED_UNITS not in rank.warnings
