"""Valid traces from which the campaign makes others: of a GPU, of a CPU, and of several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reports"))

from trace_writing import TraceBuilder, build_fsdp_trace

Document = dict[str, Any]


def gpu() -> list[Document]:
    built = build_fsdp_trace()
    built.memory(1_100_000, 512, 512, 4096)
    built.retry(1_200_000, 512, 4096)
    return [built.document()]


def cpu() -> list[Document]:
    """Gloo's spans on a thread of their own beside operators, two steps."""
    built = TraceBuilder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    worker = (100, 900)
    for step in range(2):
        t = 1_000_000 + step * 1_000_000
        built.step(step, t, t + 1_000_000)
        built.op("c10d::allreduce_", t + 10_000, t + 20_000)
        shapes = {"Input Dims": [[1024]], "Input type": ["float"]}
        built.event("user_annotation", "gloo:all_reduce", t + 30_000, 400_000, lane=worker, args=shapes)
        for number in range(6):
            built.op("aten::mm", t + 40_000 + number * 120_000, t + 120_000 + number * 120_000)
    return [built.document()]


def several_ranks() -> list[Document]:
    """Four ranks that all-reduce ten times, the last of them late."""
    documents = []
    for rank in range(4):
        built = TraceBuilder(distributedInfo={"backend": "nccl", "rank": rank, "world_size": 4})
        begin = 1_000_000 + rank * 77_777
        built.step(0, begin, begin + 1_000_000)
        for number in range(10):
            turn = begin + number * 100_000
            late = 20_000 if rank == 3 else 100
            built.kernel("gemm", turn + 1_000, turn + 30_000, launch=turn + 100)
            built.collective("all_reduce", turn + late, turn + 40_000, launch=turn + 50, elements=80, ranks=4)
        documents.append(built.document())
    return documents
