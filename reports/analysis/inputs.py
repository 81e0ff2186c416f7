"""Which files a path means: a trace, a folder of traces, a configuration's folder, or a run of several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.reports.analysis.measures.snapshot import SUFFIXES as SNAPSHOT_SUFFIXES
from fsdpbench.reports.trace import TraceError

_SUFFIXES = (".json", ".json.gz", *SNAPSHOT_SUFFIXES)
_MOST_FILES = 500_000
"""More is a whole disk, and takes minutes to look through."""
_NOT_TRACES = ("_record.json", "config.json", "result.json")


@dataclass(frozen=True)
class TraceFile:
    """A file to read; `asked_for` is True where the user named it, so that an error in it is an error."""

    path: Path
    configuration: str | None
    asked_for: bool

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a memory snapshot and not a trace, by its name."""
        return self.path.name.endswith(SNAPSHOT_SUFFIXES)


def find_traces(paths: Sequence[Path | str]) -> list[TraceFile]:
    """The trace files behind the paths, in a stable order, each once.

    Raises:
        TraceError: a path that does not exist, or a folder without traces.
    """
    found: dict[Path, TraceFile] = {}
    for given in paths:
        path = Path(given)
        try:
            found |= _behind(path, found)
        except FileNotFoundError:
            raise TraceError(path, "does not exist") from None
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(path, f"cannot be read ({reason})") from None
    return list(found.values())


def _behind(path: Path, known: Mapping[Path, TraceFile]) -> dict[Path, TraceFile]:
    """The files behind one path by what they are really; a named one counts as asked for."""
    if not path.is_dir():
        path.stat()  # says why where it is not there
        return {path.resolve(): TraceFile(path, _configuration(path), asked_for=True)}
    inside = _in_folder(path)
    if not inside:
        raise TraceError(path, "holds no traces (no *.json or *.json.gz that could be one)")
    new: dict[Path, TraceFile] = {}
    for file in inside:
        place = file.path.resolve()
        if place not in known:
            new.setdefault(place, file)
    return new


def _files_below(folder: Path) -> list[Path]:
    """Sorted. What goes away or may not be looked into while we look is no reason to end (a busy `/tmp`)."""
    found: list[Path] = []
    seen = 0
    for place, _, names in os.walk(folder):
        found += (Path(place, name) for name in names if name.endswith(_SUFFIXES))
        seen += 1 + len(names)
        if seen > _MOST_FILES:
            raise TraceError(folder, f"holds more than {_MOST_FILES:,} files: name a folder further down")
    return sorted(found)


def _in_folder(folder: Path) -> list[TraceFile]:
    """All files below the folder that may be traces; where some beside each other say so in their names,
    only those."""
    by_folder: dict[Path, list[Path]] = {}
    for file in _files_below(folder):
        if file.name.endswith(_SUFFIXES) and not file.name.endswith(_NOT_TRACES) and file.is_file():
            by_folder.setdefault(file.parent, []).append(file)
    found: list[TraceFile] = []
    for files in by_folder.values():
        named = [file for file in files if "trace" in file.name or file.name.endswith(SNAPSHOT_SUFFIXES)]
        found += [TraceFile(file, _configuration(file), asked_for=False) for file in named or files]
    return found


def _configuration(file: Path) -> str | None:
    """The name of the configuration's folder, where the file is in one (`<name>/trace/<file>`)."""
    folder = file.absolute().parent
    if folder.name == "trace" and (folder.parent / "config.json").exists():
        return folder.parent.name
    return None
