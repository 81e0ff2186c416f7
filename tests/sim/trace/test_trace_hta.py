"""HolisticTraceAnalysis reads a written trace and finds the overlap that was put into it."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest

from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.trace_recorder import CollectiveRecord, TraceRecorder

# Its rounding to whole microseconds has to be off before the first import.
os.environ.setdefault("HTA_DISABLE_NS_ROUNDING", "1")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hta") is None, reason="the extra `hta` is not installed"
)

US = 1000
STEPS = 4


def write(folder) -> None:
    """Steps of 1 ms: a gather of 400 us, of which 130.5 us lie under the 430.5 us of kernels."""
    recorder = TraceRecorder(0, 8, load_profile("a100-80gb"))
    for step in range(STEPS):
        at = (1 + step) * 1000 * US
        gather = CollectiveRecord(
            "all_gather", "BFloat16", 100, 800, "0", "default_pg", range(8), at + 10 * US, at + 14 * US
        )
        gather.write(recorder, 20, at + 100 * US, at + 500 * US)
        recorder.cpu_op("c10d::_allgather_base_", at + 9 * US, at + 15 * US)
        record = recorder.runtime("cudaEventRecord", at + 16 * US, at + 17 * US)
        recorder.kernel("gemm", 7, at + 21 * US, at + 24 * US, at + 369 * US + 500, at + 500 * US)
        recorder.cpu_op("aten::mm", at + 20 * US, at + 25 * US)
        recorder.stream_wait_event(7, 1, 20, record, at + 26 * US, at + 27 * US, at + 500 * US, at + 500 * US)
        recorder.kernel("gelu", 7, at + 31 * US, at + 34 * US, at + 501 * US, at + 801 * US)
        recorder.cpu_op("aten::gelu", at + 30 * US, at + 35 * US)
        recorder.device_synchronize(at + 40 * US, at + 810 * US)
        recorder.annotation("forward", at + 5 * US, at + 36 * US)
        recorder.step(step, at, at + 999 * US)
    recorder.write(folder / "rank0_trace.json.gz")


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write(folder)
    return importlib.import_module("hta.trace_analysis").TraceAnalysis(trace_dir=str(folder))


@pytest.mark.filterwarnings("ignore::FutureWarning:hta")
def test_overlap(analysis):
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    assert float(overlap["comp_comm_overlap_pctg"].iloc[0]) == pytest.approx(100 * 130.5 / 400, abs=0.05)


def test_temporal_breakdown_sees_no_computation_in_waits(analysis):
    breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    assert breakdown["compute_time(us)"] == pytest.approx(STEPS * 430.5)
    assert breakdown["non_compute_time(us)"] == pytest.approx(STEPS * (400 - 130.5))


def test_the_critical_path_goes_from_the_gather_to_the_kernel_that_waits_for_it(analysis):
    graph, success = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=1)
    assert success
    names = analysis.t.symbol_table.sym_table
    path = [names[graph.trace_df.loc[index, "name"]] for index in graph.critical_path_events_set]
    assert any(name.startswith("ncclDevKernel_AllGather") for name in path)
    assert "gelu" in path
    assert "gemm" not in path
