"""Freed memory of a CPU stays with the process, as a GPU's stays with torch's allocator.

Gathered parameters and gradients come and go in megabytes. glibc returns what is free at the end of its heap
to the system once that is twice the largest block that was ever mapped by itself and freed; the system hands
it out again page by page, each cleared at its first touch. Where steps take 100 MB so, that is a quarter of
their system time. glibc follows blocks of up to 32 MiB, so that at most 64 MiB stay; freeing one of that size
is how a program tells it. The block is never touched and has no memory.

Nothing changes where malloc is another one, or where ``MALLOC_TRIM_THRESHOLD_`` and the like decide.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_LARGEST_BLOCK = (32 << 20) - (64 << 10)
"""Bytes: with malloc's own, just below the largest that glibc follows."""


@lru_cache(maxsize=1)
def keep_freed_pages() -> None:
    """Let malloc keep up to 64 MiB of freed memory; for the process, and once."""
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
