"""A run folder in the form that the page shows: one `RunView` with a row for every configuration.

::

    runs/NAME/                       RunView
      sweep.toml                       .title
      <name>-<key8>/                   .configurations[k]: Configuration
        config.json   result.json        .settings, .status, .result
        trace/rank0_trace.json.gz        .traces

Loading never fails because of one configuration: a folder that cannot be read becomes a row with the status
`unreadable` and the reason. Only a folder that is not a run at all is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.reading import LARGEST_TOML, UnreadableError, parse_toml, read_bytes
from fsdpbench.reports.consistency import contradiction, misfiled
from fsdpbench.reports.result import ConfigFile, FolderContentError, Result, read_file
from fsdpbench.reports.result import Status as Ended

# Folders of repeated runs; the configuration's first folder has the result of all of them.
_REPEAT_FOLDER = re.compile(r"\.run\d+$")

# A configuration's folder ends in eight hex digits of its key; other folders are ignored.
_KEYED_FOLDER = re.compile(r"-[0-9a-f]{8}$")


class RunFolderError(UsageError, ValueError):
    """Raised if the path is not a run folder; the message is one line and says what to give instead."""


class Status(StrEnum):
    """The outcome of a configuration; only the page has `UNREADABLE`, for a broken folder."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    ERROR = "error"
    CRASH = "crash"
    RACE = "race"
    RANK_MISMATCH = "rank_mismatch"
    NOT_APPLICABLE = "not_applicable"
    UNREADABLE = "unreadable"

    @property
    def words(self) -> str:
        """The status in words."""
        return _WORDS.get(self, self.value)


