"""How NCCL's kernels and their metadata are called in a trace."""

from __future__ import annotations

# Our kind -> (name of the kernel's algorithm, name in the kernel's metadata)
_KINDS = {
    "all_gather": ("AllGather", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter", "_reduce_scatter_base"),
    "all_reduce": ("AllReduce", "allreduce"),
    "broadcast": ("Broadcast", "broadcast"),
    "all_to_all": ("SendRecv", "all_to_all"),
    "barrier": ("AllReduce", "barrier"),
}
_REDUCING = frozenset({"reduce_scatter", "all_reduce", "barrier"})
_DTYPES = {
    "BFloat16": "bf16",
    "Half": "f16",
    "Float": "f32",
    "Double": "f64",
    "Char": "i8",
    "Byte": "u8",
    "Bool": "u8",
    "Int": "i32",
    "Long": "i64",
}


def kernel_name(kind: str, dtype: str, reduce_op: str) -> str:
    """The kernel of a collective; raises ValueError for an unknown kind."""
    if kind not in _KINDS:
        raise ValueError(f"collective {kind!r}: known are {', '.join(_KINDS)}")
    algorithm = _KINDS[kind][0]
    if kind == "all_to_all":
        return "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    reduction = f"_{reduce_op}_{_DTYPES.get(dtype, 'f32')}" if kind in _REDUCING else ""
    return f"ncclDevKernel_{algorithm}{reduction}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def metadata_name(kind: str) -> str:
    """The collective's name in a kernel's arguments."""
    return _KINDS[kind][1]
