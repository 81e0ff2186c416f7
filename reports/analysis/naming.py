"""Classification of event names: which kernels are collectives, of which type, and what is CPU computation.

Each name is classified once (a trace has some hundred names), not once per event."""

import re
from enum import StrEnum
from functools import lru_cache

from fsdpbench.base.files.documents import table_beside
from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.readers.trace import Int64


class CollectiveType(StrEnum):
    """Types of collectives, independent of the names that libraries use."""

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

PATTERNS = table_beside(__file__, "names.toml")
_TYPE_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), CollectiveType(kind)) for kind, pattern in PATTERNS["types"]
)
_COMMUNICATION_KERNEL = re.compile("|".join(PATTERNS["communication"]), re.IGNORECASE)
is_cpu_collective = re.compile(r"^(gloo|mpi|ucc):").search
"""Whether this is the span of a collective that runs on the CPU itself."""
is_issue = re.compile(r"^(c10d|_c10d_functional|_c10d_functional_autograd)::(?!.*wait)").search
"""Whether this operator issues a collective to its process group."""

# Namespaces of operators that only wrap, wait for or issue communication.
_NO_COMPUTATION = re.compile(
    r"^(c10d|_c10d_functional\w*|c10d_functional|autograd|torch::autograd|torch::jit|profiler|"
    r"record_param_comms|gloo|nccl|mpi|ucc)\b"
)
_COMPUTATION_OPERATOR = re.compile(r"^[A-Za-z_]\w*::\w|^(graph_\d+_)?cpp_fused|^Torch-Compiled Region")


@lru_cache(maxsize=4096)  # a trace has few names, each of them thousands of times
def collective_type(name: str) -> CollectiveType:
    """Return the type behind a kernel's, span's or metadata name ("_allgather_base", "gloo:broadcast")."""
    # Template arguments of RCCL and NCCL may name other types; the type is before the first bracket.
    head = name.replace("(anonymous namespace)::", "").split("(", 1)[0].split("<", 1)[0]
    for pattern, kind in _TYPE_PATTERNS:
        if pattern.search(head):
            return kind
    return CollectiveType.OTHER


@lru_cache(maxsize=16_384)  # the pattern is slow, and traces of one run have most names in common
def is_communication_kernel(name: str) -> bool:
    """Return whether a kernel runs a collective, or a part of one."""
    return _COMMUNICATION_KERNEL.search(name) is not None


def is_cpu_computation(name: str) -> bool:
    """Return whether this operator computes. Autograd's wrappers do not: hooks wait in them."""
    return _COMPUTATION_OPERATOR.search(name) is not None and _NO_COMPUTATION.search(name) is None


ALLOCATING = frozenset(f"{prefix}{call}" for prefix in ("cuda", "hip") for call in ("Malloc", "Free"))
ALLOCATING |= {"cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"}
SYNCHRONIZING = frozenset(
    f"{prefix}{what}Synchronize" for prefix in ("cuda", "hip") for what in ("Device", "Stream", "Event")
)


def allocator_rows(trace: Trace) -> Int64:
    """Return the rows of the driver's allocation calls, in order of their start."""
    return trace.by_start(trace.rows_named(ALLOCATING.__contains__, Category.RUNTIME))


def times_of(trace: Trace, calls: frozenset[str]) -> Intervals:
    """Return when the CPU was in one of these driver calls."""
    rows = trace.rows_named(calls.__contains__, Category.RUNTIME)
    return intervals.of(trace.events.start[rows], trace.events.ends(rows))
