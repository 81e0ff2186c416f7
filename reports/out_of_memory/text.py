"""An out-of-memory text, explained in words: figures, arithmetic, and what cannot be known."""

from __future__ import annotations

from fsdpbench.reports.out_of_memory.log import OomReport
from fsdpbench.reports.out_of_memory.message import OomMessage

_GIB = 1 << 30
_FRAGMENTED = 0.1
"""Above this share of the reserved memory, what is reserved and unallocated is worth a word."""
_MUCH_OUTSIDE = 0.1
UNKNOWN = "unknown"
_OF_OTHERS = {
    "driver": (
        "The driver had no memory for something other than torch's allocator (NCCL, cuBLAS, a library)",
        "torch's allocator holds what it once took: leave it less (a smaller batch), or set "
        "`torch.cuda.set_per_process_memory_fraction(0.9)`, so that others find memory",
    ),
    "killed": (
        "The host ran out of memory, and its kernel ended a process; the GPU's memory is another question",
        "fewer or leaner `DataLoader` workers, no whole checkpoint in every rank at the same time, "
        "less offloaded; or more memory for the job (Slurm's --mem, the container's limit)",
    ),
    "shm": (
        "Shared memory (/dev/shm) was full: `DataLoader` workers and NCCL's ranks of one machine use it",
        "give the container more (`docker run --shm-size=16g` or `--ipc=host`), or use fewer workers",
    ),
}
"""Headline and finding of what was not the GPU's allocator."""


def describe_report(report: OomReport) -> str:
    """Several lines, for people."""
    message = report.message
    lines = [_headline(message), ""]
    rows = [
        ("asked for", message.asked),
        ("free on the GPU", message.free),
        ("missing", message.short),
        ("the GPU has", message.total),
        ("allowed to this process", message.allowed),
        ("allocated by torch", message.allocated),
        ("  of it in private pools (CUDA graphs)", message.private_pools),
        ("reserved by torch, unallocated", message.unallocated),
        ("this process, outside torch's allocator", message.outside),
        ("other processes", message.others),
    ]
    optional = {"allowed to this process", "  of it in private pools (CUDA graphs)", "other processes"}
    lines += [
        f"  {what:<42}{told(size):>12}" for what, size in rows if size is not None or what not in optional
    ]
    lines += ["", *(f"- {finding}" for finding in findings(message)), ""]
    ranks = ", ".join(map(str, report.ranks))
    lines += [
        f"  {'rank':<12}{ranks or UNKNOWN}",
        f"  {'phase':<12}{report.phase or UNKNOWN}",
        f"  {'line':<12}{report.where or UNKNOWN}",
        f"  {'held by':<12}{UNKNOWN}: a message does not tell; name the model or the script "
        "(--model, --script) and it is simulated",
    ]
    return "\n".join(lines)


def _headline(message: OomMessage) -> str:
    if message.source in _OF_OTHERS:
        return _OF_OTHERS[message.source][0]
    if message.source == "CPU":
        return f"The host ran out of memory: {told(message.asked)} were asked for"
    where = f"GPU {message.gpu}" if message.gpu is not None else "the device"
    asked, free = told(message.asked), told(message.free)
    return f"{message.source} out of memory on {where}: {asked} asked for, {free} free"


def findings(message: OomMessage) -> list[str]:
    """What follows from the figures alone, the most telling first."""
    if message.source in _OF_OTHERS:
        return [_OF_OTHERS[message.source][1]]
    found = [finding for part in (_others, _limit, _fragments, _outside) if (finding := part(message))]
    return found or ["the message tells too little for more"]


def _others(message: OomMessage) -> str | None:
    if not message.others:
        return None
    what = "another process holds" if message.others_seen == 1 else f"{message.others_seen} others hold"
    return f"{what} {told(message.others)} of this GPU: end it, or use another GPU (`nvidia-smi`)"


def _limit(message: OomMessage) -> str | None:
    if message.allowed is None or message.free is None or message.asked is None:
        return None
    if message.free < message.asked:
        return None
    return "the GPU has room; `set_per_process_memory_fraction` is the limit"


def _fragments(message: OomMessage) -> str | None:
    unallocated, asked, free = message.unallocated, message.asked, message.free
    if unallocated is None or asked is None or not message.reserved:
        return None
    if unallocated >= asked and unallocated >= _FRAGMENTED * message.reserved:
        return (
            f"fragmentation: {told(unallocated)} are reserved and unallocated, more than was asked for, "
            "but not in one piece: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if free is None:
        return None
    if unallocated + free < asked:
        return (
            f"not fragmentation: free and unallocated memory together ({told(unallocated + free)}) are "
            f"less than what was asked for ({told(asked)}); the program itself must hold less"
        )
    return (
        f"{told(unallocated)} are reserved and unallocated; with expandable segments the request may fit, "
        "with little to spare"
    )


def _outside(message: OomMessage) -> str | None:
    outside, total = message.outside, message.total
    if outside is None or not total or outside <= _MUCH_OUTSIDE * total:
        return None
    return (
        f"{told(outside)} of this GPU are in use outside torch's allocator: CUDA context, NCCL, libraries, "
        "or another process"
    )


def told(size: int | None) -> str:
    """Bytes for people."""
    if size is None:
        return UNKNOWN
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B"
