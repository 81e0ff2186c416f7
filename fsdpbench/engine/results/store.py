"""The folder of a sweep. The configuration folders hold all data; everything else is derived from them.

    runs/NAME/  sweep.toml  report.html  results.sqlite  .batches
      <config-name>-<key8>/  config.json  result.json  stdout.log  stderr.log  trace/rank0_trace.json.gz …
      <config-name>-<key8>.run2/ …         its second run, if it was repeated

A configuration folder is complete when it appears, because it is renamed from `.work-*`, where work in
progress is. The index, `results.sqlite`, has all figures in one table, for queries.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, UsageError, error_text
from fsdpbench.base.files.documents import converted, read_json_object, to_json, to_toml
from fsdpbench.base.files.folder_lock import FolderLock
from fsdpbench.base.plugins import foreign_identity, foreign_model
from fsdpbench.base.reading import JsonObject, one_line, read_toml
from fsdpbench.base.settings import SETTINGS
from fsdpbench.base.writing import clear_leftovers, remove, write_whole
from fsdpbench.engine.results.provenance import another_key, content_key, run_command
from fsdpbench.reports.consistency import contradiction, misfiled
from fsdpbench.reports.figures import flat
from fsdpbench.reports.result import ConfigFile, Result, Status

SWEEP_FILE = "sweep.toml"
INDEX_FILE = "results.sqlite"
REPORT_FILE = "report.html"
_LOCK_FILE = ".lock"
RESULT_FILE = "result.json"
_WORK_PREFIX = ".work-"
BATCHES_FOLDER = ".batches"  # also a store: simulations that searched for the largest batch
_OWN_PREFIXES = (_LOCK_FILE, _WORK_PREFIX, f".{SWEEP_FILE}.", BATCHES_FOLDER)
_RUN_SUFFIX = ".run"
_POINT_NAME = re.compile(r"-[0-9a-f]{8}$")
_PLACE = ("model", "system", "device", "hardware", "gpus", "gpus_per_node")


@dataclass(frozen=True)
class StoredPoint:
    """A finished configuration on disk."""

    folder: Path
    key: str
    config: JsonObject
    result: Result


class Store:
    """The folder of one sweep. `Store.open_or_create` checks that it is one, is empty, or does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FolderLock(folder / _LOCK_FILE)

    @classmethod
    def open_or_create(cls, folder: Path) -> "Store":
        """Raise `UsageError` if `folder` has other content, `BenchError` if it cannot be written."""
        store = cls(folder)
        try:
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is a file, not a folder for runs; name another with -o")
            folder.mkdir(parents=True, exist_ok=True)
            # Another command may be creating the run folder right now.
            foreign = any(not path.name.startswith(_OWN_PREFIXES) for path in folder.iterdir())
            if foreign and not (folder / SWEEP_FILE).exists():
                raise UsageError(error_text("store.no_sweep_folder", folder, SWEEP_FILE))
        except OSError as error:
            raise BenchError(f"{folder}: cannot be used as a run folder ({error.strerror})") from None
        return store

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Return an existing sweep's folder. Raises `UsageError` if it is not one."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such run folder")
        if not (folder / SWEEP_FILE).is_file():
            raise UsageError(f"{folder} is not a sweep's folder (no {SWEEP_FILE} in it)")
        return cls(folder)

    @property
    def is_locked(self) -> bool:
        """Return whether a sweep runs in the folder, according to its lock."""
        return self._lock.is_held

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other sweeps. Raises `UsageError` if one runs in it."""
        with self._lock.held():
            self._clear_leftovers()
            try:
                yield
            finally:
                if not self._lock.lost:
                    self._clear_leftovers()

    def write_space(self, space: Mapping[str, object], points: list[Config]) -> None:
        """Write `sweep.toml`: the space of this sweep, and the folders of its points in order."""
        names = [point_folder_name(config) for config in points]
        with disk_errors(self.folder):
            write_whole(self.folder / SWEEP_FILE, to_toml({**space, "points": names}))

    def read_space(self) -> JsonObject:
        """Return the space that `write_space` wrote. Raises `UsageError` if it cannot be read."""
        space = read_toml(self.folder / SWEEP_FILE)
        if not isinstance(space.get("points", []), list):
            raise UsageError(f"{self.folder / SWEEP_FILE}: points must be a list of folders")
        return space

    def work_folder(self, config: Config, run: int = 1) -> Path:
        """Create and return a folder for a run of a configuration, with its `config.json`. Raises
        `BenchError` if another sweep has taken over the folder's lock."""
        self._lock.check()
        folder = self.folder / f"{_WORK_PREFIX}{point_folder_name(config, run)}"
        remove(folder)
        folder.mkdir()
        write_whole(folder / "config.json", to_json(config_record(config), 1))
        return folder

    def commit(self, config: Config, work: Path, run: int = 1) -> Path:
        """Rename the finished `work` folder to its final name, replacing an earlier try.

        Raises `OSError` if its result could not be written, `BenchError` if the folder's lock is lost.
        """
        self._lock.check()
        if not (work / RESULT_FILE).is_file():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        final = self.folder / point_folder_name(config, run)
        if os.path.lexists(final):  # also true for a dangling link, which would block the rename
            # Move the old folder away first: if the process is killed between renames, none is incomplete.
            aside = self.folder / f"{_WORK_PREFIX}old-{final.name}"
            remove(aside)
            os.rename(final, aside)
            os.rename(work, final)
            remove(aside)
        else:
            os.rename(work, final)
        return final

    def runs(self, config: Config) -> list[Result]:
        """Return the results of all complete runs of `config` in order; empty if the first is missing."""
        first = self._own(point_folder_name(config))
        if first is None:
            return []
        others = (self._read(path) for path in sorted(self.folder.glob(f"{first.folder.name}{_RUN_SUFFIX}*")))
        return [first.result, *(point.result for point in others if point is not None)]

    def statuses(self, points: Sequence[Config], repeat: int) -> dict[tuple[str, int], Status]:
        """Return the status of the recorded runs of `points`, by content key and run number."""
        found = {}
        for config in points:
            for run in range(1, repeat + 1):
                point = self._own(point_folder_name(config, run))
                if point is not None and point.key == content_key(config):
                    found[point.key, run] = point.result.status
        return found

    def replace_result(self, config: Config, result: Result) -> None:
        """Atomically replace the result of the first run of `config`."""
        path = self.folder / point_folder_name(config) / RESULT_FILE
        write_whole(path, result.to_json())

    def drop_index(self) -> None:
        """Remove the index, because none is better than a stale one. `fsdpbench report` rebuilds it."""
        with contextlib.suppress(OSError):
            (self.folder / INDEX_FILE).unlink(missing_ok=True)

    def points(self) -> list[StoredPoint]:
        """Return every complete configuration in the folder, by name. A sweep reruns broken ones."""
        found = []
        try:
            paths = sorted(self.folder.iterdir())
        except OSError as error:
            raise BenchError(f"{self.folder}: cannot be read ({error.strerror})") from None
        for path in paths:
            if path.name.startswith(".") or not _POINT_NAME.search(path.name):
                continue
            point = self._read(path)
            if point is not None:
                found.append(point)
        return found

    def _own(self, name: str) -> StoredPoint | None:
        """Return the point in a folder of this store. Links are ignored: only reports follow them."""
        return None if (self.folder / name).is_symlink() else self._read(self.folder / name)

    @staticmethod
    def _read(folder: Path) -> StoredPoint | None:
        """Return the point in `folder`. None if there is none or it is broken: unreadable for the report, a
        result of another configuration, contradicting figures."""
        try:
            config = read_json_object(folder / "config.json")
            result = Result.of(read_json_object(folder / RESULT_FILE))
            named = converted(config, ConfigFile)
        except ValueError:
            return None
        if not (named.name and named.key) or flaw_of(folder, config, result.to_dict()):
            return None
        return StoredPoint(folder, named.key, config, result)

    def finished(self) -> dict[str, StoredPoint]:
        """Return finished configurations by content key."""
        return {point.key: point for point in self.points()}

    def _clear_leftovers(self) -> None:
        clear_leftovers(self.folder)
        for path in self.folder.glob(f"{_WORK_PREFIX}*"):
            remove(path)


