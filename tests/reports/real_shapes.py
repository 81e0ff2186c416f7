"""Small traces with what traces from elsewhere have that ours do not: other profilers, devices, clocks, jobs.

Written for the tests, after the looks of the traces in HolisticTraceAnalysis' test data; nothing is copied.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_writing import TraceBuilder

US = 1000
MS = 1000 * US
RESNET50_ELEMENTS = (2_050_000, 6_637_568, 6_600_000, 6_500_000, 3_769_464)
"""Buckets of DDP's gradients: 25,557,032 in all."""


def _built(begin: int, **head: Any) -> TraceBuilder:
    """With the profiler's own spans, its metadata and flows, as Kineto writes them around the events."""
    built = TraceBuilder(**head)
    built.exact = True
    span = {
        "ph": "X",
        "cat": "Trace",
        "name": "PyTorch Profiler (0)",
        "pid": "Spans",
        "tid": "PyTorch Profiler",
    }
    built.events += [
        {
            "name": "process_name",
            "ph": "M",
            "ts": begin / US,
            "pid": 100,
            "tid": 0,
            "args": {"name": "python3"},
        },
        {**span, "ts": begin / US, "dur": 1e6, "args": {"Op count": 0}},
        {"ph": "s", "id": 9, "pid": 100, "tid": 100, "ts": begin / US, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 9, "pid": 0, "tid": 7, "ts": begin / US, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", "ts": begin / US},
    ]
    return built


def amd_mi250() -> TraceBuilder:
    """HIP: other calls, streams as text in calls, copies without a runtime's kernel, no distributedInfo."""
    begin = 4_203_669_603_187_439
    devices = [{"id": 0, "name": "AMD Radeon Graphics", "totalGlobalMem": 68_702_699_520}]
    built = _built(begin, deviceProperties=devices, displayTimeUnit="ms")
    del built.head["distributedInfo"]
    for step in (1, 2):
        at = begin + (step - 1) * 9_288_291
        built.step(step, at, at + 9_288_000)
        call = {"stream": "0x0", "cid": 153, "correlation": 100 * step, "size": "2560", "kind": "1"}
        built.event("cuda_runtime", "hipMemcpyWithStream", at + 250 * US, 60_204, args=call)
        copy = {"device": 2, "stream": 0, "correlation": 100 * step, "kind": "HtoD"}
        built.event(
            "gpu_memcpy", "Memcpy HtoD (Host -> Device)", at + 266 * US, 22_441, lane=(2, 0), args=copy
        )
        for number in range(1, 8):
            start = at + (300 + number * 200) * US
            call = {"correlation": 100 * step + number, "stream": "0x0", "grid": [8, 1, 1]}
            built.event("cuda_runtime", "hipLaunchKernel", start - 9_000, 7_000, args=call)
            work = {"device": 2, "stream": 0, "correlation": 100 * step + number}
            name = "void at::native::elementwise_kernel<128, 2, at::native::{lambda(float)#1}>(int)"
            built.event("kernel", name, start, 90_123, lane=(2, 0), args=work)
        built.event("gpu_user_annotation", "Optimizer.step#SGD.step", at + 1700 * US, 90_000, lane=(2, 0))
    return built


def cpu_only() -> TraceBuilder:
    """One rank of 300 over gloo, its process group's threads beside few operators."""
    begin = 1_212_075_529_876_817
    built = _built(begin, deviceProperties=[])
    built.head["distributedInfo"] = {"backend": "gloo", "rank": 34, "world_size": 300, "pg_count": 10}
    built.step(551, begin, begin + 210_109_162)
    for number, thread in enumerate((3553, 3554)):
        shapes = {"Concrete Inputs": [""], "Input type": ["float"], "Input Dims": [[321_271]]}
        start = begin + (20 + 10 * number) * MS
        built.event("user_annotation", "gloo:all_reduce", start, 173_209_713, lane=(100, thread), args=shapes)
    for number in range(4):
        built.op("aten::empty", begin + (30 + number) * MS, begin + (30 + number) * MS + 2_503)
    return built


def cuda_event_sync() -> TraceBuilder:
    """Synchronisation records, which are waiting and not work; whole microseconds from 1970; no steps."""
    begin = 1_712_867_402_348_000_000
    built = _built(begin, distributedInfo={"rank": 0})
    built.op("aten::matmul", begin + 256 * US, begin + 732 * US)
    for number in range(3):
        start = begin + (667 + number * 200) * US
        built.kernel("ampere_sgemm_128x64_nn", start, start + 123 * US, stream=20, launch=start - 20 * US)
        wait = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 20, "stream": 24, "device": 0}
        built.event("cuda_sync", "Stream Wait Event", start, 190 * US, lane=(0, 24), args=wait)
        event = {"cuda_sync_kind": "Event Sync", "wait_on_stream": -1, "stream": -1, "correlation": 24}
        built.event("cuda_sync", "Event Sync", start, 4 * US, lane=(0, -1), args=event)
    return built


