"""Writes small Kineto traces whose truth is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


class TraceBuilder:
    """Writes events as `torch.profiler` does; times are given in ns and written in microseconds.

    With `exact` time stamps are text with all digits, which whoever writes the file makes numbers.
    """

    main = (100, 100)
    exact = False

    def __init__(self, **head: Any) -> None:
        self.head: dict[str, Any] = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
            **head,
        }
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def event(self, category: str, name: str, start: int, duration: int, **more: Any) -> dict[str, Any]:
        lane = more.pop("lane", self.main)
        made = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": lane[0],
            "tid": lane[1],
            "ts": f"{start // 1000}.{start % 1000:03d}" if self.exact else start / 1000,
            "dur": duration / 1000,
            **more,
        }
        self.events.append(made)
        return made

    def step(self, index: int, start: int, end: int) -> None:
        self.event("user_annotation", f"ProfilerStep#{index}", start, end - start)

    def annotation(self, name: str, start: int, end: int, lane: tuple[int, int] = main) -> None:
        self.event("user_annotation", name, start, end - start, lane=lane)

    def op(self, name: str, start: int, end: int, lane: tuple[int, int] = main, **arguments: Any) -> None:
        self.event("cpu_op", name, start, end - start, lane=lane, args=arguments)

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        launch: int | None = None,
        stream: int = 7,
        category: str = "kernel",
        lane: tuple[int, int] = main,
        **arguments: Any,
    ) -> dict[str, Any]:
        """A kernel and the call that launched it (1 us, beginning 5 us before the kernel unless given)."""
        self.correlation += 1
        launch = start - 5000 if launch is None else launch
        call = {"correlation": self.correlation}
        self.event("cuda_runtime", "cudaLaunchKernel", launch, 1000, lane=lane, args=call)
        described = {"stream": stream, "device": 0, "correlation": self.correlation, **arguments}
        return self.event(category, name, start, end - start, lane=(0, stream), args=described)

    def collective(
        self,
        kind: str,
        start: int,
        end: int,
        *,
        launch: int | None = None,
        elements: int | None = None,
        stream: int = 20,
        ranks: int = 8,
        lane: tuple[int, int] = main,
        **more: Any,
    ) -> None:
        """An NCCL kernel; `elements`: of the full buffer, bf16, as metadata (None: no metadata)."""
        names = {
            "all_gather": (
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "_allgather_base",
            ),
            "reduce_scatter": (
                "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "_reduce_scatter_base",
            ),
            "all_reduce": (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "allreduce",
            ),
        }
        name, collective = names[kind]
        described: dict[str, Any] = {}
        if elements is not None:
            shard = elements // ranks
            sizes = {
                "all_gather": (shard, elements),
                "reduce_scatter": (elements, shard),
                "all_reduce": (elements, elements),
            }[kind]
            described = {
                "Collective name": collective,
                "In msg nelems": sizes[0],
                "Out msg nelems": sizes[1],
                "Group size": ranks,
                "dtype": "BFloat16",
                "Process Group Name": "0",
                **more,
            }
        self.kernel(name, start, end, launch=launch, stream=stream, lane=lane, **described)

    def memory(self, time: int, size: int, allocated: int, reserved: int, device_type: int = 1) -> None:
        arguments = {
            "Device Type": device_type,
            "Device Id": 0,
            "Addr": 4096,
            "Bytes": size,
            "Total Allocated": allocated,
            "Total Reserved": reserved,
        }
        self._instant("[memory]", time, arguments)

    def retry(self, time: int, size: int, freed: int) -> None:
        self._instant("[alloc_retry]", time, {"Bytes": size, "Freed": freed})

    def _instant(self, name: str, time: int, arguments: dict[str, Any]) -> None:
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": name,
                "pid": self.main[0],
                "tid": self.main[1],
                "ts": time / 1000,
                "args": arguments,
            }
        )

    def document(self) -> dict[str, Any]:
        return {**self.head, "traceEvents": self.events, "traceName": "built by a test"}

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
        return path


def build_fsdp_trace() -> TraceBuilder:
    """Two equal steps of 1 ms with two FSDP units, all times in us here and in ns in the trace:

    CPU      |0 forward 200|200 backward 500|500 optimizer 600|            |1000 next step
    stream 7      [b.0 110-300][b.1 350-500][bwd b.1 520-650][bwd b.0 700-850][adam 900-950]
    stream 20 [ag b.0 10-100][ag b.1 150-340]     [rs b.1 655-780][rs b.0 855-890]

    Truth for a step: communication 90+190+125+35 = 440, of it hidden 150 (ag b.1 under b.0) + 80 (rs b.1
    under bwd b.0: 700 to 780) = 230.
    """
    built = TraceBuilder()
    us = 1000
    for step in range(2):
        t = 1_000_000 + step * 1000 * us

        def at(time: float, t: int = t) -> int:
            return t + int(time * us)

        built.step(step, at(0), at(1000))
        built.annotation("forward", at(0), at(200))
        built.annotation("FSDP::all_gather (blocks.0)", at(2), at(8))
        built.collective("all_gather", at(10), at(100), launch=at(5), elements=8_000_000)
        built.annotation("FSDP::all_gather (blocks.1)", at(20), at(26))
        built.collective("all_gather", at(150), at(340), launch=at(22), elements=8_000_000)
        built.annotation("FSDP::pre_forward (blocks.0)", at(30), at(35))
        built.kernel("gemm_forward_0", at(110), at(300), launch=at(40))
        built.annotation("FSDP::post_forward (blocks.0)", at(45), at(50))
        built.annotation("FSDP::pre_forward (blocks.1)", at(60), at(65))
        built.kernel("gemm_forward_1", at(350), at(500), launch=at(70))
        built.annotation("FSDP::post_forward (blocks.1)", at(75), at(80))
        built.annotation("backward", at(200), at(500))
        built.kernel("gemm_backward_1", at(520), at(650), launch=at(210))
        built.annotation("FSDP::post_backward (blocks.1)", at(230), at(250))
        built.annotation("FSDP::reduce_scatter (blocks.1)", at(232), at(245))
        built.collective("reduce_scatter", at(655), at(780), launch=at(240), elements=8_000_000)
        built.kernel("gemm_backward_0", at(700), at(850), launch=at(260))
        built.annotation("FSDP::reduce_scatter (blocks.0)", at(280), at(290))
        built.collective("reduce_scatter", at(855), at(890), launch=at(285), elements=8_000_000)
        built.annotation("optimizer", at(500), at(600))
        built.kernel("adam", at(900), at(950), launch=at(510))
    return built
