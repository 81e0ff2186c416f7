"""A lock that allows one sweep at a time in a folder, also if several machines share the folder.

    .lock   names its holder (`Owner`), who updates the file's time every `beat_s` seconds

    owner on this machine    broken if its process no longer exists
    owner elsewhere          broken, with a message, if its time was not updated for `silence_s`
    no owner                 broken if the file is empty or damaged when read twice

A lock is written to a temporary file and linked into place, so no process reads an incomplete lock. Ages are
computed from the file system's own times (touching a file gives its current time), so the clocks of the
machines may differ. If a holder was suspended so long that its lock was broken, it notices at its next beat
and ends instead of writing into a folder that another sweep now holds.
"""

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from fsdpbench.base import interruption
from fsdpbench.base.errors import BenchError, UsageError, error_text
from fsdpbench.base.files.documents import converted
from fsdpbench.base.reading import UnreadableError, parse_json
from fsdpbench.base.writing import move_new, write_new

BEAT_S = 10.0
SILENCE_S = 120.0
"""Seconds without renewal after which a lock of another machine is broken. Far above the beat, because
network file systems may show a change up to a minute late."""
SECOND_LOOK_S = 0.5
"""Seconds before a lock without an owner is read again: older versions write the lock in place."""
_GUARD_S = 2.0
_MOST_BYTES = 1 << 16


class FolderTakenError(UsageError):
    """Another sweep holds the folder, or may hold it."""


