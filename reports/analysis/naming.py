"""What event names mean: which kernels are collectives and of which type, what is computation on a CPU.

Each name is examined once (a trace has some hundred names), not once for each event."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.readers.trace import Int64


class CollectiveType(StrEnum):
    """What a collective does, by whatever name its library calls it."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    SEND_RECV = "send_recv"
    BARRIER = "barrier"
    OTHER = "other"


COLLECTIVE_TYPES = tuple(CollectiveType)

# Runs of any letters are bounded: a name may be megabytes of them.
# In this order: "reduce_scatter" and "all_reduce" hold "reduce", "allgather" is a part of other names.
_TYPE_PATTERNS = (
    (re.compile(r"reduce_?scatter|userbuffers_\w{0,99}_rs(_|$)", re.I), CollectiveType.REDUCE_SCATTER),
    (
        re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce|userbuffers_\w{0,99}_sum", re.I),
        CollectiveType.ALL_REDUCE,
    ),
    (re.compile(r"all_?gather|(^|[_:])f?collect(_|$)|(^|[_:])gather", re.I), CollectiveType.ALL_GATHER),
    (
        re.compile(r"all_?to_?all|(intra|inter)node::|deep_ep::|internode_ll", re.I),
        CollectiveType.ALL_TO_ALL,
    ),
    (re.compile(r"broadcast|bcast", re.I), CollectiveType.BROADCAST),
    (re.compile(r"barrier|sync_all|quiet", re.I), CollectiveType.BARRIER),
    (
        re.compile(
            r"send_?recv|(^|[_:])(i?send|i?recv)|(put|get|wait|signal)_?(nbi|signal|mem|until|block|wrapper)"
            r"|shmemi?x?_\w{0,99}(put|get|wait|signal|p2p)|(put|wait)_signal|stream_(write|wait)_value",
            re.I,
        ),
        CollectiveType.SEND_RECV,
    ),
    (re.compile(r"reduce", re.I), CollectiveType.REDUCE),
)

# Kernels that carry out collectives and what belongs to them, by their libraries' names.
_COMMUNICATION_KERNEL = re.compile(
    r"^(void )?(nccl|rccl|msccl|hccl|oneccl|ucc_|oneapi::ccl)|ncclDevKernel|ncclKernel|mscclKernel|mscclpp"
    # torch's symmetric memory (CUDASymmetricMemoryOps.cu): multimem_*, one_shot_*, two_shot_*, signals.
    r"|(^|[ :_])multimem_\w+|(one|two)_shot_\w{0,99}(reduce|gather|scatter)|_symm_mem"
    r"|symm(etric)?_mem(ory)?[_:]"
    r"|(^|[ :])(barrier|put_signal|wait_signal)_kernel|stream_(write|wait)_value"
    # NVSHMEM, rocSHMEM, and what is built on them.
    r"|(nv|roc|ish|open)?shmem(i|x|m)?_\w+|all_to_all_vdev|deep_ep::|(intra|inter)node(_ll)?::\w{0,99}(dispatch|combine)"
    # Custom all-reduces of vLLM, SGLang, TensorRT-LLM, FlashInfer, Transformer Engine.
    r"|cross_device_reduce|quick_?reduce::|all_?reduce_(fusion|prototype|kernel)|trtllm_\w{0,99}all_?reduce|userbuffers_",
    re.IGNORECASE,
)

_CPU_COLLECTIVE_SPAN = re.compile(r"^(gloo|mpi|ucc|emulated):")

_ISSUE = re.compile(r"^(c10d|_c10d_functional|_c10d_functional_autograd)::(?!.*wait)")

# Namespaces of operators that only wrap, wait or hand over to communication.
_NO_COMPUTATION = re.compile(
    r"^(c10d|_c10d_functional\w*|c10d_functional|autograd|torch::autograd|torch::jit|profiler|"
    r"record_param_comms|gloo|nccl|mpi|ucc|emulated)\b"
)

_COMPUTATION_OPERATOR = re.compile(r"^[A-Za-z_]\w*::\w|^(graph_\d+_)?cpp_fused|^Torch-Compiled Region")


@lru_cache(maxsize=4096)  # a trace has few names, and each of them thousands of times
def collective_type(name: str) -> CollectiveType:
    """The type behind a kernel's, a span's or a metadata name ("_allgather_base", "gloo:all_reduce")."""
    # RCCL's and NCCL's template arguments may name other things; the type stands before the first bracket.
    head = name.replace("(anonymous namespace)::", "").split("(", 1)[0].split("<", 1)[0]
    for pattern, kind in _TYPE_PATTERNS:
        if pattern.search(head):
            return kind
    return CollectiveType.OTHER


def communication_kernel_names(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask over `trace.names`."""
    return np.fromiter(map(_is_communication_kernel, trace.names), np.bool_, len(trace.names))


@lru_cache(maxsize=16_384)  # the pattern is slow, and traces of one run have most names in common
def _is_communication_kernel(name: str) -> bool:
    return _COMMUNICATION_KERNEL.search(name) is not None


def cpu_collective_names(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask over `trace.names`: spans of collectives that the CPU itself carries out."""
    return _mask(trace, _CPU_COLLECTIVE_SPAN)


def issue_names(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask over `trace.names`: operators that hand a collective to its process group."""
    return _mask(trace, _ISSUE)


def cpu_computation_names(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask over `trace.names`: operators that compute. Autograd's wrappers do not: hooks wait in them."""
    return _mask(trace, _COMPUTATION_OPERATOR) & ~_mask(trace, _NO_COMPUTATION)


def _mask(trace: Trace, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    return np.fromiter((bool(pattern.search(name)) for name in trace.names), np.bool_, len(trace.names))


_ALLOCATING = frozenset(
    {
        "cudaMalloc",
        "cudaFree",
        "hipMalloc",
        "hipFree",
        "cuMemCreate",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemRelease",
    }
)

_SYNCHRONIZING = frozenset(
    f"{prefix}{what}Synchronize" for prefix in ("cuda", "hip") for what in ("Device", "Stream", "Event")
)


def allocator_rows(trace: Trace) -> Int64:
    """Rows of the driver's allocation calls, in order of their start."""
    return _rows(trace, _ALLOCATING)


def allocator_calls(trace: Trace) -> Intervals:
    """When the CPU was in the driver's allocation calls."""
    return _times(trace, allocator_rows(trace))


def synchronizing_calls(trace: Trace) -> Intervals:
    """When the CPU waited for the device."""
    return _times(trace, _rows(trace, _SYNCHRONIZING))


def _rows(trace: Trace, wanted: frozenset[str]) -> Int64:
    named = np.fromiter((name in wanted for name in trace.names), np.bool_, len(trace.names))
    rows = trace.rows(Category.RUNTIME)
    rows = rows[named[trace.events.name[rows]]]
    return rows[np.argsort(trace.events.start[rows], kind="stable")]


def _times(trace: Trace, rows: Int64) -> Intervals:
    return intervals.of(trace.events.start[rows], trace.events.end[rows])
