"""What a script sees through the layer: functions of `os` that look and change nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

from fsdpbench.script.files.layer import Layer


def concerns(layer: Layer, path: Any, options: dict[str, Any]) -> bool:
    """Whether a call with `options` is about a path that the layer may be over."""
    given = not any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
    return given and layer.concerns(path)


class Looking:
    """Wraps functions, each given as it was before."""

    def __init__(self, overlay: Layer) -> None:
        self._overlay = overlay

    def by_path(self, original: Callable[..., Any], *, follow: bool) -> Callable[..., Any]:
        """Functions of one path; `follow`: whether they follow a link at its end."""

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self._overlay.is_empty or not concerns(self._overlay, path, options):
                return original(path, *args, **options)
            last = follow and options.get("follow_symlinks", True)
            return original(self._overlay.visible(path, follow=last), *args, **options)

        return call

    def listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.listdir`."""

        def listdir(path: Any = ".") -> Any:
            folder = self._layered(path)
            return original(path) if folder is None else self._overlay.names(folder)

        return listdir

    def scanning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.scandir`."""

        def scandir(path: Any = ".") -> Any:
            folder = self._layered(path)
            if folder is None:
                return original(path)
            return _Entries(
                _Entry(os.path.join(os.fsdecode(path), name)) for name in self._overlay.names(folder)
            )

        return scandir

    def _layered(self, path: Any) -> str | None:
        """The folder `path`, resolved, if something of the layer is over it or in it."""
        overlay = self._overlay
        if overlay.is_empty or not overlay.concerns(path):
            return None
        folder = overlay.resolve(path)
        if overlay.hides(folder) and not overlay.has(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder if os.path.isdir(overlay.over(folder)) else None


class _Entry:
    """`os.DirEntry` of a script's path."""

    def __init__(self, path: str) -> None:
        self.path, self.name = path, os.path.basename(path)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino


class _Entries(list[_Entry]):
    """What `os.scandir` returns: an iterator that is a context."""

    def __iter__(self) -> Iterator[_Entry]:
        return super().__iter__()

    def __next__(self) -> _Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def close(self) -> None:
        self.clear()
