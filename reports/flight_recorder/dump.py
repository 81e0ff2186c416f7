"""What one rank's dump says, in plain types: checked values, whatever the file held."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/")
DEFAULT_GROUP = "default_pg"


class Frame(NamedTuple):
    """A Python frame of a call."""

    file: str
    line: int
    function: str

    @property
    def is_installed(self) -> bool:
        """Whether it belongs to Python, torch or another library, not to the program itself."""
        return self.file.startswith("<") or any(folder in self.file for folder in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class GroupName(NamedTuple):
    """How a rank calls a process group."""

    name: str
    description: str

    @property
    def is_default(self) -> bool:
        return self.description == DEFAULT_GROUP


@dataclass(frozen=True)
class Entry:
    """One call. `sequence` counts the collectives of its group; parts of a coalesced one share it. Sizes are
    shapes. `created_ns` since the epoch. `state`: `scheduled`, `started` or `completed`."""

    group: GroupName
    sequence: int
    backend: str
    kind: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str
    is_p2p: bool
    created_ns: int
    frames: tuple[Frame, ...] = ()

    @property
    def own_frames(self) -> tuple[Frame, ...]:
        """The frames, those of the program itself first; innermost first in both."""
        own = [frame for frame in self.frames if not frame.is_installed]
        return (*own, *(frame for frame in self.frames if frame.is_installed))

    @property
    def knows_states(self) -> bool:
        """Whether the backend writes down what became of its collectives: gloo does not."""
        return self.backend != "gloo"


@dataclass(frozen=True)
class GroupStatus:
    """The last collectives of a group by sequence, -1 for none: called, running on the device, done."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True)
class Dump:
    """One rank's file. `members`: the global ranks of each group whose dump says them. `is_cut`: older
    entries have gone, the recorder keeps the last ones alone."""

    path: Path
    rank: int
    version: str
    entries: tuple[Entry, ...]
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    status: dict[str, GroupStatus] = field(default_factory=dict)
    is_cut: bool = False
