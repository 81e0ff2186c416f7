"""Which files hold arrays, by their first bytes: what was in memory may have been written by any library.

A script that copied tensors into arrays or bytes (`tensor.numpy()`, `torch.save` into a buffer) may write
them anywhere. Of the files written after that, those in a format for arrays are assumed to hold them. Formats
of tables, databases and text are never a checkpoint.
"""

from __future__ import annotations

import os
import time

_HEAD = 4096
_PICKLE = 1 << 20
_SLACK_S = 0.02
"""The clock of file systems may be behind by that much."""
_ARRAYS = (b"\x93NUMPY", b"\x89HDF", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""NumPy, HDF5, and compressed files, whose content is not known; archives (tar) are too."""
_TABLES = (
    b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"SQLite format 3", b"ORC", b"\x7fELF", b"GIF8", b"\x89PNG",
)  # fmt: skip
_now = time.time


def holds_arrays(path: str) -> bool | None:
    """Return whether a file is of a format for arrays; None for bytes of an unknown format."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
            head = file.read(_HEAD)
            if head[:1] == b"\x80":
                head += file.read(_PICKLE)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if head.startswith(_ARRAYS) or head[257:262] == b"ustar":
        return True
    if head.startswith(b"PK\x03\x04"):
        return b"data.pkl" in head or b".npy" in head or b"constants.pkl" in head
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return b"torch" in head or b"numpy" in head
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < size:
        return True  # safetensors
    if not head or head.startswith(_TABLES):
        return False
    return None if b"\0" in head else False


class Escaped:
    """Whether bytes of tensors are in the process's memory, outside of any tensor."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self) -> None:
        """Note that tensors became bytes or arrays now."""
        if self._since is None:
            self._since = _now() - _SLACK_S

    def may_be_in(self, path: str, *, unknown: bool) -> bool:
        """Return whether they may be in a file. `unknown`: the answer for a format that is not known."""
        if self._since is None or os.lstat(path).st_mtime < self._since:
            return False
        answer = holds_arrays(path)
        return unknown if answer is None else answer
