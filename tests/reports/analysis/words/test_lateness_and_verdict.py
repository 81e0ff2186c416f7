"""Why all-gathers come late, and the verdict: one trace made for each cause, and one for none.

Every trace is one step of 1 ms (times in us below), with blocks.0 computed before the gather of blocks.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.analysis.lateness import GatherTiming, LateCause
from fsdpbench.reports.analysis.model import Outcome
from fsdpbench.reports.analysis.text import describe

BASE = 1_000_000


def at(time: float) -> int:
    return BASE + int(time * 1000)


class Step:
    """One step in which `blocks.0` runs from 20 to 300 and then `blocks.1` needs its parameters."""

    def __init__(self, builder: Any, phase: str = "backward") -> None:
        self.built = builder()
        self.turn = f"pre_{phase}"
        self.built.step(0, at(0), at(1000))
        self.built.annotation(phase, at(0), at(999))
        self.gather("blocks.0", 1, (5, 15), launch=2)
        self.wait("blocks.0", 4)
        self.built.kernel("work_0", at(20), at(300), launch=at(6))

    def gather(self, unit: str, issue: float, ran: tuple[float, float], launch: float | None = None) -> None:
        self.built.annotation(f"FSDP::all_gather ({unit})", at(issue), at(issue + 2))
        launch = issue + 1 if launch is None else launch
        self.built.collective("all_gather", at(ran[0]), at(ran[1]), launch=at(launch), elements=8_000)

    def turn_of(self, unit: str, start: float, end: float) -> None:
        self.built.annotation(f"FSDP::{self.turn} ({unit})", at(start), at(end))

    def wait(self, unit: str, start: float) -> None:
        self.built.annotation(f"FSDP::wait_all_gather ({unit})", at(start), at(start + 1))

    def finish(self, tmp_path: Path, work: tuple[float, float], launch: float) -> RankAnalysis:
        self.built.kernel("work_1", at(work[0]), at(work[1]), launch=at(launch))
        return analyze([self.built.write(tmp_path / "rank0_trace.json")]).ranks[0]


def of_block_1(rank: RankAnalysis) -> GatherTiming:
    (gather,) = [gather for gather in rank.gathers if gather.unit == "blocks.1"]
    return gather


@pytest.fixture
def backward(trace_builder: Any) -> Step:
    return Step(trace_builder)


def test_in_time(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 12)
    backward.gather("blocks.1", 8, (100, 200))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (300, 980), launch=45)
    gather = of_block_1(rank)
    assert (gather.late, gather.cause, gather.prefetched) == (0, None, True)
    assert rank.verdict is not None
    assert rank.verdict.outcome is Outcome.FINE
    assert rank.verdict.findings == ()
    assert "96 %" in rank.verdict.sentence


def test_the_first_of_a_step_has_nothing_to_hide_behind(tmp_path: Path, backward: Step) -> None:
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (300, 980), launch=45)
    assert [(gather.unit, gather.cause) for gather in rank.gathers] == [("blocks.0", LateCause.FIRST)]


def test_no_prefetch_behind_a_reduce_scatter(tmp_path: Path, backward: Step) -> None:
    """The paper's case: the next unit's gather queues behind the reduction that was issued before it."""
    backward.built.annotation("FSDP::reduce_scatter (blocks.0)", at(30), at(33))
    backward.built.collective("reduce_scatter", at(300), at(450), launch=at(31), elements=8_000)
    # What follows the reduction on its own stream holds up no computation.
    backward.built.kernel("cast of the reduced gradient", at(450), at(460), launch=at(34), stream=24)
    backward.turn_of("blocks.1", 36, 46)
    backward.gather("blocks.1", 37, (450, 600))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (600, 980), launch=50)
    gather = of_block_1(rank)
    assert gather.cause is LateCause.NO_PREFETCH
    assert gather.behind == "reduce_scatter (blocks.0)"
    assert (
        gather.needed,
        gather.late,
        gather.waited[LateCause.QUEUED],
        gather.waited[LateCause.TRANSFER],
    ) == (
        at(300),
        300_000,
        150_000,
        150_000,
    )
    verdict = rank.verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.FOUND
    first = verdict.findings[0]
    assert (first.cause, first.share, first.gain) == ("no_prefetch_backward", 0.3, 0.3)
    assert [(each.setting, each.value) for each in first.suggestions] == [("backward_prefetch", "pre")]
    assert "30 % of backward waits for all-gathers of `blocks.1`" in verdict.sentence
    assert "behind reduce_scatter (blocks.*)" in verdict.sentence


def test_no_prefetch_in_forward(tmp_path: Path, trace_builder: Any) -> None:
    """The CPU waits for work of its own, so the gather of the next unit starts when it is needed."""
    step = Step(trace_builder, phase="forward")
    step.turn_of("blocks.1", 290, 310)
    step.gather("blocks.1", 291, (300, 500))
    step.wait("blocks.1", 295)
    rank = step.finish(tmp_path, (500, 980), launch=305)
    assert of_block_1(rank).cause is LateCause.NO_PREFETCH
    assert rank.verdict is not None
    assert rank.verdict.findings[0].cause == "no_prefetch_forward"
    assert rank.verdict.findings[0].suggestions[0].setting == "forward_prefetch"


def test_rate_limiter(tmp_path: Path, backward: Step) -> None:
    backward.built.annotation("FSDP::limiter_wait (blocks.1)", at(20), at(400))
    backward.turn_of("blocks.1", 15, 420)
    backward.gather("blocks.1", 401, (405, 500))
    backward.wait("blocks.1", 410)
    # The wait comes after the limiter's, so what is launched after it decides when it was needed.
    backward.built.annotation("FSDP::wait_all_gather (blocks.1)", at(12), at(410))
    rank = backward.finish(tmp_path, (500, 980), launch=13)
    gather = of_block_1(rank)
    assert gather.cause is LateCause.RATE_LIMITER
    assert gather.waited[LateCause.RATE_LIMITER] == 100_000
    assert rank.verdict is not None
    assert "held back by the rate limiter" in rank.verdict.sentence


def test_cpu_late(tmp_path: Path, backward: Step) -> None:
    """Another thread issues the gather long after the device ran out of work."""
    backward.built.annotation("FSDP::wait_all_gather (blocks.1)", at(12), at(610))
    backward.gather("blocks.1", 600, (605, 650))
    rank = backward.finish(tmp_path, (650, 980), launch=13)
    gather = of_block_1(rank)
    assert gather.cause is LateCause.CPU_LATE
    assert gather.waited[LateCause.CPU_LATE] == 301_000
    assert rank.verdict is not None
    assert "not ahead of the device" in rank.verdict.sentence


def test_queued_behind_another_gather(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 20)
    backward.gather("blocks.2", 7, (20, 600))
    backward.gather("blocks.1", 10, (600, 700))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (700, 980), launch=45)
    gather = of_block_1(rank)
    assert (gather.cause, gather.behind) == (LateCause.QUEUED, "all_gather (blocks.2)")
    assert (gather.waited[LateCause.QUEUED], gather.waited[LateCause.TRANSFER]) == (300_000, 100_000)
    assert rank.verdict is not None
    assert "queue behind all_gather (blocks.*)" in rank.verdict.sentence


def test_waiting_for_an_event(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 20)
    backward.gather("blocks.1", 10, (500, 600))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (600, 980), launch=45)
    gather = of_block_1(rank)
    assert (gather.cause, gather.waited[LateCause.EVENT], gather.waited[LateCause.TRANSFER]) == (
        LateCause.EVENT,
        200_000,
        100_000,
    )
    assert rank.verdict is not None
    assert "wait for memory or another stream" in rank.verdict.sentence


def test_transfer_longer_than_the_computation_beside_it(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 20)
    backward.gather("blocks.1", 10, (15, 700))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (700, 980), launch=45)
    gather = of_block_1(rank)
    assert (gather.cause, gather.waited[LateCause.TRANSFER]) == (LateCause.TRANSFER, 400_000)
    assert rank.verdict is not None
    assert rank.verdict.findings[0].share == 0.4
    assert "longer than the computation" in rank.verdict.sentence


def test_blocking_on_a_cpu_trace(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    built.step(0, at(0), at(1000))
    for number, (start, end) in enumerate(((1, 100), (400, 600))):
        built.annotation(f"FSDP::all_gather (blocks.{number})", at(start), at(end))
        built.op("c10d::_allgather_base_", at(start + 1), at(start + 5))
        built.annotation("gloo:all_gather", at(start + 6), at(end - 1), lane=(100, 7))
        built.annotation(f"FSDP::wait_all_gather (blocks.{number})", at(end), at(end + 1))
        built.op("aten::mm", at(end + 5), at(end + 250))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert [gather.cause for gather in rank.gathers] == [LateCause.FIRST, LateCause.BLOCKING]
    assert rank.gathers[1].late == 198_000
    assert rank.verdict is not None
    assert "block the program" in rank.verdict.sentence


def test_an_all_gather_of_broadcasts_counts_once(tmp_path: Path, trace_builder: Any) -> None:
    """On gloo `impl` gathers by a broadcast a rank: the gather lasts from the first to the last of them."""
    built = trace_builder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    built.step(0, at(0), at(1000))
    for number, start in enumerate((1, 400)):
        built.annotation(f"FSDP::all_gather (blocks.{number})", at(start), at(start + 10))
        for part, (begin, end) in enumerate(((12, 60), (14, 90))):
            built.op("c10d::broadcast_", at(start + 2 + part), at(start + 3 + part))
            built.annotation("gloo:broadcast", at(start + begin), at(start + end), lane=(100, 7 + part))
        built.annotation(f"FSDP::wait_all_gather (blocks.{number})", at(start + 20), at(start + 91))
        built.op("aten::mm", at(start + 95), at(start + 250))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.communication["all_gather"].count == len(rank.gathers) == 2
    first, second = rank.gathers
    assert (first.issued, first.started, first.ended) == (at(3), at(13), at(91))
    assert (second.late, second.unit) == (70_000, "blocks.1")


def test_figures_by_unit_are_in_the_contract(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 20)
    backward.gather("blocks.1", 10, (15, 700))
    backward.wait("blocks.1", 40)
    rank = backward.finish(tmp_path, (700, 980), launch=45)
    printed = rank.to_dict()
    assert printed["units"][1]["late_all_gathers"] == {
        "count": 1,
        "prefetched": 1,
        "late": 1,
        "late_s": 0.0004,
        "causes": {"transfer": {"count": 1, "time_s": 0.0004}},
    }
    assert printed["units"][1]["last_step_all_gathers"] == [
        {
            "step": 0,
            "phase": "backward",
            "issued_s": 11e-6,
            "started_s": 15e-6,
            "ended_s": 700e-6,
            "needed_s": 300e-6,
            "late_s": 400e-6,
            "cause": "transfer",
            "waited_s": {"cpu_late": 0, "rate_limiter": 0, "queued": 0, "event": 0, "transfer": 400e-6},
            "prefetched": True,
            "behind": "all_gather (blocks.0)",
        }
    ]
    assert printed["late_all_gathers"]["count"] == 2
    assert printed["verdict"]["outcome"] == "found"
    assert printed["verdict"]["findings"][0]["try"][0] == {"setting": "batch", "value": "more"}
    assert rank.verdict is not None
    assert rank.verdict.sentence in describe(analyze([tmp_path]))


def test_root_only(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.annotation("FSDP::all_gather (root)", at(1), at(3))
    built.collective("all_gather", at(5), at(305), launch=at(2))
    built.annotation("FSDP::wait_all_gather (root)", at(3), at(4))
    built.kernel("work", at(305), at(990), launch=at(5))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    (finding,) = rank.verdict.findings
    assert finding.cause == "root_only"
    assert finding.share == 0.3
    assert finding.suggestions[0].value == "block"


@pytest.mark.parametrize(("turn", "cause"), [(1, "several_roots"), (501, "root_only")])
def test_two_gathers_in_a_row_are_of_two_roots(
    tmp_path: Path, trace_builder: Any, turn: int, cause: str
) -> None:
    """Blocks that are called without the module around them have no names in a trace, as one unit has none.
    Backward begins at `turn`: with the first gather, or with the second."""
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.annotation("backward", at(turn - 1), at(999))
    for start in (2, 502):
        built.annotation("FSDP::all_gather", at(start), at(start + 2))
        built.collective("all_gather", at(start + 4), at(start + 204), launch=at(start + 1))
        built.annotation("FSDP::wait_all_gather", at(start + 2), at(start + 3))
        built.kernel("work", at(start + 204), at(start + 490), launch=at(start + 4))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert [gather.unit for gather in rank.gathers] == ["root", "root"]
    assert rank.verdict is not None
    assert rank.verdict.findings[0].cause == cause
    assert "()" not in rank.verdict.sentence


def test_exposed_reduction(tmp_path: Path, backward: Step) -> None:
    backward.turn_of("blocks.0", 0.5, 20)
    backward.gather("blocks.1", 10, (15, 100))
    backward.wait("blocks.1", 40)
    backward.built.annotation("FSDP::reduce_scatter (blocks.1)", at(60), at(63))
    backward.built.collective("reduce_scatter", at(800), at(990), launch=at(61), elements=8_000)
    rank = backward.finish(tmp_path, (300, 800), launch=45)
    assert rank.verdict is not None
    assert [finding.cause for finding in rank.verdict.findings] == ["exposed_reduce_scatter"]
    assert rank.verdict.findings[0].share == 0.19


def test_collectives_between_layers_are_of_no_unit(tmp_path: Path, backward: Step) -> None:
    backward.gather("blocks.1", 30, (40, 60))
    backward.wait("blocks.1", 290)
    backward.built.collective("all_gather", at(700), at(900), launch=at(600), elements=8_000)
    verdict = backward.finish(tmp_path, (301, 690), 295).verdict
    assert verdict is not None
    assert verdict.findings[0].cause == "exposed_between_layers"
    assert "all-gather of no FSDP unit" in verdict.sentence


def test_a_cpu_bound_step(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    for number in range(10):
        built.kernel("k", at(100 * number + 55), at(100 * number + 99), launch=at(100 * number + 50))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert (rank.idle_causes.cpu, rank.idle_causes.launch_latency) == (510_000, 50_000)
    assert rank.verdict is not None
    assert [finding.cause for finding in rank.verdict.findings] == ["cpu_bound"]
    assert "51 % of the step" in rank.verdict.sentence
    assert "compile=true" in rank.verdict.sentence


@pytest.mark.parametrize(
    ("copies", "cause"), [(("HtoD", "DtoH"), "host_optimizer"), (("HtoD",), "cpu_bound")], ids=str
)
def test_an_optimizer_on_the_host(
    copies: tuple[str, ...], cause: str, tmp_path: Path, trace_builder: Any
) -> None:
    """Only if shards come from the host and gradients go there does the optimizer step explain the wait."""
    built = trace_builder()
    built.step(0, at(0), at(1000))
    for place, kind in enumerate(copies):
        kernel = f"Memcpy {kind} (Pinned -> Device)"
        built.kernel(kernel, at(10 + place), at(11 + place), launch=at(1), category="gpu_memcpy")
    built.kernel("k", at(15), at(390), launch=at(2))
    built.annotation("forward", at(0), at(200))
    built.annotation("backward", at(200), at(400))
    built.annotation("Optimizer.step#AdamW.step", at(400), at(980))
    built.kernel("k", at(985), at(1000), launch=at(981))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    (finding,) = (each for each in rank.verdict.findings if each.cause in ("host_optimizer", "cpu_bound"))
    assert finding.cause == cause
    assert ("cpu_offload" in [each.setting for each in finding.suggestions]) == (cause == "host_optimizer")


def test_what_is_compiled_is_not_told_to_compile(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    for number in range(10):
        begin = 100 * number
        built.kernel("triton_poi_fused_add_0", at(begin + 55), at(begin + 99), launch=at(begin + 50))
    verdict = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0].verdict
    assert verdict is not None
    assert [finding.cause for finding in verdict.findings] == ["cpu_bound"]
    assert "compile" not in verdict.sentence


def test_retries(tmp_path: Path, trace_builder: Any) -> None:
    """The CPU waits until 500 for the device, then frees and allocates; computation goes on at 650."""
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.annotation("backward", at(300), at(900))
    built.kernel("before", at(10), at(500), launch=at(5))
    built.memory(at(100), 512, 512, 4096)
    built.retry(at(400), 4096, 8192)
    built.event("cuda_runtime", "cudaFree", at(400), 150_000, args={"correlation": 900})
    built.event("cuda_runtime", "cudaMalloc", at(590), 50_000, args={"correlation": 901})
    built.kernel("after", at(650), at(990), launch=at(645))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    memory = rank.memory
    assert (memory.allocator_calls, memory.allocator_time) == (2, 200_000)
    (retry,) = memory.retries
    assert (retry.step, retry.phase, retry.bytes, retry.freed, retry.cost) == (
        0,
        "backward",
        4096,
        8192,
        150_000,
    )
    assert rank.verdict is not None
    assert rank.verdict.findings[0].cause == "alloc_retries"
    assert "retries once a step, mostly in backward; computation stops for 20 %" in rank.verdict.sentence


@pytest.mark.parametrize(
    ("kinds", "words", "settings"),
    [
        (("HtoD (Pinned -> Device)",), "from the host: copy from pinned memory", []),
        (("DtoH (Device -> Pageable)",), "to the host: copy less often", []),
        (("DtoD (Device -> Device)",), "on the device: no FSDP setting moves them", []),
        (("HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)"), "and back", ["cpu_offload"]),
    ],
)
def test_copies_that_nothing_runs_beside(
    kinds: tuple[str, ...], words: str, settings: list[str], tmp_path: Path, trace_builder: Any
) -> None:
    """Offload is named where data go to the host and come back, and only there."""
    built = trace_builder()
    built.step(0, at(0), at(1000))
    for place, kind in enumerate(kinds):
        start, end = 10 + place * 100, 110 + place * 100 if len(kinds) > 1 else 260
        built.kernel(f"Memcpy {kind}", at(start), at(end), launch=at(1), category="gpu_memcpy")
    built.kernel("k", at(210), at(990), launch=at(2))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    (finding,) = rank.verdict.findings
    assert (finding.cause, finding.share) == ("memory_copies", 0.2)
    assert words in finding.text
    assert [each.setting for each in finding.suggestions] == settings


def test_other_collectives_are_told_without_a_setting(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.collective("all_gather", at(100), at(300), launch=at(1))
    built.kernel("k", at(300), at(990), launch=at(2))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    (finding,) = rank.verdict.findings
    assert (finding.cause, finding.suggestions, finding.gain) == ("exposed_all_gather", (), None)
    assert "no FSDP annotations" in finding.text


def test_cannot_tell_from_a_trace_that_is_not_trusted(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.kernel("a", at(10), at(500))
    built.kernel("b", at(300), at(600))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    assert rank.verdict.outcome is Outcome.CANNOT_TELL
    assert rank.verdict.sentence.startswith("Cannot tell, because 1 of 2 kernels overlap")


def test_nothing_is_communicated(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(1000))
    built.kernel("a", at(10), at(990))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.verdict is not None
    assert rank.verdict.outcome is Outcome.FINE
    assert "nothing is communicated" in rank.verdict.sentence
