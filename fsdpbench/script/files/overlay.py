"""A layer over the file system: a simulated run changes copies of the user's files here.

    files/                                the run's folder
      home/me/ckpt/model.pt               is over /home/me/ckpt/model.pt, which stays as it is
      home/me/ckpt/.gone.step-10          /home/me/ckpt/step-10 was removed by the script; it is still there

All of it is on the disk, so that data loaders' processes see the same. Symbolic links in the layer are the
script's own, and lead to where the script sees what they name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpbench.script.cuda.refusals import NotSimulatedError

_GONE = ".gone."
_MOST_LINKS = 40
_NOT_FILES = ("/dev", "/proc", "/sys")


class Layer:
    """The layer in `root` as it is looked at, and a script's view through it. Paths are the script's,
    absolute."""

    def __init__(self, root: Path, exempt: Path) -> None:
        self.root = str(root)
        self._exempt: tuple[str, ...] = (*_NOT_FILES, str(exempt))

    def concerns(self, path: Any) -> bool:
        """Return whether the layer may be over `path` (no file descriptor, none of the bench's own)."""
        if isinstance(path, int):
            return False
        absolute = os.path.abspath(os.fsdecode(path))
        return not any(absolute == folder or absolute.startswith(folder + os.sep) for folder in self._exempt)

    def exempt(self, folder: str) -> None:
        """Leave files in `folder` out of the layer from now on: they are not the script's."""
        self._exempt = (*self._exempt, os.path.abspath(folder))

    @property
    def is_empty(self) -> bool:
        return not REAL.lexists(self.root)

    def over(self, path: str) -> str:
        """Return the layer's path over `path`."""
        return self.root + path

    def resolve(self, path: Any, *, follow: bool = True) -> str:
        """Return the script's path with all symbolic links followed (the last one if `follow`)."""
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
        """Return the target of `path`, if it is a symbolic link."""
        found = self.over(path) if self.has(path) else path
        try:
            target: str = REAL.readlink(found)
        except OSError:
            return None
        return target

    def has(self, path: str) -> bool:
        """Return whether the layer has a file or folder over `path`."""
        return REAL.lexists(self.over(path))

    def hides(self, path: str) -> bool:
        """Return whether the script removed the real `path`, or a folder above it."""
        while path != "/":
            if REAL.lexists(self.marker(path)):
                return True
            path = os.path.dirname(path)
        return False

    def is_real(self, path: str) -> bool:
        """Return whether there is a real file or folder at `path` that the script can see."""
        return REAL.lexists(path) and not self.hides(path)

    def visible(self, path: Any, *, follow: bool = True) -> Any:
        """Return the file behind the script's `path`."""
        if not self.concerns(path) or self.is_empty:
            return path
        found = self.resolve(path, follow=follow)
        return self.over(found) if self.has(found) or self.hides(found) else found

    def names(self, path: str) -> list[str]:
        """Return the names that a script finds in the folder `path` (resolved)."""
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
        """Return the script's paths of all files in the layer."""
        return sorted(
            os.path.join(folder, name).removeprefix(self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
            if not name.startswith(_GONE)
        )

    def gone(self) -> list[str]:
        """Return the paths that the script removed and that are still there."""
        found = [
            os.path.join(folder, name.removeprefix(_GONE)).removeprefix(self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
            if name.startswith(_GONE)
        ]
        return sorted(path for path in found if not self.has(path))

    def marker(self, path: str) -> str:
        """Return the path of the mark that `path` was removed."""
        folder, name = os.path.split(path)
        return os.path.join(self.root + folder, _GONE + name)


class _Real:
    """The functions of `os` as they were when this module was imported."""

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


class Overlay(Layer):
    """The layer as it is changed. `made`: files and folders that are new in this run, at the script's own
    paths."""

    def __init__(self, root: Path, exempt: Path) -> None:
        super().__init__(root, exempt)
        self.made: set[str] = set()
        self.on_place: Callable[[str], object] | None = None
        """Called with each path that is about to be written here."""
        self._linked: set[str] = set()

    def place(self, path: str) -> str:
        """Return the place to write over `path` (resolved); its folder exists if the script's does."""
        if self.on_place is not None:
            self.on_place(path)
        target = self.over(path)
        if path in self._linked:
            self._linked.discard(path)
            REAL.remove(target)
        folder = os.path.dirname(path)
        if self.has(folder) or (self.is_real(folder) and os.path.isdir(folder)):
            REAL.makedirs(os.path.dirname(target))
        return target

    def link(self, file: str, path: str) -> None:
        """Let `file`, of another layer, be over `path` until something is written there."""
        target = self.over(path)
        if not self.has(path) and not self.hides(path):
            REAL.makedirs(os.path.dirname(target))
            REAL.link(file, target)
            self._linked.add(path)

    def hide(self, path: str) -> None:
        """Hide the real `path` from the script."""
        if self.is_real(path):
            marker = self.marker(path)
            REAL.makedirs(os.path.dirname(marker))
            os.close(REAL.open(marker, os.O_CREAT | os.O_WRONLY))

    def copy_up(self, path: str) -> str:
        """Copy the real file `path` into the layer, to be changed there; return the copy's path."""
        target = self.place(path)
        if not self.has(path) and self.is_real(path):
            shutil.copyfile(path, target)
        return target

    def absorb(self, folder: str) -> None:
        """Take a folder that this run has made into the layer, with the plain files in it."""
        for name in REAL.listdir(folder):
            inside = os.path.join(folder, name)
            if os.path.isdir(inside) and not os.path.islink(inside):
                self.absorb(inside)
            elif self.has(inside):
                REAL.remove(inside)
            else:
                move(inside, self.place(inside))
            self.made.discard(inside)
        REAL.makedirs(self.over(folder))
        REAL.rmdir(folder)
        self.made.discard(folder)

    def remove(self, path: str, *, tree: bool = False) -> None:
        """Remove a file, or a folder with all that is in it. What was there before the run stays there."""
        if not self.has(path) and not self.is_real(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self.has(path):
            remove(self.over(path), tree=tree)
            self._linked = {each for each in self._linked if self.has(each)}
        if path in self.made:
            remove(path, tree=tree)
            self.made = {each for each in self.made if each != path and not each.startswith(path + os.sep)}
        else:
            self.hide(path)

    def rename(self, source: str, target: str) -> bool:
        """Move within the layer, over `target`; False if this is not about the layer and can be done really.

        Raises `NotSimulatedError` for a folder that was there before the run.
        """
        plain = source in self.made and not self.has(source)
        if plain and not self.has(target) and not self.hides(target):
            return False
        if not self.has(source) and not self.is_real(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if source in self.made and os.path.isdir(source):
            self.absorb(source)
        elif not self.has(source) or (os.path.isdir(self.over(source)) and self.is_real(source)):
            if os.path.isdir(source):
                raise NotSimulatedError(
                    f"renaming the folder {source}, which was there before the run,",
                    "files from before are not changed; let the script copy what it needs",
                )
            self.copy_up(source)
        place = self.place(target)
        REAL.rename(self.over(source), place)
        self.hide(target)
        if source in self.made:
            REAL.remove(source)
            self.made.discard(source)
        else:
            self.hide(source)
        return True
