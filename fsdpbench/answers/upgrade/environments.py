"""Environments of packages, each made by pip in a folder of the cache, once, and used only if it is whole.

    KEY/        the environment
    KEY.json    its packages; written last, so an environment without it is made again
    KEY.lock    held by its maker
    KEY.log     pip's output

KEY is a hash of everything that was asked for: requirements (of a folder its files), constraints, Python,
and fsdpbench's version and dependencies. fsdpbench itself is not installed: its processes there run the
sources that run here (`runs.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpbench import __version__
from fsdpbench.base.errors import BenchError, CannotJudgeError, UsageError, written
from fsdpbench.base.files.folder_lock import FolderLock, FolderTakenError
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.interruption import die_with_parent, unwinding
from fsdpbench.base.reading import LARGEST_JSON, UnreadableError, one_line, read_bytes, read_json
from fsdpbench.base.writing import remove

_INSTALL_S = 3600.0
_PROBE_S = 60.0
_POLL_S = 0.2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MADE = re.compile(r"^(build|dist|__pycache__|\..*|.*\.egg-info)$")
"""What building a package leaves in its folder."""
_TOOLS = ("fsdpbench", "pip", "setuptools", "wheel")
"""Not packages of a script: what an environment is made with, and what measures it."""
_PROBE = """
import importlib.metadata as metadata, json, platform, re, sys
found = {}
for each in metadata.distributions():
    name, version = each.metadata["Name"], each.version
    if not name or not version:
        continue
    url = json.loads(each.read_text("direct_url.json") or "{}").get("url")
    needs = [re.match(r"[\\w.-]+", need)[0] for need in each.requires or () if "extra ==" not in need]
    line = f"{name} @ {url}" if url else f"{name}=={version}"
    found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), {"version": version, "line": line, "needs": needs})
print(json.dumps({"python": sys.executable, "version": platform.python_version(), "packages": found}))
"""


class Package(msgspec.Struct, frozen=True):
    """A package that is installed: `line` as a requirement, `needs`: the names of its dependencies."""

    version: str
    line: str
    needs: list[str] = []


class Environment(msgspec.Struct, frozen=True):
    """`python`: the path of its interpreter, `version` that one's; `packages` by normalized name."""

    python: str
    version: str
    packages: dict[str, Package]

    def words(self, names: Sequence[str] = ("torch",)) -> str:
        """Return the versions of Python and of these packages."""
        known = [f"{name} {self.packages[name].version}" for name in names if name in self.packages]
        return ", ".join([f"Python {self.version}", *known])


@dataclass(frozen=True)
class Wanted:
    """An environment that is asked for: pip's requirements and constraints; or `python`, one that is there.
    `side`: the word of the options that ask for it."""

    side: str
    requirements: tuple[str, ...] = ()
    constraints: Path | None = None
    python: Path | None = None