def nccl_a100() -> TraceBuilder:
    """DDP on two ranks: broadcasts of buffers, all-reduces of buckets on a stream of their own."""
    begin = 4_458_676_416_788_066
    built = _built(begin, deviceProperties=[{"id": 0, "name": "NVIDIA A100-PG509-200"}])
    built.head["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 2, "nccl_version": "2.19.3"}
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2, "dtype": "Float"}
    for step in (4, 5, 6):
        at = begin + (step - 4) * 222_500_000
        built.step(step, at, at + 222_442_191)
        for number in range(2):
            start = at + (5 + number) * MS
            described = {"Collective name": "broadcast", "In msg nelems": 53_120, "Out msg nelems": 53_120}
            name = "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
            built.annotation("nccl:broadcast", start - 90 * US, start - 10 * US)
            built.kernel(name, start, start + 30_975, stream=40, **described, **group)
        built.annotation("## backward ##", at + 90 * MS, at + 200 * MS)
        for number in range(120):
            start = at + 20 * MS + number * 1_500 * US
            built.kernel(
                "void cudnn::bn_bw_1C11_kernel_new<float>(float)", start, start + 1_400 * US + 7 * number
            )
        for number, elements in enumerate(RESNET50_ELEMENTS):
            start = at + 100 * MS + number * 20 * MS + 333
            described = {
                "Collective name": "allreduce",
                "In msg nelems": elements,
                "Out msg nelems": elements,
            }
            name = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
            built.kernel(name, start, start + 2_636_669, stream=40, **described, **group)
            lane = (0, 40)
            built.event("gpu_user_annotation", "nccl:all_reduce", start, 2_636_669, lane=lane)
    return built


def no_gpu() -> TraceBuilder:
    """NCCL collectives as the CPU saw them, and no device: no overlap can be told."""
    begin = 1_661_203_462_598_772_000
    built = TraceBuilder(distributedInfo={"rank": 0})
    built.step(1009, begin, begin + 75_473 * US)
    for number in range(40):
        start = begin + number * 1_500 * US
        built.op("aten::zeros", start, start + 19 * US, **{"Call stack": "", "Input Dims": [[], []]})
        shapes = {"Input Dims": [[8, 1024, 8816]], "Input type": ["float"]}
        built.event("user_annotation", "nccl:all_to_all", start + 500 * US, 116 * US, args=shapes)
    return built


def ns_resolution() -> TraceBuilder:
    """Nanoseconds from 1970 as decimals of microseconds, which a double cannot hold (V100, one rank)."""
    begin = 1_712_195_495_502_094_523
    built = _built(begin, trace_id="094DFF9CD7781F8ADDEAFBA6A8855CA7", tw_user="mast_hpc")
    built.head["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 1, "nccl_version": "2.17.1"}
    built.op(
        "autograd::engine::evaluate_function: DivBackward1",
        1_712_195_495_519_689_047,
        1_712_195_495_519_752_860,
    )
    for number in range(5):
        at = begin + number * 100 * MS
        built.step(101 + number, at, at + 35_115_869)
        for kernel in range(9):
            start = at + (1 + 3 * kernel) * MS + 1
            built.kernel("volta_sgemm_128x64_nt", start, start + 2_999_999, launch=start - 999 * US - kernel)
    return built


def sampled(rank: int) -> TraceBuilder:
    """One of two ranks of a job of 128 that were traced: exchanges without metadata on the kernels."""
    begin = 1_682_725_898_079_292_000 + rank * 192 * US
    built = _built(begin, record_shapes=1)
    built.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 128}
    for step in (551, 552):
        at = begin + (step - 551) * 610 * MS
        built.step(step, at, at + 607_312 * US)
        for number in range(5):
            start = at + (15 + 100 * number) * MS
            built.annotation("nccl:all_to_all", start - 160 * US, start - 20 * US)
            name = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
            built.kernel(name, start, start + 30_669 * US, stream=84, launch=start - 100 * US)
            built.kernel(
                "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int)", start, start + 10 * US, stream=23
            )
    for event in built.events:
        if isinstance(event.get("args"), dict) and "device" in event["args"]:
            event["args"]["device"] = rank
    return built


WRITTEN: dict[str, Callable[[], TraceBuilder]] = {
    "amd_mi250": amd_mi250,
    "cpu_only": cpu_only,
    "cuda_event_sync": cuda_event_sync,
    "nccl_a100": nccl_a100,
    "no_gpu": no_gpu,
    "ns_resolution": ns_resolution,
    "sampled_rank0": lambda: sampled(0),
    "sampled_rank1": lambda: sampled(1),
}


def write_all(folder: Path) -> Path:
    """Every trace as NAME.json.gz, times to the nanosecond."""
    for name, make in WRITTEN.items():
        text = json.dumps(make().document())
        text = re.sub(r'"(-?\d+\.\d{3})"', r"\1", text)
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
    return folder