def result_in(folder: Path) -> Result | None:
    """Return the result in a configuration's folder; None if there is none or it cannot be read."""
    try:
        return Result.of(read_json_object(folder / RESULT_FILE))
    except ValueError:
        return None


def flaw_of(folder: Path, config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why the files of a configuration's folder contradict each other; None if they do not."""
    return misfiled(folder.name, config, result) or another_key(config, result) or contradiction(result)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Report in one line that `folder` cannot be written. Raises `BenchError` for disk errors."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise BenchError(f"{folder}: {_why_not_written(folder, error)}") from None


def _why_not_written(folder: Path, error: Exception) -> str:
    again = "start the same command again to resume"
    try:
        free = shutil.disk_usage(folder).free >> 20
    except FileNotFoundError:
        return f"was removed while it was written; {again}"
    except OSError:
        free = 0
    reason = getattr(error, "strerror", None) or error
    return f"cannot be written ({reason}; {free} MiB free). What is finished is kept: {again}."


def point_folder_name(config: Config, run: int = 1) -> str:
    """Return the folder's name: configuration and start of its key; `.run2` and so on for further runs."""
    name = f"{config.name}-{content_key(config)[:8]}"
    return name if run == 1 else f"{name}{_RUN_SUFFIX}{run}"


def config_record(config: Config) -> JsonObject:
    """Return the content of `config.json`: the configuration, its key, and the command to repeat it."""
    return {
        "schema": 1,
        "name": config.name,
        "key": content_key(config),
        "command": run_command(config),
        "system_from": foreign_identity(config.system),
        "model_from": foreign_model(config.model),
        **config.to_dict(),
    }


def build_index(path: Path, points: Iterable[StoredPoint]) -> None:
    """Write the index of `points` to `path` atomically. Raises `OSError`, `sqlite3.Error`."""
    columns = ["folder", "name", "key", *_PLACE, "status", "cause", *SETTINGS]
    columns += [figure.in_index for figure in flat()] + ["result"]
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        quoted = ", ".join(f'"{column}"' for column in columns)
        connection.execute(f"CREATE TABLE results ({quoted})")
        marks = ", ".join("?" * len(columns))
        rows = ([_cell(value) for value in _row(point)] for point in points)
        connection.executemany(f"INSERT INTO results VALUES ({marks})", rows)
        connection.commit()
        content = connection.serialize()
    write_whole(path, content)


def refresh_index(store: "Store") -> None:
    """Write the index of `store`, or print why it cannot be written; the folders still have all results."""
    path = store.folder / INDEX_FILE
    try:
        build_index(path, store.points())
    except (OSError, sqlite3.Error, BenchError) as error:
        if store.folder.is_dir():
            reason = getattr(error, "strerror", None) or error
            problem = f"{path}: cannot be written ({reason}); the results are in the folders beside it, and"
            print(f"{one_line(problem)} `fsdpbench report` makes it again", file=sys.stderr)


def _row(point: StoredPoint) -> list[Any]:
    config, result = point.config, point.result
    row: list[Any] = [point.folder.name, config.get("name"), point.key]
    row += [config.get(name) for name in _PLACE]
    row += [result.status.value, result.message]
    settings = config.get("settings")
    row += [settings.get(name) if isinstance(settings, dict) else None for name in SETTINGS]
    row += [result.stored(figure.path) for figure in flat()]
    return [*row, to_json(result.to_dict())]


def _cell(value: Any) -> Any:
    """Return `value` in a type of the database: lists, objects and integers beyond 64 bits become text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | list) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return json.dumps(value)
    return value
