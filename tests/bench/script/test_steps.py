"""Where steps end, how many are measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript


def test_times_are_those_of_marks_in_the_stream(run_probe: RunScript) -> None:
    """A step of known kernels takes what events around it say, and the script's own peaks stay its own."""
    run = run_probe(
        """
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        weight.grad = torch.zeros_like(weight)
        events = []
        high = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"); del high
        for step in range(8):
            for _ in range(10):
                y = x @ x
            other.step()
            optimizer.step()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
            if step == 3:
                assert torch.cuda.max_memory_allocated() >= 1 << 30
                torch.cuda.reset_peak_memory_stats()
                assert torch.cuda.max_memory_allocated() < 1 << 30
        torch.cuda.synchronize()
        print("measured", events[2].elapsed_time(events[3]))
        """,
        to_the_end=True,
    )
    result = run.result
    assert result["status"] == "ok", run.cause
    assert result["script"]["steps"] == 8
    own = float(run.output.split()[-1]) / 1e3
    assert result["step_time_s"] == pytest.approx(own, rel=1e-3)
    assert result["tflops_per_gpu"] == pytest.approx(10 * 2 * 8192**3 / own / 1e12, rel=1e-3)
    assert 0.5 < result["mfu"] < 1
    assert result["peak_memory_bytes"]["allocated"] == pytest.approx(3 * 2 * 8192**2, rel=0.01)
    assert run.record()["peak_flops"] == 312e12


def test_one_step_has_figures_of_its_own(run_probe: RunScript, tmp_path: Path) -> None:
    """Where calls in Python cost nothing, because they are not counted in the first step."""
    free = tmp_path / "free.toml"
    free.write_text('base = "a100-80gb"\nname = "free"\n[cpu]\npython_call_us = 0\n')
    run, longer = (run_probe(f"train({steps})", hardware=str(free)) for steps in (1, 7))
    assert run.result["status"] == "ok", run.cause
    (note,) = run.result["script"]["notes"]
    assert "one step: its first" in note
    assert run.result["step_time_s"] > longer.result["step_time_s"], "it allocates memory too"
    assert run.result["tflops_per_gpu"] * run.result["step_time_s"] == pytest.approx(
        longer.result["tflops_per_gpu"] * longer.result["step_time_s"], rel=1e-6
    )


@pytest.mark.parametrize(("steps", "missing"), [(2, "after the warm-up"), (5, "overlap"), (6, None)])
def test_short_scripts_tell_what_is_missing(steps: int, missing: str | None, run_probe: RunScript) -> None:
    run = run_probe(f"train({steps})")
    assert run.result["status"] == "ok", run.cause
    assert run.result["step_time_s"] > 0
    (note,) = run.result["script"]["notes"]
    assert f"ended after {steps} steps" in note
    assert (run.result["time_s"] is None) == (missing is not None)
    assert ("the time of Python between operators" in note) == (steps == 2)
    if missing is not None:
        assert missing in note


CPU_BOUND = """
layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(30)]).cuda()
optimizer, times = torch.optim.SGD(layers.parameters(), 0.1), []
staging = torch.empty(1 << 20, pin_memory=True)
profiler = cProfile.Profile()

def nothing():
    pass

for step in range(8):
    profiler.enable() if profiled else None
    layers(torch.randn(8, 64, device="cuda")).sum().backward()
    staging.to("cuda", non_blocking=True)
    for _ in range(10_000):
        nothing()
    profiler.disable() if profiled else None
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_slow_link_is_tried_with_the_time_of_python(run_probe: RunScript) -> None:
    run = run_probe(f"import cProfile\nprofiled = False\n{CPU_BOUND}")
    assert run.result["status"] == "ok", run.cause
    assert run.result["script"]["notes"] == []
    slow = run.record()["step_work"]["slow_link_step"]
    assert slow > 0.99 * run.result["step_time_s"], "twice the time of copies makes no step shorter"


def test_a_profiler_of_the_script_is_named(run_probe: RunScript) -> None:
    """From Python 3.12 on, `cProfile` stands beside the counting of calls and hides none."""
    run = run_probe(f"import cProfile\nprofiled = True\n{CPU_BOUND}")
    assert run.result["status"] == "ok", run.cause
    hidden = ["the script's own profiler hid calls: their Python costs nothing"]
    assert run.result["script"]["notes"] == (hidden if sys.version_info < (3, 12) else [])
    if sys.version_info >= (3, 12):
        alone = run_probe(f"import cProfile\nprofiled = False\n{CPU_BOUND}")
        assert run.result["step_time_s"] == alone.result["step_time_s"]


def test_a_profiler_s_steps(run_probe: RunScript) -> None:
    """Counted by the profiler: the optimizer steps twice in each."""
    run = run_probe(
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                train(2)
                profiler.step()
        print(profiler.key_averages().table())
        """,
        steps_by="profiler",
    )
    assert run.result["status"] == "ok", run.cause
    assert run.result["script"]["steps"] == 7


def test_two_runs_are_equal_to_the_byte(run_probe: RunScript, run_script: RunScript, tmp_path: Path) -> None:
    runs = [run_probe("train(7)"), run_script(tmp_path / "probe0.py")]
    traces = [(run.folder / "trace" / "rank0_trace.json.gz").read_bytes() for run in runs]
    assert traces[0] == traces[1]
    assert runs[0].record() == runs[1].record()


def test_a_late_error_keeps_what_was_measured(run_probe: RunScript) -> None:
    whole, failed = run_probe("train(7)"), run_probe("train(9); raise OSError('quota')", to_the_end=True)
    assert failed.result["status"] == "error"
    assert "OSError: quota" in failed.cause
    for figure in ("step_time_s", "peak_memory_bytes", "time_s", "tflops_per_gpu"):
        assert failed.result[figure] == whole.result[figure] is not None
    assert failed.result["traces"]


def test_steps_after_the_measured_ones_take_as_long_and_hold_as_much(run_probe: RunScript) -> None:
    """Calls in Python cost as much there, and garbage in cycles is freed at the ends of all steps."""
    run = run_probe(
        """
        import time
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
        optimizer, steps = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(20):
            cycle = {"buffer": torch.empty(1 << 28, dtype=torch.uint8, device="cuda")}
            cycle["itself"] = cycle
            start = time.perf_counter()
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - start, torch.cuda.memory_allocated()))
        assert abs(steps[4][0] / steps[-1][0] - 1) < 0.01, (steps[4], steps[-1])
        assert steps[4][1] == steps[-1][1] < 3 << 28
        print("to the end")
        """,
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert "to the end" in run.output