_WORDS = {
    Status.OOM: "out of memory",
    Status.NOT_APPLICABLE: "not applicable",
    Status.RANK_MISMATCH: "ranks differ",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration: the request (`config`), the result (`result`), and what is wrong with it
    (`problem`). A finished one has a `problem` if its figures contradict each other."""

    folder: Path
    config: ConfigFile
    result: Result
    status: Status
    problem: str | None = None
    traces: tuple[Path, ...] = ()
    # Everything that can differ between rows, each under one name: settings, model, system, hardware, ...
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the configuration's name, or its folder's name if it has none."""
        return self.config.name or self.folder.name

    @property
    def hardware(self) -> Mapping[str, Any]:
        """Return the hardware of the result, or an empty mapping."""
        found = self.result.machine if self.result.hardware is not None else self.config.hardware
        return {"name": found} if isinstance(found, str) else found or {}

    @property
    def capacity_bytes(self) -> float | None:
        """Return the device's memory in bytes, if the hardware's description has it."""
        value = self.hardware.get("memory_bytes")
        return float(value) if isinstance(value, int | float) and value > 0 else None

    @property
    def device(self) -> str:
        """Return `cuda`, `cpu` or `sim`; "" if unknown."""
        return self.result.device or self.config.device

    @property
    def system(self) -> str:
        """Return the system; "" if unknown."""
        return str(self.settings.get("system") or "")

    @property
    def simulated(self) -> bool:
        """Return whether the figures come from the simulated device."""
        return self.device == "sim"

    @property
    def compiled(self) -> bool | None:
        """Return whether it was compiled, rather than eager; None if unknown."""
        asked = self.config.settings.get("compile")
        return self.result.compiled if self.result.compiled is not None else asked

    @property
    def command(self) -> str | None:
        """Return the command line that repeats this row."""
        command = self.config.command
        return " ".join(command) if isinstance(command, list) else command


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything in one run folder. `configurations` are in the order of their folders' names.

    `first_point`: the point with the first value of every list; `pending`: the points of the sweep that have
    not run yet; `left_out`: the folders of configurations that do not belong to the sweep as `sweep.toml`
    describes it now (they are from an earlier space, or earlier sources).
    """

    folder: Path
    title: str
    configurations: tuple[Configuration, ...]
    sweep_toml: str | None = None
    pending: tuple[str, ...] = ()
    first_point: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """Return whether any figure of the run is simulated."""
        return any(row.simulated for row in self.configurations)

    def with_status(self, *statuses: Status) -> tuple[Configuration, ...]:
        """Return the configurations with one of the given statuses."""
        return tuple(row for row in self.configurations if row.status in statuses)


def load_run(run_dir: Path) -> RunView:
    """Read a run folder (or one configuration's folder, as a run of one).

    Raises:
        RunFolderError: there is no such folder, or it is not a run folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.exists():
        raise RunFolderError(error_text("view.no_folder", run_dir))
    if not run_dir.is_dir():
        raise RunFolderError(f"{run_dir} is a file; give the folder that a sweep wrote, such as runs/NAME")
    try:
        folders = _configuration_folders(run_dir)
        written = run_dir / "sweep.toml"
        content = read_bytes(written, LARGEST_TOML) if written.exists() else None
        sweep_toml = None if content is None else content.decode("utf-8", errors="replace")
    except OSError as error:
        raise RunFolderError(f"{run_dir} cannot be read: {error.strerror or error}") from None
    except UnreadableError as error:
        raise RunFolderError(str(error)) from None
    if sweep_toml is None and not any(_has_record(folder) for folder in folders):
        raise RunFolderError(error_text("view.no_run", run_dir))
    points = _points(sweep_toml)
    begins = points and not (run_dir / "tune.json").exists()  # a search has its best first
    chosen = [folder for folder in folders if points is None or folder.name in points]
    present = {folder.name for folder in folders}
    return RunView(
        folder=run_dir,
        title=run_dir.resolve().name,
        configurations=tuple(_name_defaults([_load_configuration(folder) for folder in chosen])),
        sweep_toml=sweep_toml,
        first_point=points[0] if points and begins else None,
        pending=tuple(point for point in points or () if point not in present),
        left_out=tuple(folder.name for folder in folders if folder not in chosen),
    )


def _points(sweep_toml: str | None) -> list[str] | None:
    """Return the folders of the sweep's points; None if its file does not list them (then all count)."""
    try:
        points = parse_toml(sweep_toml or "", "sweep.toml").get("points")
    except UnreadableError:
        return None
    return [str(point) for point in points] if isinstance(points, list) else None


def _configuration_folders(run_dir: Path) -> list[Path]:
    if (run_dir / "config.json").is_file():
        return [run_dir]
    candidates = [
        child
        for child in run_dir.iterdir()
        if child.is_dir() and not child.name.startswith(".") and not _REPEAT_FOLDER.search(child.name)
    ]
    return sorted(child for child in candidates if _KEYED_FOLDER.search(child.name) or _has_record(child))


def _has_record(folder: Path) -> bool:
    return (folder / "config.json").exists() and (folder / "result.json").exists()


def _load_configuration(folder: Path) -> Configuration:
    config, result = ConfigFile(settings={}), Result(status=Ended.ERROR)
    problems = []
    asked: dict[str, object] = {}
    doubt: str | None = None
    try:
        config, asked = read_file(folder / "config.json", ConfigFile)
    except FolderContentError as problem:
        problems.append(str(problem))
    try:
        result, ran = read_file(folder / "result.json", Result)
        problems += filter(None, [misfiled("", asked, ran)])
        doubt = contradiction(ran)
    except FolderContentError as problem:
        problems.append(str(problem))
    status = _status(result, problems)
    return Configuration(
        folder=folder,
        config=config,
        result=result,
        status=status,
        problem="; ".join(problems) or result.message or doubt,
        traces=_traces(folder),
        settings=_settings(config, result),
    )


def _status(result: Result, problems: list[str]) -> Status:
    """Return the row's status; append to `problems` why it is unreadable."""
    if not problems:
        if result.status is Ended.OK and result.step_time_s is None:
            problems.append("result.json: status is ok but step_time_s is missing")
        elif result.status is Ended.OK and not (result.step_time_s or 0) > 0:
            problems.append(f"result.json: step_time_s is {result.step_time_s}")
        else:
            return Status(result.status.value)
    return Status.UNREADABLE


def _settings(config: ConfigFile, result: Result) -> dict[str, object]:
    """Return everything that identifies a row, in reading order."""
    hardware = config.hardware if isinstance(config.hardware, str) else (config.hardware or {}).get("name")
    around: dict[str, object] = {"model": config.model or None, "system": config.system or None}
    around["device"] = config.device or None
    around |= {"hardware": hardware, "gpus": config.gpus, "gpus_per_node": config.gpus_per_node}
    for name in ("gpus_used_per_node", "software"):
        if (value := getattr(config, name)) is not None:
            around[name] = value
    around |= config.settings
    if around.get("compile") is None and result.compiled is not None:  # a script decides this itself
        around["compile"] = result.compiled
    return around


def _name_defaults(rows: list[Configuration]) -> list[Configuration]:
    """Drop settings with the value None, or call them `auto` if other rows of the same system set them.

    The files write None both for "the default, whatever it is" and for "this system lacks the setting"; a
    system that has the setting in any row of the run has it in every row.
    """
    has = {
        (row.config.system, name) for row in rows for name, value in row.settings.items() if value is not None
    }

    def named(row: Configuration) -> dict[str, object]:
        known = {name: value for name, value in row.settings.items() if (row.config.system, name) in has}
        return {name: "auto" if value is None else value for name, value in known.items()}

    return [replace(row, settings=named(row)) for row in rows]


def _traces(folder: Path) -> tuple[Path, ...]:
    def rank(path: Path) -> tuple[int, str]:
        digits = re.search(r"rank(\d+)", path.name)
        return (int(digits[1]) if digits else 1 << 30, path.name)

    found = [
        path for pattern in ("*_trace.json.gz", "*_trace.json") for path in (folder / "trace").glob(pattern)
    ]
    return tuple(sorted(found, key=rank))
