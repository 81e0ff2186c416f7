"""How far a sweep is, as its folder tells: for those that watch it from outside, on any machine that sees it.

    sweep.toml        what it is made of          .lock       whether a process still works at it
    <name>-<key8>/    what has ended              .work-*/    what is under way, .slurm/jobs: as which jobs

Nothing is written, so a watcher disturbs no sweep. What is half there at a look is whole at the next.
"""

import contextlib
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fsdpbench.base.errors import UsageError
from fsdpbench.base.reading import read_toml
from fsdpbench.engine.results.store import RESULT_FILE, SWEEP_FILE, Store, result_in
from fsdpbench.reports.result import Result

_WORK = ".work-"
_KEY = re.compile(r"-[0-9a-f]{8}(\.run\d+)?$")
_SLURM_S = 10


@dataclass(frozen=True)
class Ended:
    """A configuration that has ended, in `folder`; `changed_ns`: when its result was written."""

    name: str
    folder: Path
    result: Result
    changed_ns: int


@dataclass(frozen=True)
class SweepState:
    """One look at a sweep's folder.

    points: the folders that the sweep is made of.  ended: those with a result, in the order of their ends.
    under_way: folders of those that were started (as Slurm jobs they may still wait for a node).  is_held:
    a process works at it.  began_ns: when the sweep was started last, by the file system.
    """

    points: tuple[str, ...]
    ended: tuple[Ended, ...]
    under_way: tuple[Path, ...]
    is_held: bool
    began_ns: int

    @property
    def is_done(self) -> bool:
        """Whether every configuration has a result."""
        return len(self.ended) == len(self.points)

    @property
    def failed(self) -> int:
        """Return the number of those that ended without an answer."""
        return sum(not each.result.status.is_answer for each in self.ended)

    @property
    def left_s(self) -> float | None:
        """Seconds to go at the pace of those that ended since the sweep was started; None where none has."""
        new = [each.changed_ns for each in self.ended if each.changed_ns > self.began_ns]
        missing = len(self.points) - len(self.ended)
        return (max(new) - self.began_ns) / len(new) * missing / 1e9 if new and missing else None


@dataclass
class SweepFolder:
    """Looks at one folder again and again; results are read once."""

    path: Path
    _store: Store = field(init=False)
    _read: dict[str, Ended | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = Store(self.path)

    def look(self) -> SweepState | None:
        """How it stands; None where no sweep's folder is there (yet).

        Raises `UsageError` if something else is there.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give the folder that a sweep writes, such as runs/NAME")
        # The lock first: what is written before it is let go is then seen.
        held = self._store.is_locked
        try:
            began = (self.path / SWEEP_FILE).stat().st_mtime_ns
            points = tuple(map(str, read_toml(self.path / SWEEP_FILE).get("points", [])))
        except (OSError, UsageError, TypeError):
            return None
        found = [each for name in points if (each := self._ended(name)) is not None]
        ended = sorted(found, key=lambda each: each.changed_ns)
        return SweepState(points, tuple(ended), self._under_way() if held else (), held, began)

    def _ended(self, folder: str) -> Ended | None:
        path = self.path / folder / RESULT_FILE
        try:
            changed = path.stat().st_mtime_ns
            known = self._read.get(folder)
            if known is None or known.changed_ns != changed:
                result = result_in(path.parent)
                known = None if result is None else Ended(point_name(folder), path.parent, result, changed)
                self._read[folder] = known
        except OSError:
            return None
        return known

    def _under_way(self) -> tuple[Path, ...]:
        with contextlib.suppress(OSError):
            found = sorted(self.path.glob(f"{_WORK}*"))
            return tuple(path for path in found if not path.name.startswith(f"{_WORK}old-"))
        return ()


def point_name(folder: str) -> str:
    """A configuration's name from that of its folder; further runs with their number."""
    found = _KEY.search(folder)
    if found is None:
        return folder
    run = (found[1] or "").removeprefix(".run")
    return folder[: found.start()] + (f" (run {run})" if run else "")


def slurm_words(folder: Path) -> str:
    """`3 running, 5 pending`: the sweep's Slurm jobs by state; empty where there are none, or no Slurm."""
    try:
        ids = [word for word in (folder / ".slurm" / "jobs").read_text().split() if word.isdecimal()]
        if not ids or shutil.which("squeue") is None:
            return ""
        asked = ["squeue", "--noheader", "--array", f"--jobs={','.join(ids)}", "--format=%T"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_SLURM_S, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    states = Counter(done.stdout.lower().split())
    return ", ".join(f"{count} {state}" for state, count in states.most_common())
