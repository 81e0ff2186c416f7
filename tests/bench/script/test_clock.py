"""What a script's own clock reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

CLOCKS = """
import time
from time import perf_counter, time as wall

x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

def measured(clock):
    torch.cuda.synchronize()
    began = clock()
    for _ in range(20):
        y = x @ x
    torch.cuda.synchronize()
    return clock() - began

measured(time.perf_counter)  # which also makes room for the results
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
events[0].record()
for _ in range(20):
    y = x @ x
events[1].record()
torch.cuda.synchronize()
print(events[0].elapsed_time(events[1]) / 1e3)
for clock in (time.perf_counter, perf_counter, wall, time.time, lambda: time.perf_counter_ns() / 1e9):
    print(measured(clock))
"""


def test_throughput_that_a_script_prints_is_the_simulated_one(run_probe: RunScript) -> None:
    run = run_probe(CLOCKS + "train(7)")
    assert run.result["status"] == "ok", run.cause
    by_events, *by_clocks = map(float, run.output.split())
    assert len(by_clocks) == 5
    # Events do not see the first launch; 2.4e-7 is the resolution of a double of seconds since 1970.
    assert by_clocks == pytest.approx([by_events] * 5, rel=1e-3, abs=5e-7)


def test_wall_time_is_real_for_libraries_and_sleeping_takes_simulated_time(run_probe: RunScript) -> None:
    run = run_probe(
        """
        import email.utils, time
        for _ in range(40):  # far ahead of the real time
            x = torch.randn(16384, 16384, device="cuda")
            x @ x
        torch.cuda.synchronize()
        library = {"time": time}
        exec(compile("seen = time.time()", email.utils.__file__, "exec"), library)
        assert 1 < time.time() - library["seen"] < 60, time.time() - library["seen"]
        before = time.time()
        time.sleep(0.05)
        assert abs(time.time() - before - 0.05) < 1e-5
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause
