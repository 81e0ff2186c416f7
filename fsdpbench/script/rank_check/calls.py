"""One collective as a rank called it, and the log of a rank: what it called, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fsdpbench.files.lock_owner import read_json_object
from fsdpbench.files.whole_files import write_whole

T = TypeVar("T")
LOG_NAME = "collectives.json"
MOST_CALLS = 200_000


class Ended(StrEnum):
    """How a rank's script ended. All but `OK` cut its log short."""

    OK = "ok"
    RAISED = "raised"
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
        """What tells it from others; a description may differ in nothing but words."""
        return self.ranks, self.number, self.lane


class Frame(NamedTuple):
    """A line of a stack; `own`: of the script's own files."""

    file: str
    line: int
    function: str
    own: bool

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


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
    """What one rank called, in order, and how it ended: `error` in words, `stood` where."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    ended: Ended = Ended.OK
    error: str | None = None
    stood: Stack = ()
    phase: int = 0
    """The last one that it began."""

    @property
    def is_whole(self) -> bool:
        return self.ended is Ended.OK

    def write(self, folder: Path) -> None:
        """Write into `folder`, whole."""
        groups = _Table[Group]()
        stacks = _Table[Stack]()
        calls = [
            [groups.index(call.group), *call[1:7], stacks.index(call.stack), call.phase]
            for call in self.calls
        ]
        stood = stacks.index(self.stood)
        content = {
            "schema": 1,
            "rank": self.rank,
            "ended": self.ended.value,
            "error": self.error,
            "stood": stood,
            "phase": self.phase,
            "groups": [[_short(group.ranks), *group[1:]] for group in groups.items],
            "stacks": stacks.items,
            "calls": calls,
        }
        write_whole(folder / LOG_NAME, json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> RankLog:
        """Raises `UnreadableFileError`."""
        content = read_json_object(folder / LOG_NAME)
        groups = [Group(_long(ranks), *rest) for ranks, *rest in content["groups"]]
        stacks = [tuple(Frame(*frame) for frame in stack) for stack in content["stacks"]]
        calls = []
        for group, kind, sizes, *said, stack, phase in content["calls"]:
            whole = None if sizes is None else tuple(sizes)
            calls.append(Call._make((groups[group], kind, whole, *said, stacks[stack], phase)))
        ended = Ended(content["ended"])
        return cls(
            content["rank"], calls, ended, content["error"], stacks[content["stood"]], content["phase"]
        )


class _Table(Generic[T]):
    """Each of equal items once."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._places: dict[T, int] = {}

    def index(self, item: T) -> int:
        place = self._places.setdefault(item, len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place


def _short(ranks: Sequence[int]) -> Mapping[str, int] | list[int]:
    """Evenly spaced ranks as a range: a group may have thousands, and be one of thousands."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks and step > 0 and tuple(range(ranks[0], ranks[-1] + 1, step)) == tuple(ranks):
        return {"first": ranks[0], "last": ranks[-1], "step": step}
    return list(ranks)


def _long(ranks: Mapping[str, int] | Sequence[int]) -> tuple[int, ...]:
    if isinstance(ranks, Mapping):
        return tuple(range(ranks["first"], ranks["last"] + 1, ranks["step"]))
    return tuple(ranks)
