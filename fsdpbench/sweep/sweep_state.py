"""The progress of a sweep, read from its folder by watchers on any machine that can see the folder.

    sweep.toml        the points of the sweep     .lock       whether a process still works on it
    <name>-<key8>/    finished configurations     .work-*/    those in progress, .slurm/jobs: their jobs

Nothing is written, so watchers do not disturb the sweep. An incomplete file is read again at the next look.
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
    """A finished configuration in `folder`; `changed_ns`: modification time of its result."""

    name: str
    folder: Path
    result: Result
    changed_ns: int


@dataclass(frozen=True)
class SweepState:
    """The state of a sweep's folder at one time.

    points: folders of all configurations.  ended: those with a result, in the order in which they finished.
    under_way: folders of those that were started (Slurm jobs among them may still wait for a node).  is_held:
    a process works on the sweep.  began_ns: when the sweep was last started, by the file system's clock.
    """

    points: tuple[str, ...]
    ended: tuple[Ended, ...]
    under_way: tuple[Path, ...]
    is_held: bool
    began_ns: int

    @property
    def is_done(self) -> bool:
        """Return whether every configuration has a result."""
        return len(self.ended) == len(self.points)

    @property
    def failed(self) -> int:
        """Return the number of configurations that ended without an answer."""
        return sum(not each.result.status.is_answer for each in self.ended)

    @property
    def left_s(self) -> float | None:
        """Return the estimated seconds left, from those that ended since the start; None if none did."""
        new = [each.changed_ns for each in self.ended if each.changed_ns > self.began_ns]
        missing = len(self.points) - len(self.ended)
        return (max(new) - self.began_ns) / len(new) * missing / 1e9 if new and missing else None


@dataclass
class SweepFolder:
    """A watcher of one folder that reads each result only once."""

    path: Path
    _store: Store = field(init=False)
    _read: dict[str, Ended | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = Store(self.path)

    def look(self) -> SweepState | None:
        """Return the current state; None if there is no sweep's folder (yet).

        Raises `UsageError` if the path is not a folder.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give the folder that a sweep writes, such as runs/NAME")
            # Look at the lock first, so that everything written before its release is seen below.
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
    """Return a configuration's name from its folder's name, with the number of a further run."""
    found = _KEY.search(folder)
    if found is None:
        return folder
    run = (found[1] or "").removeprefix(".run")
    return folder[: found.start()] + (f" (run {run})" if run else "")


def slurm_words(folder: Path) -> str:
    """Return the sweep's Slurm jobs by state (`3 running, 5 pending`); empty without jobs or Slurm."""
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
