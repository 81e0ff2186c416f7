"""The Kineto trace: its rules, what is derived when it is written, and that it is the same every time."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest

from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.trace_recorder import CollectiveRecord, TraceRecorder

PROFILE = load_profile("a100-80gb")
COMPUTE, COMMUNICATION = 7, 20


def two_steps() -> TraceRecorder:
    """Two steps of 100 us: a gather [10, 50) beside kernels [20, 40) and [60, 90); forward around all."""
    recorder = TraceRecorder(0, 8, PROFILE)
    for step in range(2):
        at = 1_000_000 + step * 100_000
        gather = CollectiveRecord(
            "all_gather", "BFloat16", 1000, 8000, "0", "default_pg", range(8), at + 2000, at + 4000
        )
        gather.write(recorder, COMMUNICATION, at + 10_000, at + 50_000)
        recorder.cpu_op("c10d::_allgather_base_", at + 1000, at + 5000)
        recorder.annotation("FSDP::all_gather (blocks.0)", at + 500, at + 6000)
        recorder.kernel("gemm", COMPUTE, at + 8000, at + 9000, at + 20_000, at + 40_000, {"grid": [8, 1, 1]})
        recorder.cpu_op("aten::mm", at + 7000, at + 9000, '"Input Dims":[[4,8],[8,16]]')
        record = recorder.runtime("cudaEventRecord", at + 9100, at + 9200)
        recorder.stream_wait_event(
            COMPUTE, 3, COMMUNICATION, record, at + 9300, at + 9400, at + 40_000, at + 50_000
        )
        recorder.kernel("gelu", COMPUTE, at + 10_000, at + 11_000, at + 60_000, at + 90_000)
        recorder.cpu_op("aten::gelu", at + 9500, at + 12_000)
        recorder.memory(0x1000, 512, 512, 2 << 20, at + 9600)
        recorder.memory(0x1000, -512, 0, 2 << 20, at + 13_000)
        recorder.annotation("forward", at + 100, at + 20_000)
        recorder.device_synchronize(at + 21_000, at + 91_000)
        recorder.step(step, at, at + 99_999)
    recorder.alloc_retry(4096, 8192, 1_150_000)
    return recorder


@pytest.fixture
def trace(tmp_path):
    path = two_steps().write(tmp_path / "rank0_trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))


def events(trace, **wanted):
    return [
        event
        for event in trace["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


def test_head_says_rank_and_that_it_is_simulated(trace):
    assert trace["schemaVersion"] == 1
    assert trace["distributedInfo"]["rank"] == 0
    assert trace["distributedInfo"]["world_size"] == 8
    assert trace["deviceProperties"][0]["numSms"] == 108
    label = trace["fsdpbench"]
    assert (label["device"], label["simulated"], label["hardware"]["name"]) == ("sim", True, "a100-80gb")


def test_spans_of_a_thread_nest_and_times_are_not_negative(trace):
    threads: dict[tuple, list[tuple[float, float]]] = {}
    for event in events(trace, ph="X"):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        span = (round(event["ts"] * 1000), -round((event["ts"] + event["dur"]) * 1000))
        threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or -end <= open_ends[-1]
            open_ends.append(-end)


def test_a_kernel_is_tied_to_its_launch_and_operator(trace):
    kernel = events(trace, cat="kernel", name="gemm")[0]
    correlation = kernel["args"]["correlation"]
    launch = next(e for e in events(trace, cat="cuda_runtime") if e["args"]["correlation"] == correlation)
    operator = events(trace, cat="cpu_op", name="aten::mm")[0]
    assert launch["name"] == "cudaLaunchKernel"
    assert launch["args"]["External id"] == kernel["args"]["External id"] == operator["args"]["External id"]
    assert kernel["args"]["grid"] == [8, 1, 1]
    assert operator["args"]["Input Dims"] == [[4, 8], [8, 16]]
    assert kernel["tid"] == kernel["args"]["stream"] == COMPUTE
    starts, ends = events(trace, ph="s", id=correlation), events(trace, ph="f", id=correlation)
    assert (len(starts), len(ends)) == (1, 1)
    assert (starts[0]["ts"], ends[0]["ts"]) == (launch["ts"], kernel["ts"])


def test_annotations_reappear_on_the_streams_of_their_kernels(trace):
    def spans(name):
        return [(e["tid"], e["ts"], e["dur"]) for e in events(trace, cat="gpu_user_annotation", name=name)]

    assert spans("FSDP::all_gather (blocks.0)")[0] == (COMMUNICATION, 1010.0, 40.0)
    assert spans("ProfilerStep#1") == [(COMMUNICATION, 1110.0, 40.0), (COMPUTE, 1120.0, 70.0)]
    assert spans("forward")[:2] == [(COMMUNICATION, 1010.0, 40.0), (COMPUTE, 1020.0, 70.0)]


def test_a_collective_carries_its_metadata(trace):
    kernel = next(e for e in events(trace, cat="kernel") if "nccl" in e["name"])
    assert kernel["name"].startswith("ncclDevKernel_AllGather_RING_LL(")
    assert kernel["args"]["Collective name"] == "_allgather_base"
    assert kernel["args"]["In msg nelems"] == 1000
    assert kernel["args"]["Out msg nelems"] == 8000
    assert kernel["args"]["Group size"] == 8
    assert kernel["args"]["dtype"] == "BFloat16"
    assert kernel["args"]["Process Group Ranks"] == "[0, 1, 2, 3, 4, 5, 6, 7]"


def test_waits_name_what_they_wait_for(trace):
    wait = events(trace, cat="cuda_sync", name="Stream Wait Event")[0]
    record = events(trace, cat="cuda_runtime", name="cudaEventRecord")[0]
    assert wait["args"]["wait_on_cuda_event_record_corr_id"] == record["args"]["correlation"]
    assert wait["args"]["wait_on_stream"] == COMMUNICATION
    assert (wait["args"]["stream"], wait["ts"], wait["dur"]) == (COMPUTE, 1050.0, 0)
    assert events(trace, cat="cuda_sync", name="Context Sync")[0]["args"]["stream"] == -1


def test_memory_and_retries_are_instants(trace):
    memory = events(trace, name="[memory]", ph="i")
    assert [event["args"]["Bytes"] for event in memory] == [512, -512] * 2
    assert memory[0]["args"]["Total Reserved"] == 2 << 20
    assert memory[0]["args"]["Device Type"] == 1
    retry = events(trace, name="[alloc_retry]")
    assert [event["args"] for event in retry] == [{"Bytes": 4096, "Freed": 8192}]


def test_names_are_escaped(tmp_path):
    recorder = TraceRecorder(3, 4, PROFILE)
    recorder.cpu_op('a "quoted"\\ operator\n', 5, 9)
    trace = json.loads(gzip.decompress(recorder.write(tmp_path / "t.json.gz").read_bytes()))
    assert events(trace, cat="cpu_op")[0]["name"] == 'a "quoted"\\ operator\n'
    assert (events(trace, cat="cpu_op")[0]["ts"], events(trace, cat="cpu_op")[0]["dur"]) == (0.005, 0.004)


def test_an_empty_trace_is_still_one(tmp_path):
    trace = json.loads(
        gzip.decompress(TraceRecorder(0, 1, PROFILE).write(tmp_path / "t.json.gz").read_bytes())
    )
    assert all(event["ph"] == "M" for event in trace["traceEvents"])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("reduce_scatter", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL("),
        ("all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL("),
        ("broadcast", "ncclDevKernel_Broadcast_RING_LL("),
        ("all_to_all", "ncclDevKernel_SendRecv("),
    ],
)
def test_names_of_collective_kernels(tmp_path, kind, name):
    recorder = TraceRecorder(0, 64, PROFILE)
    CollectiveRecord(kind, "Float", 1, 1, "0", "default_pg", range(64), 0, 1).write(recorder, 9, 2, 3)
    trace = json.loads(gzip.decompress(recorder.write(tmp_path / "t.json.gz").read_bytes()))
    kernel = events(trace, cat="kernel")[0]
    assert kernel["name"].startswith(name)
    assert kernel["args"]["Process Group Ranks"].endswith("..., 63]")


def test_an_unknown_collective_is_refused():
    gossip = CollectiveRecord("gossip", "Float", 1, 1, "0", "default_pg", range(1), 0, 1)
    with pytest.raises(ValueError, match="known are all_gather"):
        gossip.write(TraceRecorder(0, 1, PROFILE), 9, 2, 3)


def test_equal_events_make_equal_bytes(tmp_path):
    first = two_steps().write(tmp_path / "rank0_trace.json.gz").read_bytes()
    second = two_steps().write(tmp_path / "rank0_trace.json.gz").read_bytes()
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["rank0_trace.json.gz"]


def test_correlations_count_up(trace):
    ids = [event["args"]["correlation"] for event in events(trace, cat="cuda_runtime")]
    assert all(later > earlier for earlier, later in pairwise(ids))
