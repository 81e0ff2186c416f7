"""Pickles from elsewhere, of plain values: lists, dictionaries, strings, numbers.

Nothing else is made of them, so that no file can run code, and none gets more memory than its size explains.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

from fsdpbench.reports.bounded_memory import bounded_memory

_MEMORY_A_BYTE = 150
"""A byte of a pickle makes an empty dictionary at most, and a place in what holds it."""
_MEMORY_AT_LEAST = 256 << 20


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and plain values only are read")


def load_plain(file: IO[bytes], size: int) -> Any:
    """The values in a pickle of `size` bytes.

    Raises:
        MemoryError: it asks for more than its size explains.
        EOFError: it ends in the middle.
        Exception: damaged pickles raise nearly anything.
    """
    with bounded_memory(_MEMORY_A_BYTE * size + _MEMORY_AT_LEAST):
        return _PlainUnpickler(file).load()