class FolderLock:
    """The lock file at `path`. It has one holder at a time, and a thread of the holder renews it."""

    def __init__(self, path: Path, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._token = ""
        self._lost = False
        self._looked: float | None = None

    @property
    def is_held(self) -> bool:
        """Return whether some process holds the lock, as far as this machine can determine. Cheap to call
        often: the owner's process is looked up only once per beat."""
        if not self._path.exists():
            return False
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._beat_s:
            return True
        if self._why_stale() is not None:
            return False
        self._looked = now
        return True

    @property
    def lost(self) -> bool:
        """Return whether another process broke this holder's lock."""
        return self._lost

    def check(self) -> None:
        """Raise `BenchError` if this holder has lost its lock."""
        if not self._lost:
            return
        owner = self._owner()
        if owner is None:
            raise BenchError(f"{self._path.parent}: the folder, or its lock, was removed while the sweep ran")
        raise BenchError(error_text("folder_lock.taken_over", self._path.parent, owner.words))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises `FolderTakenError` if it is taken, `BenchError` if it cannot be written."""
        over = threading.Event()
        beat = threading.Thread(target=self._beat_until, args=(over,), name="folder lock", daemon=True)
        with interruption.unwinding():
            with self._guarded():
                self._take()
            beat.start()
            try:
                yield
            finally:
                over.set()
                beat.join()
                if self._is_mine():
                    with contextlib.suppress(OSError):
                        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Exclude other processes from taking or breaking the lock inside. The kernel releases this with the
        process. On file systems without `flock`, `_break_or_refuse` relies on its check after renaming."""
        try:
            handle = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            yield
            return
        try:
            deadline = time.monotonic() + _GUARD_S
            while not _lock_now(handle) and time.monotonic() < deadline:
                time.sleep(0.005)
            yield
        finally:
            os.close(handle)

    def _take(self) -> None:
        token = uuid.uuid4().hex
        for _ in range(2):
            try:
                write_new(self._path, this_process(token, self._beat_s).to_json())
                self._token, self._lost = token, False
                return
            except FileExistsError:
                self._break_or_refuse()
            except OSError as error:
                raise BenchError(f"{self._path.parent}: cannot be written ({error.strerror})") from None
        raise FolderTakenError(f"{self._path}: the lock is taken by another sweep that has just started")

    def _break_or_refuse(self) -> None:
        """Move a dead owner's lock away. Raise `FolderTakenError` if the owner may be alive."""
        if self._path.is_dir() and not self._path.is_symlink():
            raise UsageError(f"{self._path} is a folder where the lock of a sweep belongs; remove it")
        before, reason = _text(self._path), self._why_stale()
        owner = self._owner()
        holder = owner.words if owner else "owner unknown"
        if reason is None:
            raise FolderTakenError(error_text("folder_lock.held", self._path.parent, holder, self._path))
        if reason:
            print(f"{self._path.parent}: the lock of {holder} is broken: {reason}", file=sys.stderr)
        # Rename, then compare the content: if two processes break the lock, one may hold a new one by now.
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if not aside.is_symlink() and _text(aside) != before:
                with contextlib.suppress(OSError):
                    move_new(aside, self._path)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def _why_stale(self) -> str | None:
        """Return why the lock is no longer valid, empty if that needs no message; None if it may be valid."""
        if self._path.is_symlink():
            return "it is a link, and locks are files"
        try:
            content = _content(self._path)
            if content is not None and read_owner(content) is None:
                time.sleep(SECOND_LOOK_S)
                content = _content(self._path)
        except OSError:
            return None
        owner = read_owner(content or b"")
        if owner is None:
            return ""
        if owner.host == socket.gethostname() and owner.place in (None, _place()):  # we can look it up
            return "" if owner.is_gone else None
        age = self._age()
        if owner.beat_s is None or age is None:
            return None
        patience = max(self._silence_s, 12 * owner.beat_s)
        return f"not renewed for {age:.0f} s (every {owner.beat_s:g} s is usual)" if age > patience else None

    def _age(self) -> float | None:
        """Return the seconds since the last beat, by the file system's own clock; None if unknown."""
        probe = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            probe.touch(exist_ok=False)
            now = probe.stat().st_mtime
            with self._path.open() as file:  # open, not only stat: network file systems then ask the server
                return now - os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def _beat_until(self, over: threading.Event) -> None:
        while not over.wait(self._beat_s):
            if not self._is_mine():
                self._lost = True
                return
            with contextlib.suppress(OSError):  # on a full disk or a lost network, the next beat tries again
                os.utime(self._path, follow_symlinks=False)

    def _is_mine(self) -> bool:
        """Return whether this holder owns the lock file. An unreadable file is assumed to be owned."""
        try:
            content = _content(self._path)
        except OSError:
            return True
        owner = read_owner(content or b"")
        return content is not None and (owner is None or owner.token == self._token)

    def _owner(self) -> "Owner | None":
        try:
            return read_owner(_content(self._path) or b"")
        except OSError:
            return None


def _content(path: Path) -> bytes | None:
    """Return the content of the lock; None if there is no file. Raise `OSError`."""
    try:
        # Do not block if the path is a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None


def _text(path: Path) -> bytes | None:
    """Return the content of the lock, empty if it cannot be read; None if there is no file."""
    try:
        return _content(path)
    except OSError:
        return b""


def _lock_now(handle: int) -> bool:
    """Lock without waiting. Return False if another process has the lock, True also if locking fails."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@dataclass(frozen=True)
class Owner:
    """A lock's holder. `place` and `began` distinguish it from other processes with the same id. `place`:
    boot id and pid namespace (containers share host names and folders); `began`: the start time of the
    process. Both are None if the system does not report them."""

    pid: int
    host: str
    began: str | None = None
    token: str = ""
    beat_s: float | None = None
    place: str | None = None

    @property
    def is_gone(self) -> bool:
        """Return whether the owner, a process of this machine, is known to have ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        # Another process may have the same id by now.
        return self.began is not None and _process_start(self.pid) not in (None, self.began)

    @property
    def words(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> bytes:
        return msgspec.json.encode(asdict(self))


def this_process(token: str, beat_s: float) -> "Owner":
    """Return this process as the holder of a lock."""
    pid = os.getpid()
    return Owner(pid, socket.gethostname(), _process_start(pid), token, beat_s, _place())


def read_owner(content: bytes) -> "Owner | None":
    """Return the holder that the lock's content names; None if it names none."""
    try:
        owner = converted(parse_json(content, "lock"), Owner)
    except (UnreadableError, msgspec.ValidationError):
        return None
    return owner if owner.pid > 0 and owner.host else None


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """Return the start time of a process of this machine, in ticks since boot; None if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
