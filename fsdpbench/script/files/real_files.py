"""The file system itself, by functions that are kept when a script's are replaced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from typing import Any


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
