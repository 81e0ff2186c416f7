"""The layer over the file system, looked at: where files of a script are, which it sees."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GONE = ".gone."
_MOST_LINKS = 40
_NOT_FILES = ("/dev", "/proc", "/sys")


class Layer:
    """What is in the layer in `root`, and what a script sees through it. Paths are the script's, absolute."""

    def __init__(self, root: Path, exempt: Path) -> None:
        self.root = str(root)
        self._exempt: tuple[str, ...] = (*_NOT_FILES, str(exempt))

    def concerns(self, path: Any) -> bool:
        """Whether `path` is one that the layer may be over (no file descriptor, none of the bench's own)."""
        if isinstance(path, int):
            return False
        absolute = os.path.abspath(os.fsdecode(path))
        return not any(absolute == folder or absolute.startswith(folder + os.sep) for folder in self._exempt)

    def exempt(self, folder: str) -> None:
        """What is in `folder` from now on is none of the script's."""
        self._exempt = (*self._exempt, os.path.abspath(folder))

    @property
    def is_empty(self) -> bool:
        return not REAL.lexists(self.root)

    def over(self, path: str) -> str:
        """Where the layer has what is over `path`."""
        return self.root + path

    def resolve(self, path: Any, *, follow: bool = True) -> str:
        """The script's path with all symbolic links followed (the last one if `follow`)."""
        done, left = "/", os.path.abspath(os.fsdecode(path)).split(os.sep)[1:]
        links = 0
        while left:
            name = left.pop(0)
            done = os.path.join(done, name)
            link = self._link(done) if left or follow else None
            if link is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                whole = os.path.normpath(os.path.join(os.path.dirname(done), link, *left))
                done, left = "/", whole.split(os.sep)[1:]
        return done

    def _link(self, path: str) -> str | None:
        """Where `path` points to, if it is a symbolic link."""
        found = self.over(path) if self.has(path) else path
        try:
            target: str = REAL.readlink(found)
        except OSError:
            return None
        return target

    def has(self, path: str) -> bool:
        """Whether the layer has something over `path`."""
        return REAL.lexists(self.over(path))

    def hides(self, path: str) -> bool:
        """Whether the real `path` is gone for the script, or a folder above it."""
        while path != "/":
            if REAL.lexists(self.marker(path)):
                return True
            path = os.path.dirname(path)
        return False

    def is_real(self, path: str) -> bool:
        """Whether there is a real file or folder at `path` that the script can see."""
        return REAL.lexists(path) and not self.hides(path)

    def visible(self, path: Any, *, follow: bool = True) -> Any:
        """The file behind the script's `path`."""
        if not self.concerns(path) or self.is_empty:
            return path
        found = self.resolve(path, follow=follow)
        return self.over(found) if self.has(found) or self.hides(found) else found

    def names(self, path: str) -> list[str]:
        """What a script finds in the folder `path` (resolved)."""
        found: dict[str, None] = {}
        if self.is_real(path) and os.path.isdir(path):
            found.update(dict.fromkeys(REAL.listdir(path)))
        if self.has(path):
            inside = REAL.listdir(self.over(path))
            for name in inside:
                if name.startswith(_GONE):
                    found.pop(name.removeprefix(_GONE), None)
            found.update(dict.fromkeys(name for name in inside if not name.startswith(_GONE)))
        return list(found)

    def kept(self) -> list[str]:
        """The script's paths of all files in the layer."""
        return sorted(
            os.path.join(folder, name).removeprefix(self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
            if not name.startswith(_GONE)
        )

    def gone(self) -> list[str]:
        """The script's paths of what it removed and what is still there."""
        found = [
            os.path.join(folder, name.removeprefix(_GONE)).removeprefix(self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
            if name.startswith(_GONE)
        ]
        return sorted(path for path in found if not self.has(path))

    def marker(self, path: str) -> str:
        """The file that says that `path` is gone."""
        folder, name = os.path.split(path)
        return os.path.join(self.root + folder, _GONE + name)


class _Real:
    """Functions of `os`, as they were when this was imported."""

    def __init__(self) -> None:
        functions: dict[str, Callable[..., Any]] = vars(os)
        self.open, self.listdir, self.rename = functions["open"], functions["listdir"], functions["replace"]
        self.remove, self.rmdir, self.mkdir = functions["remove"], functions["rmdir"], functions["mkdir"]
        self.readlink, self.lstat = functions["readlink"], functions["lstat"]
        self.link = functions["link"]

    def lexists(self, path: str) -> bool:
        try:
            self.lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def makedirs(self, path: str) -> None:
        if not self.lexists(path):
            self.makedirs(os.path.dirname(path))
            self.mkdir(path)


REAL = _Real()


def move(source: str, target: str) -> None:
    """Move a file really, between file systems too."""
    try:
        REAL.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)
        REAL.remove(source)


def remove(path: str, *, tree: bool) -> None:
    """Remove a file, an empty folder, or with `tree` a folder and what is in it."""
    if not tree or os.path.islink(path) or not os.path.isdir(path):
        (REAL.rmdir if os.path.isdir(path) and not os.path.islink(path) else REAL.remove)(path)
        return
    for name in REAL.listdir(path):
        remove(os.path.join(path, name), tree=True)
    REAL.rmdir(path)
