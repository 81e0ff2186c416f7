"""What rank 0 got out of its collectives, for the ranks that run after it.

After a real collective all ranks hold the same, and continue by it: `broadcast_object_list` hands out what
rank 0 decided, `all_reduce(MIN)` of the number of batches says how many steps all of them take. A simulated
rank has only what it put in. So rank 0 writes down what it had afterwards, and a rank that runs later has the
same after the same call, the n-th of the same group.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from fsdpbench.files.whole_files import write_whole

FILE_NAME = "values.pickle"
_LARGEST = 16 << 20
_MOST_IN_ALL = 256 << 20


class _TooLargeError(Exception):
    pass


class _Bounded(io.BytesIO):
    """A buffer that takes so much and no more: objects may hold whole models."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > _LARGEST:
            raise _TooLargeError
        return super().write(content)


class Values:
    """Values by the call that they came from. Rank 0 puts, the others get."""

    def __init__(self) -> None:
        self.placed: dict[str, tuple[int, int]] = {}
        """When rank 0 wrote which file (`arrivals.py`)."""
        self._by_call: dict[tuple[Any, ...], bytes] = {}
        self._size = 0

    def put(self, call: tuple[Any, ...], value: Any) -> None:
        """Remember `value`. One that cannot be pickled, or is large, is not remembered: the others then
        continue with their own."""
        if self._size > _MOST_IN_ALL:
            return
        buffer = _Bounded()
        try:
            pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception:  # whatever an object of the script raises when it is pickled
            return
        self._by_call[call] = buffer.getvalue()
        self._size += len(buffer.getvalue())

    def get(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """`(value,)`, or `()` if there is none. Loaded here and now: its class may be one of the script's."""
        content = self._by_call.get(call)
        if content is None:
            return ()
        try:
            return (pickle.loads(content),)
        except Exception:  # whatever an object of the script raises when it is unpickled
            return ()

    def write(self, folder: Path) -> None:
        """Leave them in `folder`."""
        write_whole(folder / FILE_NAME, pickle.dumps((self._by_call, self.placed)))

    @classmethod
    def read(cls, folder: Path) -> Values:
        """What rank 0 left in `folder`; nothing if it left nothing."""
        values = cls()
        path = folder / FILE_NAME
        if path.exists():
            values._by_call, values.placed = pickle.loads(path.read_bytes())
        return values
