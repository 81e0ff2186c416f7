"""The log of a rank: the collectives that it called, their results on rank 0, and how it ended."""

import io
import pickle
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from fsdpbench.base.reading import UnreadableError
from fsdpbench.base.writing import write_whole

LOG_NAME = "collectives.pickle"
MOST_CALLS = 200_000


class Ended(StrEnum):
    """The ends of a rank's script. All but `OK` cut its log short; `REFUSED`: it asks for what the simulation
    does not have."""

    OK = "ok"
    RAISED = "raised"
    REFUSED = "refused"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    TOO_MANY = "too_many_calls"


class Group(NamedTuple):
    """A communicator, the same on all of its ranks: its global ranks, and which one of these ranks it is.
    `lane` tells tensors of the host from those of the device, where they are sent side by side."""

    ranks: tuple[int, ...]
    number: int = 0
    lane: str = ""
    description: str = ""

    @property
    def key(self) -> tuple[tuple[int, ...], int, str]:
        """Return the identity of the group; descriptions may differ in words alone."""
        return self.ranks, self.number, self.lane


class Frame(NamedTuple):
    """A line of a stack; `own`: of the script's own files."""

    file: str
    line: int
    function: str
    own: bool


Stack = tuple[Frame, ...]


class Call(NamedTuple):
    """One collective. `sizes` are the elements that must be equal on all ranks, None where they may differ;
    `shown` says them to people. `root` is a global rank. `phase` is odd inside of `Join`."""

    group: Group
    kind: str
    sizes: tuple[int, ...] | None
    shown: str
    dtype: str
    reduction: str
    root: int | None
    stack: Stack
    phase: int = 0


@dataclass
class RankLog:
    """The calls of one rank, in order, and its end: `error` in words, `stood` its stack."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    ended: Ended = Ended.OK
    error: str | None = None
    stood: Stack = ()
    phase: int = 0
    """The last phase that it began; odd inside of `Join`."""

    @property
    def is_whole(self) -> bool:
        return self.ended is Ended.OK

    def write(self, folder: Path) -> None:
        """Write the log into `folder`, whole or not at all; groups and stacks that calls share once."""
        write_whole(folder / LOG_NAME, pickle.dumps(self))

    @classmethod
    def read(cls, folder: Path) -> "RankLog":
        """Read the log in `folder`, of a process of this run. Raise `UnreadableError` if there is none."""
        try:
            found: RankLog = pickle.loads((folder / LOG_NAME).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UnreadableError(folder / LOG_NAME, str(error)) from error
        return found


VALUES_NAME = "values.pickle"
_LARGEST = 16 << 20
_MOST_IN_ALL = 256 << 20


class _Bounded(io.BytesIO):
    """A buffer of at most `_LARGEST` bytes: objects may hold whole models."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > _LARGEST:
            raise OverflowError
        return super().write(content)


class Values:
    """The results of rank 0's collectives by call, for the ranks that run after it. Rank 0 puts, others get.

    After a real collective all ranks hold the same, and continue by it: `broadcast_object_list` hands out
    what rank 0 decided, `all_reduce(MIN)` of the number of batches says how many steps all of them take. A
    simulated rank has only its own input. So rank 0 writes down its results, and a rank that runs later gets
    them after the same call, the n-th of the same group.
    """

    def __init__(self) -> None:
        self.placed: dict[str, tuple[int, int]] = {}
        """Files that rank 0 wrote, with the collectives that it had called by then (`Arrivals`)."""
        self._by_call: dict[tuple[Any, ...], bytes] = {}
        self._size = 0

    def put(self, call: tuple[Any, ...], value: Any) -> None:
        """Remember `value`, unless it cannot be pickled or is large: the others then keep their own."""
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
        """Return `(value,)`, or `()` if there is none, loaded here: its class may be the script's."""
        content = self._by_call.get(call)
        if content is None:
            return ()
        try:
            return (pickle.loads(content),)
        except Exception:  # whatever an object of the script raises when it is unpickled
            return ()

    def write(self, folder: Path) -> None:
        """Write the values into `folder`."""
        write_whole(folder / VALUES_NAME, pickle.dumps((self._by_call, self.placed)))

    @classmethod
    def read(cls, folder: Path) -> "Values":
        """Read the values that rank 0 left in `folder`; none if it left none."""
        values = cls()
        path = folder / VALUES_NAME
        if path.exists():
            values._by_call, values.placed = pickle.loads(path.read_bytes())
        return values
