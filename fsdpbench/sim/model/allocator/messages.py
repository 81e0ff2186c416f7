"""What torch says when memory runs out."""

from __future__ import annotations


def out_of_memory(*, asked: int, total: int, free: int, outside: int, allocated: int, reserved: int) -> str:
    """torch's message; all in bytes. ``outside`` is memory of the process that is not the allocator's."""
    return (
        f"CUDA out of memory. Tried to allocate {format_size(asked)}. GPU 0 has a total capacity of "
        f"{format_size(total)} of which {format_size(free)} is free. "
        f"Including non-PyTorch memory, this process has {format_size(outside + reserved)} "
        f"memory in use. Of the allocated memory {format_size(allocated)} is allocated by PyTorch, and "
        f"{format_size(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation. See documentation for Memory Management "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def format_size(nbytes: int) -> str:
    """Bytes as torch's messages write them: ``512 bytes``, ``2.00 KiB``, ``1.50 GiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
