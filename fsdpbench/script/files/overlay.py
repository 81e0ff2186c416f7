"""A layer over the file system: what a simulated run must not do to the user's files, it does here.

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

from fsdpbench.script.cuda.refusals import NotSimulatedError
from fsdpbench.script.files.layer import REAL, Layer, move, remove


class Overlay(Layer):
    """The layer, to be changed. `made` are files and folders that are new in this run and are where the
    script put them."""

    def __init__(self, root: Path, exempt: Path) -> None:
        super().__init__(root, exempt)
        self.made: set[str] = set()
        self.on_place: Callable[[str], object] | None = None
        """Called with each path that is about to be written here."""
        self._linked: set[str] = set()

    def place(self, path: str) -> str:
        """Where to write over `path` (resolved); its folder is there if the script's is."""
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
        """The real `path` is gone for the script."""
        if self.is_real(path):
            marker = self.marker(path)
            REAL.makedirs(os.path.dirname(marker))
            os.close(REAL.open(marker, os.O_CREAT | os.O_WRONLY))

    def copy_up(self, path: str) -> str:
        """The real file `path` in the layer, to be changed there."""
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
