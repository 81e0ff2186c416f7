"""One sweep at a time in a folder, also where several machines see it.

    .lock   {"pid", "host", "began", "token", "beat_s"}; the holder renews its time every `beat_s` seconds

    owner on this machine    its process tells: a lock whose process is gone is broken at once
    owner elsewhere          its beat tells: a lock that has been silent for long is broken, with a message

Ages are differences of times that the file system gives (a file is touched to learn what time it is there),
so clocks of the machines may differ as they like. A holder that was stopped so long that its lock was broken
sees it at its next beat and ends instead of writing into a folder that is another's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdpbench.errors import BenchError, UsageError
from fsdpbench.reading import UnreadableFileError, parse_json, read_json_object

BEAT_S = 10.0
SILENCE_S = 120.0
"""A lock from another machine that was not renewed for so long is a dead one's. Far above the beat: network
file systems show a change up to a minute late."""


class FolderLock:
    """The lock file at `path`. One holder at a time; its beat is a thread of the holder's process."""

    def __init__(self, path: Path, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._token = ""
        self._lost = False
        self._looked: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether somebody holds it, as far as can be told from here. May be asked often: whether its owner
        still lives is looked up once a beat."""
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
        """Whether this holder's lock was broken by another."""
        return self._lost

    def check(self) -> None:
        """Raises `BenchError` if this lock was held and has gone to another sweep."""
        if self._lost:
            raise BenchError(
                f"{self._path.parent}: another sweep took over the folder while this one was stopped "
                f"({self._owner()}); what is finished is kept"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises `UsageError` if another does, `BenchError` if nothing can be written."""
        self._take()
        over = threading.Event()
        beat = threading.Thread(target=self._beat_until, args=(over,), name="folder lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()
            if self._is_mine():
                self._path.unlink(missing_ok=True)

    def _take(self) -> None:
        token = uuid.uuid4().hex
        mine = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": _process_start(os.getpid()),
            "token": token,
            "beat_s": self._beat_s,
        }
        for _ in range(2):
            try:
                handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._break_or_refuse()
                continue
            except OSError as error:
                raise BenchError(f"{self._path.parent}: cannot be written ({error.strerror})") from None
            with os.fdopen(handle, "w") as file:
                json.dump(mine, file)
            self._token, self._lost = token, False
            return
        raise UsageError(f"{self._path}: the lock is taken by another sweep that has just started")

    def _break_or_refuse(self) -> None:
        """Put a dead owner's lock away. Raises `UsageError` if it is not known to be dead."""
        before = self._content()
        reason = self._why_stale()
        if reason is None:
            raise UsageError(
                f"another sweep is running in {self._path.parent} ({self._owner()}); wait for it, "
                f"name another folder with -o, or remove {self._path} if that process is gone"
            )
        if reason:
            print(f"{self._path.parent}: the lock of {self._owner()} is broken: {reason}", file=sys.stderr)
        # By rename, and looked at again: of two that break it at once, one may already hold a new one.
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if _text(aside) != before:
                with contextlib.suppress(OSError):
                    os.link(aside, self._path)
            aside.unlink(missing_ok=True)

    def _why_stale(self) -> str | None:
        """Why the lock does not hold any more, empty if that needs no word; None: it may hold."""
        text = self._content()
        if text is None:
            return ""
        try:
            owner = parse_json(text, str(self._path))
            here = owner["host"] == socket.gethostname()
            pid = int(owner["pid"])
        except (UnreadableFileError, ValueError, KeyError, TypeError):
            return None
        if here:
            return "" if _is_gone(pid, owner.get("began")) else None
        beat_s = owner.get("beat_s")
        age = self._age()
        if not isinstance(beat_s, int | float) or age is None:
            return None
        patience = max(self._silence_s, 12 * beat_s)
        return f"not renewed for {age:.0f} s (every {beat_s:g} s is usual)" if age > patience else None

    def _age(self) -> float | None:
        """Seconds since the last beat, both times of the file system's own; None where it cannot be told."""
        probe = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            probe.touch(exist_ok=False)
            now = probe.stat().st_mtime
            with self._path.open() as file:  # opened, not only looked at: network file systems ask anew then
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
            with contextlib.suppress(OSError):  # a full disk or a network that is away: the next beat tries
                os.utime(self._path)

    def _is_mine(self) -> bool:
        """Whether the lock file is this holder's. A file that cannot be read says nothing against it."""
        try:
            return bool(read_json_object(self._path)["token"] == self._token)
        except (UnreadableFileError, KeyError):
            return self._path.exists()

    def _content(self) -> str | None:
        return _text(self._path)

    def _owner(self) -> str:
        try:
            owner = read_json_object(self._path)
            return f"process {owner['pid']} on {owner['host']}"
        except (UnreadableFileError, KeyError):
            return "owner unknown"


def _text(path: Path) -> str | None:
    """The content, empty if it cannot be read; None if there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""


def _is_gone(pid: int, began: str | None) -> bool:
    """Whether the process of this machine that had the number `pid` is known to have ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    # The number may have gone to another process since.
    return began is not None and _process_start(pid) not in (None, began)


def _process_start(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the machine started; None where none tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
