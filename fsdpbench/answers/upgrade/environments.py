"""Package environments, each made once by pip in a cache folder, and used only if it is complete.

    KEY/ the environment   KEY.json its packages, written last   KEY.lock its maker   KEY.log pip's error

KEY is a hash of the request: requirements, constraints, Python, fsdpbench's version and dependencies.
fsdpbench is not installed there; runs use the sources of this process (`runs.py`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpbench import __version__
from fsdpbench.base.errors import BenchError, CannotJudgeError, UsageError, written
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.files.folder_lock import FolderLock, FolderTakenError
from fsdpbench.base.interruption import die_with_parent, unwinding
from fsdpbench.base.reading import LARGEST_JSON, one_line, read_bytes, read_json
from fsdpbench.base.writing import remove, write_whole

Finished = subprocess.CompletedProcess[str]
_INSTALL_S, _PROBE_S, _POLL_S = 3600.0, 60.0, 0.2
_PROBE = str(table_beside(__file__, "environments.toml")["probe"])


class Environment(msgspec.Struct, frozen=True, array_like=True):
    """`python`: the interpreter; `packages`: lines of pip freeze, `needs`: dependencies, both by name."""

    python: str
    version: str
    packages: dict[str, str]
    needs: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Wanted:
    """The environment requested for a `side`: made by pip, or an existing interpreter `python`."""

    side: str
    requirements: tuple[str, ...] = ()
    constraints: Path | None = None
    python: Path | None = None


@dataclass(frozen=True)
class Cache:
    """The folder of environments. `patience_s`: how long to wait while another process makes one."""

    folder: Path
    tell: Callable[[str], None]
    patience_s: float = 1800.0

    def environment(self, wanted: Wanted) -> Environment:
        """Return the environment `wanted`; make it if it is missing. Raises `CannotJudgeError` if pip or
        Python fails, or another process does not finish it; `UsageError` if an interpreter lacks packages."""
        if wanted.python is not None:
            found = _probed(str(wanted.python))
            if lacking := [each for each in _own_needs() if normalized(each) not in found.packages]:
                install = f"{wanted.python} -m pip install {shlex.join(lacking)}"
                raise UsageError(f"--python-{wanted.side}: lacks what fsdpbench needs: {install}")
            return found
        named = set(map(normalized, wanted.requirements))
        words = [*wanted.requirements, *(need for need in _own_needs() if normalized(need) not in named)]
        asked = msgspec.json.encode([sys.version, sys.base_prefix, __version__, words])
        if wanted.constraints is not None:
            asked += read_bytes(wanted.constraints, LARGEST_JSON)
        path = self.folder / hashlib.sha256(asked).hexdigest()[:16]
        with written(self.folder, "; name another with --cache"), unwinding(), contextlib.ExitStack() as held:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._hold(path.with_suffix(".lock"), held)
            # Always made again for local packages, because their files may have changed.
            local = any(each.startswith((".", "/")) or "file:" in each for each in wanted.requirements)
            return (None if local else _known(path)) or self._made(path, words, wanted)

    def _hold(self, path: Path, held: contextlib.ExitStack) -> None:
        lock, began, said = FolderLock(path), time.monotonic(), ""
        while True:
            try:
                return held.enter_context(lock.held())
            except FolderTakenError as taken:
                if not said:
                    said = f"{path}: held by {str(taken).partition('(')[2].partition(')')[0]}"
                    self.tell(f"{said}, which makes this environment; waiting")
                if time.monotonic() - began > self.patience_s:
                    raise CannotJudgeError(f"{said}; remove the file if that process is gone") from None
            time.sleep(_POLL_S)

    def _made(self, path: Path, words: Sequence[str], wanted: Wanted) -> Environment:
        asked = f"--{wanted.side} {' '.join(wanted.requirements[:2]) or wanted.constraints}"
        self.tell(f"{asked}: pip makes {path}")
        remove(path.with_suffix(".json"))
        remove(path)
        python = str(path / "bin" / "python")
        install = [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        install += ["-c", str(wanted.constraints)] if wanted.constraints else []
        for command in ([sys.executable, "-I", "-m", "venv", str(path)], [*install, "--", *words]):
            if (done := finished(command, _INSTALL_S)).returncode:
                log = path.with_suffix(".log")
                write_whole(log, done.stdout + done.stderr)
                remove(path)
                errors = [line[7:] for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
                why = f"{command[3]} fails: {one_line((errors or [last_line(done)])[0])} ({log})"
                raise CannotJudgeError(f"{asked}: {why}; --python-from and --python-to take your own")
        found = _probed(python)
        write_whole(path.with_suffix(".json"), msgspec.json.encode(found))
        return found


def normalized(name: str) -> str:
    """Return the normalised name of a package or of a requirement's package."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0]).lower()


def differing(before: Environment, after: Environment) -> dict[str, tuple[str | None, str | None]]:
    """Return the packages that differ or are missing on one side: both lines by name."""
    names = sorted({**before.packages, **after.packages})
    pairs = {name: (before.packages.get(name), after.packages.get(name)) for name in names}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


@functools.cache
def _own_needs() -> tuple[str, ...]:
    return tuple(need for need in importlib.metadata.requires("fsdpbench") or () if "extra ==" not in need)


def _known(path: Path) -> Environment | None:
    """Return the environment in `path`, or None unless it has all packages that were installed."""
    with contextlib.suppress(BenchError, msgspec.ValidationError):
        recorded = msgspec.convert(read_json(path.with_suffix(".json")), Environment)
        if recorded == _probed(str(path / "bin" / "python")):
            return recorded
    return None


def _probed(python: str) -> Environment:
    done = finished([python, "-I", "-c", _PROBE, python], _PROBE_S)
    try:
        return msgspec.json.decode(done.stdout, type=Environment)
    except msgspec.DecodeError:
        raise CannotJudgeError(f"{python}: does not run as Python does ({last_line(done)})") from None


def finished(words: Sequence[str], limit_s: float, more: Mapping[str, str] | None = None) -> Finished:
    """Run a command, at most `limit_s` seconds; it is killed if this process dies. `more`: environment
    variables. Raises `CannotJudgeError` if it cannot start or times out."""
    given = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env={**given, **(more or {})}, preexec_fn=functools.partial(die_with_parent, os.getpid()),
            timeout=limit_s,
        )  # fmt: skip
    except OSError as error:
        raise CannotJudgeError(f"{words[0]}: cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise CannotJudgeError(f"{' '.join(words[:4])} ...: did not end within {limit_s:g} s") from None


def last_line(done: Finished) -> str:
    """Return the last line of a command's stderr, or of its stdout if stderr is empty."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].removeprefix("fsdpbench: ") if lines else f"exit code {done.returncode}, no output"