@dataclass(frozen=True)
class Cache:
    """The folder of environments. `patience_s`: how long to wait for another process that makes one."""

    folder: Path
    tell: Callable[[str], None]
    patience_s: float = 1800.0

    def environment(self, wanted: Wanted) -> Environment:
        """Return it, made if it is not there. Raises `CannotJudgeError` if pip or Python cannot make it, or
        another process does not end making it; `UsageError` for an interpreter without what fsdpbench needs.
        """
        if wanted.python is not None:
            return _existing(wanted.python, wanted.side)
        with written(self.folder, "; name another with --cache"):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _key(wanted)
        with unwinding(), self._held(path.with_suffix(".lock")):
            return _known(path) or self._made(path, wanted)

    @contextlib.contextmanager
    def _held(self, path: Path) -> Iterator[None]:
        lock, until = FolderLock(path), time.monotonic() + self.patience_s
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(lock.held())
                    break
                except FolderTakenError:
                    if time.monotonic() > until:
                        raise CannotJudgeError(
                            f"{path}: {lock.holder} has been making this environment for over "
                            f"{self.patience_s:g} s; wait for it, or remove the file if that process is gone"
                        ) from None
                time.sleep(_POLL_S)
            yield

    def _made(self, path: Path, wanted: Wanted) -> Environment:
        asked = " ".join(wanted.requirements) or f"constraints of {wanted.constraints}"
        self.tell(f"--{wanted.side}: installing {asked} in {path}")
        remove(path)
        begun = [sys.executable, "-I", "-m", "venv", str(path)]
        _checked(begun, path, "python -m venv cannot make it", "install Python's venv and ensurepip")
        words = ["-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        if wanted.constraints is not None:
            words += ["-c", str(wanted.constraints)]
        install = [_python(path), *words, *wanted.requirements, *_dependencies(wanted.requirements)]
        way_out = f"ask for another version, or name an environment of your own with --python-{wanted.side}"
        _checked(install, path, f"pip cannot install {asked}", way_out)
        found = _probed(_python(path))
        write_whole(path.with_suffix(".json"), msgspec.json.encode(found))
        return found


def default_folder() -> Path:
    """Return the cache of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fsdpbench" / "environments"


def check_requirement(text: str, option: str) -> str:
    """Return `text`, if pip can take it for a requirement. Raises `UsageError`."""
    if not (_NAME.match(text) or Path(text).is_dir()) or "\n" in text:
        raise UsageError(f"{option} {text!r}: no requirement; write it as for pip, such as torch==2.13.0")
    return str(Path(text).resolve()) if Path(text).is_dir() else text


def normalized(name: str) -> str:
    """Return the name of a package, or of a requirement's package, as all its spellings have it."""
    found = _NAME.match(name)
    return re.sub(r"[-_.]+", "-", found[0] if found else name).lower().rstrip("-")


def differing(before: Environment, after: Environment) -> dict[str, tuple[str | None, str | None]]:
    """Return the versions of each package on both sides, None where it is not there, if they differ."""
    names = sorted(name for name in {**before.packages, **after.packages} if name not in _TOOLS)
    pairs = {name: (before.packages.get(name), after.packages.get(name)) for name in names}
    return {
        name: (old.version if old else None, new.version if new else None)
        for name, (old, new) in pairs.items()
        if (old and (old.version, old.line)) != (new and (new.version, new.line))
    }


def _key(wanted: Wanted) -> str:
    asked: list[object] = [sorted(map(_content, wanted.requirements)), _dependencies(wanted.requirements)]
    if wanted.constraints is not None:
        try:
            asked.append(read_bytes(wanted.constraints, LARGEST_JSON).decode(errors="replace"))
        except UnreadableError as error:
            raise UsageError(f"--{wanted.side}-constraints {error}") from None
    text = json.dumps([*asked, sys.version, sys.base_prefix, __version__])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(requirement: str) -> str:
    """Return the requirement; of a folder with a hash of its files."""
    folder = Path(requirement.rpartition("file://")[2])
    if not folder.is_dir():
        return requirement
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.*")):
        if path.is_file() and not any(_MADE.search(part) for part in path.relative_to(folder).parts):
            digest.update(f"{path}\0".encode() + path.read_bytes())
    return f"{requirement} {digest.hexdigest()}"


@functools.cache
def _needs() -> tuple[str, ...]:
    """Return fsdpbench's own requirements, torch among them. Raises `UsageError`."""
    try:
        found = importlib.metadata.requires("fsdpbench") or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "upgrade reads fsdpbench's dependencies: install it first (pip install -e .)"
        ) from None
    return tuple(need for need in found if "extra ==" not in need)


def _dependencies(requirements: Sequence[str]) -> list[str]:
    """Return fsdpbench's requirements but those of packages that are asked for: any version may be tried."""
    named = {normalized(each) for each in requirements}
    return sorted(need for need in _needs() if normalized(need) not in named)


def _existing(python: Path, side: str) -> Environment:
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(f"--python-{side} {python}: no Python interpreter, such as .venv/bin/python")
    found = _probed(str(python))
    lacking = [name for need in _needs() if (name := normalized(need)) not in found.packages]
    if lacking:
        raise UsageError(
            f"--python-{side} {python}: lacks {', '.join(lacking)}, which fsdpbench needs: "
            f"{python} -m pip install {' '.join(lacking)}"
        )
    return found


def _known(path: Path) -> Environment | None:
    """Return the environment in `path`, None unless it is there with all packages that were installed."""
    try:
        recorded = msgspec.convert(read_json(path.with_suffix(".json")), Environment)
        return recorded if recorded == _probed(_python(path)) else None
    except (BenchError, msgspec.ValidationError):
        return None


def _python(path: Path) -> str:
    return str(path / "bin" / "python")


def _probed(python: str) -> Environment:
    """Return the packages of an interpreter. Raises `CannotJudgeError`."""
    done = finished([python, "-I", "-c", _PROBE], _PROBE_S)
    try:
        found = msgspec.json.decode(done.stdout, type=Environment)
    except msgspec.DecodeError:
        raise CannotJudgeError(f"{python}: does not run as Python does ({last_line(done)})") from None
    return msgspec.structs.replace(found, python=python)


def _checked(words: Sequence[str], path: Path, what: str, way_out: str) -> None:
    """Run a command that makes `path`. Raises `CannotJudgeError` with its error and `way_out`."""
    remove(path.with_suffix(".json"))
    done = finished(words, _INSTALL_S)
    if done.returncode:
        log = path.with_suffix(".log")
        write_whole(log, done.stdout + done.stderr)
        remove(path)
        errors = [line[7:] for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        why = one_line(errors[-1] if errors else last_line(done))
        raise CannotJudgeError(f"{what}: {why} (all of it: {log}); {way_out}")


def finished(
    words: Sequence[str], limit_s: float, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, at most `limit_s` seconds, and end it with this process. `more`: of its
    environment. Raises `CannotJudgeError` if it cannot start or is late."""
    given = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env={**given, **(more or {})}, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    except OSError as error:
        raise CannotJudgeError(f"{words[0]}: cannot be started ({error.strerror})") from None
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CannotJudgeError(f"{' '.join(words[:4])} ...: did not end within {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command wrote, of its errors if there are any."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].removeprefix("fsdpbench: ") if lines else f"exit code {done.returncode}, no output"
