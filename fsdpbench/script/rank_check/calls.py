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
    """The outcome of a rank's script. All but `OK` cut its log short; `REFUSED`: it needs something that is
    not simulated."""

    OK = "ok"
    RAISED = "raised"
    REFUSED = "refused"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    TOO_MANY = "too_many_calls"


class Group(NamedTuple):
    """A communicator, identified alike on all of its ranks: its global ranks, and its number among the groups
    of these ranks. `lane` separates host tensors from device tensors, if they are sent side by side."""

    ranks: tuple[int, ...]
    number: int = 0
    lane: str = ""
    description: str = ""

    @property
    def key(self) -> tuple[tuple[int, ...], int, str]:
        """Return the identity of the group; descriptions may differ in wording only."""
        return self.ranks, self.number, self.lane


class Frame(NamedTuple):
    """A line of a stack; `own`: of the script's own files."""

    file: str
    line: int
    function: str
    own: bool


Stack = tuple[Frame, ...]


class Call(NamedTuple):
    """One collective. `sizes`: the numbers of elements that must be equal on all ranks, None if they may
    differ; `shown`: these sizes as text. `root`: a global rank. `phase`: odd inside `Join`."""

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
    """The calls of one rank, in order, and its end: `error`, a text, and `stood`, the stack."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    ended: Ended = Ended.OK
    error: str | None = None
    stood: Stack = ()
    phase: int = 0
    """The last phase that the rank began; odd inside `Join`."""

    @property
    def is_whole(self) -> bool:
        return self.ended is Ended.OK

    def write(self, folder: Path) -> None:
        """Write the log into `folder` atomically; pickle stores groups and stacks that calls share once."""
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
    """A buffer of at most `_LARGEST` bytes: objects may contain whole models."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > _LARGEST:
            raise OverflowError
        return super().write(content)


class Values:
    """The results of rank 0's collectives by call, for the ranks that run after it. Rank 0 puts, others get.

    After a real collective all ranks have the same values and act on them: `broadcast_object_list`
    distributes a decision of rank 0, `all_reduce(MIN)` of the number of batches sets the number of steps for
    all. A simulated rank has only its own input. So rank 0 records its results, and a rank that runs later
    gets them after the same call, the n-th of the same group.
    """

    def __init__(self) -> None:
        self.placed: dict[str, tuple[int, int]] = {}
        """Files that rank 0 wrote, with the collectives that it had called before each (`Arrivals`)."""
        self._by_call: dict[tuple[Any, ...], bytes] = {}
        self._size = 0

    def put(self, call: tuple[Any, ...], value: Any) -> None:
        """Store `value`, unless it cannot be pickled or is large: other ranks then keep their own."""
        if self._size > _MOST_IN_ALL:
            return
        buffer = _Bounded()
        try:
            pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception:  # an object of the script may raise anything when pickled
            return
        self._by_call[call] = buffer.getvalue()
        self._size += len(buffer.getvalue())

    def get(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `(value,)`, or `()` if there is none, unpickled here: its class may be the script's."""
        content = self._by_call.get(call)
        if content is None:
            return ()
        try:
            return (pickle.loads(content),)
        except Exception:  # an object of the script may raise anything when unpickled
            return ()

    def write(self, folder: Path) -> None:
        """Write the values into `folder`."""
        write_whole(folder / VALUES_NAME, pickle.dumps((self._by_call, self.placed)))

    @classmethod
    def read(cls, folder: Path) -> "Values":
        """Read the values that rank 0 wrote to `folder`; empty if it wrote none."""
        values = cls()
        path = folder / VALUES_NAME
        if path.exists():
            values._by_call, values.placed = pickle.loads(path.read_bytes())
        return values
