"""Whose a lock is, and whether that process still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdpbench.errors import UsageError
from fsdpbench.reports import reading


@dataclass(frozen=True)
class Owner:
    """A lock's holder. `place` and `began` tell its process from others of the same number: the machine's
    start and the namespace of its process numbers (containers share host names and folders), and when the
    process began; None where no system tells."""

    pid: int
    host: str
    began: str | None = None
    token: str = ""
    beat_s: float | None = None
    place: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether its process can be asked for from here."""
        return self.host == socket.gethostname() and self.place in (None, _place())

    @property
    def is_gone(self) -> bool:
        """Whether its process, one of this machine, is known to have ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        # The number may have gone to another process since.
        return self.began is not None and _process_start(self.pid) not in (None, self.began)

    @property
    def words(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> bytes:
        return msgspec.json.encode(asdict(self))


def this_process(token: str, beat_s: float) -> Owner:
    """This process as the holder of a lock."""
    pid = os.getpid()
    return Owner(pid, socket.gethostname(), _process_start(pid), token, beat_s, _place())


def read_owner(content: bytes) -> Owner | None:
    """The holder that a lock names; None where it names none."""
    try:
        owner = msgspec.convert(parse_json(content, "lock"), Owner)
    except (UnreadableFileError, msgspec.ValidationError):
        return None
    return owner if owner.pid > 0 and owner.host else None


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the machine started; None where none tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


# The one reader of JSON and the one of TOML; whatever cannot be read is a usage error of one line.
# The work is in `reports.reading`, which needs nothing of the bench. Who reads files that may be broken
# without anybody's fault (a result cut short, another machine's lock) catches `UnreadableFileError`.

LARGEST_INTEGER = reading.LARGEST_INTEGER
T = TypeVar("T")


class UnreadableFileError(UsageError):
    """A file is missing, no file, too large, or not what it should be; the message names it and why."""


def is_there(path: Path) -> bool:
    """Whether something is at `path`; nothing does at one that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json(path: Path) -> Any:
    """The value in a JSON file; NaN and infinity pass. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_json(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """`read_json` where it must be an object. Raises `UnreadableFileError`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableFileError(f"{path}: holds no JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The tables in a TOML file; NaN and infinity pass. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_toml(path))


def read_text(path: Path) -> str:
    """The text in a file. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_text(path, reading.LARGEST_JSON))


def parse_json(content: bytes | str, origin: str) -> Any:
    """`read_json` for what is read already; `origin` begins the message."""
    return _as_usage(lambda: reading.parse_json(content, origin))


def parse_toml(content: bytes | str, origin: str) -> dict[str, Any]:
    """`read_toml` for what is read already; `origin` begins the message."""
    return _as_usage(lambda: reading.parse_toml(content, origin))


def _as_usage(read: Callable[[], T]) -> T:
    try:
        return read()
    except reading.UnreadableError as error:
        raise UnreadableFileError(str(error)) from None
