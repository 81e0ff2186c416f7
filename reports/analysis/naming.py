"""Meanings of event names: which kernels are collectives and of which type, what is computation on a CPU.

Each name is examined once (a trace has some hundred names), not once for each event."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.readers.trace import Int64


class CollectiveType(StrEnum):
    """Types of collectives, by whatever name a library calls them."""

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
    (re.compile(r"all_?to_?all|(intra|inter)node::|deep_ep::|internode_ll", re.I), CollectiveType.ALL_TO_ALL),
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

_CPU_COLLECTIVE_SPAN = re.compile(r"^(gloo|mpi|ucc):")
_ISSUE = re.compile(r"^(c10d|_c10d_functional|_c10d_functional_autograd)::(?!.*wait)")

# Namespaces of operators that only wrap, wait or hand over to communication.
_NO_COMPUTATION = re.compile(
    r"^(c10d|_c10d_functional\w*|c10d_functional|autograd|torch::autograd|torch::jit|profiler|"
    r"record_param_comms|gloo|nccl|mpi|ucc)\b"
)
_COMPUTATION_OPERATOR = re.compile(r"^[A-Za-z_]\w*::\w|^(graph_\d+_)?cpp_fused|^Torch-Compiled Region")


@lru_cache(maxsize=4096)  # a trace has few names, and each of them thousands of times
def collective_type(name: str) -> CollectiveType:
    """Return the type behind a kernel's, span's or metadata name ("_allgather_base", "gloo:broadcast")."""
    # RCCL's and NCCL's template arguments may name other things; the type stands before the first bracket.
    head = name.replace("(anonymous namespace)::", "").split("(", 1)[0].split("<", 1)[0]
    for pattern, kind in _TYPE_PATTERNS:
        if pattern.search(head):
            return kind
    return CollectiveType.OTHER


@lru_cache(maxsize=16_384)  # the pattern is slow, and traces of one run have most names in common
def is_communication_kernel(name: str) -> bool:
    """Return whether a kernel carries out a collective, or a part of one."""
    return _COMMUNICATION_KERNEL.search(name) is not None


def is_cpu_collective(name: str) -> bool:
    """Return whether this is the span of a collective that the CPU itself carries out."""
    return _CPU_COLLECTIVE_SPAN.search(name) is not None


def is_issue(name: str) -> bool:
    """Return whether this operator hands a collective to its process group."""
    return _ISSUE.search(name) is not None


def is_cpu_computation(name: str) -> bool:
    """Return whether this operator computes. Autograd's wrappers do not: hooks wait in them."""
    return _COMPUTATION_OPERATOR.search(name) is not None and _NO_COMPUTATION.search(name) is None


_ALLOCATING = frozenset(f"{prefix}{call}" for prefix in ("cuda", "hip") for call in ("Malloc", "Free"))
_ALLOCATING |= {"cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"}
_SYNCHRONIZING = frozenset(
    f"{prefix}{what}Synchronize" for prefix in ("cuda", "hip") for what in ("Device", "Stream", "Event")
)


def allocator_rows(trace: Trace) -> Int64:
    """Return rows of the driver's allocation calls, in order of their start."""
    return trace.by_start(trace.rows_named(_ALLOCATING.__contains__, Category.RUNTIME))


def allocator_calls(trace: Trace) -> Intervals:
    """Return when the CPU was in the driver's allocation calls."""
    rows = allocator_rows(trace)
    return intervals.of(trace.events.start[rows], trace.events.end[rows])


def synchronizing_calls(trace: Trace) -> Intervals:
    """Return when the CPU waited for the device."""
    rows = trace.rows_named(_SYNCHRONIZING.__contains__, Category.RUNTIME)
    return intervals.of(trace.events.start[rows], trace.events.end[rows])
