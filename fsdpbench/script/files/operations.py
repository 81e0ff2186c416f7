"""`open`, `os` and `shutil` of a script, through the layer."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdpbench.script.cuda.refusals import NotSimulatedError
from fsdpbench.script.files.overlay import Layer, Overlay
from fsdpbench.script.files.writing import Checkpoints, Writing
from fsdpbench.sim.torch_device.accelerator import Accelerator

_LOOKING = ("stat", "access", "getxattr", "listxattr", "statvfs")
_CHANGING = ("chmod", "utime", "truncate", "chown")
_WRITING_MODES = set("wax+")
_NAMED = 20


class ScriptFiles:
    """The files of one script. `install` before it starts, `settle` when it has ended."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._overlay = self.overlay = Overlay(folder / "files", folder)
        self._writing = Writing(self._overlay)
        self._restore: list[tuple[Any, str, Any]] = []
        self._checkpoints = Checkpoints(self._overlay, self._writing, self._replace, accelerator)

    def install(self) -> None:
        """Put the wrappers in place: the script looks through the layer from now on."""
        looking = Looking(self._overlay)
        for name in _LOOKING:
            self._replace(os, name, functools.partial(looking.by_path, follow=True))
        for name in ("lstat", "readlink"):
            self._replace(os, name, functools.partial(looking.by_path, follow=False))
        for name in _CHANGING:
            self._replace(os, name, self._changing)
        own = {
            "open": self._os_open, "mkdir": self._mkdir, "rmdir": self._removing, "remove": self._removing,
            "unlink": self._removing, "rename": self._renaming, "replace": self._renaming,
            "listdir": looking.listing, "scandir": looking.scanning, "symlink": self._linking,
            "link": self._copying, "system": shell,
        }  # fmt: skip
        for name, wrapper in own.items():
            self._replace(os, name, wrapper)
        self._replace(shutil, "rmtree", self._removing_trees)
        self._replace(subprocess.Popen, "__init__", starting)
        self._replace(builtins, "open", self._opening)
        io.open, self._restore = builtins.open, [*self._restore, (io, "open", io.open)]
        self._checkpoints.install()

    def settle(self) -> dict[str, Any] | None:
        """Restore the functions when the script has ended; return the layer's content for the result, or
        None."""
        self._writing.close_all()
        for owner, name, original in reversed(self._restore):
            setattr(owner, name, original)
        overlay = self._overlay
        if overlay.is_empty:
            return None
        for folder in sorted(overlay.made, key=len):
            if os.path.isdir(folder) and os.path.isdir(overlay.over(folder)):
                overlay.absorb(folder)
        kept, gone = overlay.kept(), overlay.gone()
        if not kept and not gone:
            return None
        sizes = (os.lstat(overlay.over(path)).st_size for path in kept)
        return {
            "folder": os.path.basename(overlay.root),
            "count": len(kept),
            "bytes": sum(sizes),
            "files": kept[:_NAMED],
            "left_in_place": gone[:_NAMED],
        }

    def _replace(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = functools.wraps(original)(wrapper(original))
        self._restore.append((owner, name, original))
        setattr(owner, name, replacement)
        for known in (
            os.supports_dir_fd,
            os.supports_fd,
            os.supports_follow_symlinks,
            os.supports_effective_ids,
        ):
            if original in known:
                known.add(replacement)

    # ---------------------------------------------------------------------------------------------- opening

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or options.get("opener") is not None or not overlay.concerns(file):
                return original(file, mode, buffering, *args, **options)
            if not _WRITING_MODES & set(mode):
                found = overlay.visible(file)
                if "b" in mode and found is not file and str(found).startswith(overlay.root):
                    self._writing.at_large = True  # what it copies of this may hold tensors
                return original(found, mode, buffering, *args, **options)
            path = overlay.resolve(file)
            replaceable = overlay.has(path) or not overlay.is_real(path) or os.path.isfile(path)
            if "b" in mode and replaceable and os.path.isdir(os.path.dirname(path)):
                return self._writing.open(path, mode, buffering)
            return original(self._text_place(path, mode), mode, buffering, *args, **options)

        return open

    def _text_place(self, path: str, mode: str) -> str:
        """Return the place to write a text file: the script's own path, unless the layer is over it."""
        overlay = self._overlay
        folder = os.path.dirname(path)
        if overlay.has(path) or overlay.hides(path):
            return overlay.place(path) if "w" in mode else overlay.copy_up(path)
        if not overlay.is_real(folder):
            return overlay.place(path) if overlay.has(folder) else path
        if not os.path.lexists(path):
            overlay.made.add(path)
        return path

    def _os_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None or not overlay.concerns(path):
                return original(path, flags, mode, dir_fd=dir_fd)
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return original(overlay.visible(path), flags, mode)
            resolved = overlay.resolve(path)
            if overlay.is_real(resolved) and resolved not in overlay.made and os.path.isfile(resolved):
                place = overlay.place(resolved) if flags & os.O_TRUNC else overlay.copy_up(resolved)
                return original(place, flags | os.O_CREAT, mode)
            return original(self._text_place(resolved, "w"), flags, mode)

        return open

    # --------------------------------------------------------------------------------------------- changing

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not concerns(overlay, path, options):
                return original(path, *args, **options)
            resolved = overlay.resolve(path)
            if resolved in overlay.made or not os.path.isfile(resolved):
                return original(overlay.visible(path), *args, **options)
            return original(overlay.copy_up(resolved), *args, **options)

        return call

    def _mkdir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not overlay.concerns(path):
                return original(path, mode, dir_fd=dir_fd)
            resolved = overlay.resolve(path)
            parent = os.path.dirname(resolved)
            if overlay.hides(resolved) or overlay.has(resolved) or not overlay.is_real(parent):
                return original(overlay.place(resolved), mode)
            original(resolved, mode)
            overlay.made.add(resolved)
            return None

        return mkdir

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay
        folders = original.__name__ == "rmdir"

        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not overlay.concerns(path):
                return original(path, dir_fd=dir_fd)
            resolved = overlay.resolve(path, follow=False)
            if resolved in overlay.made and not overlay.has(resolved):
                original(resolved)
                overlay.made.discard(resolved)
                return None
            if os.path.isdir(resolved) and not os.path.islink(resolved):
                if not folders:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
                if overlay.names(resolved):
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            elif folders:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return overlay.remove(resolved, tree=folders)

        return remove

    def _removing_trees(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def rmtree(path: Any, ignore_errors: bool = False, *args: Any, **options: Any) -> None:
            if not concerns(overlay, path, options):
                return original(path, ignore_errors, *args, **options)
            resolved = overlay.resolve(path, follow=False)
            tolerant = ignore_errors or any(options.get(name) for name in ("onerror", "onexc")) or any(args)
            if tolerant and not (overlay.has(resolved) or overlay.is_real(resolved)):
                return None
            return overlay.remove(resolved, tree=True)

        return rmtree

    def _renaming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def rename(src: Any, dst: Any, **options: Any) -> None:
            if not concerns(overlay, src, options) or not overlay.concerns(dst):
                return original(src, dst, **options)
            source, target = overlay.resolve(src, follow=False), overlay.resolve(dst, follow=False)
            if not overlay.rename(source, target):
                original(source, target)
                overlay.made.discard(source)
                overlay.made.add(target)
            return None

        return rename

    def _linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def symlink(src: Any, dst: Any, *args: Any, **options: Any) -> None:
            if not concerns(overlay, dst, options):
                return original(src, dst, *args, **options)
            path = overlay.resolve(dst, follow=False)
            if overlay.is_real(path) or overlay.has(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            return original(src, overlay.place(path))

        return symlink

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def link(src: Any, dst: Any, *args: Any, **options: Any) -> None:
            if not concerns(overlay, src, options) or not overlay.concerns(dst):
                return original(src, dst, *args, **options)
            shutil.copyfile(src, dst)
            return None

        return link


_MOVING = {"rm", "mv", "cp", "ln", "rsync", "rmdir", "unlink", "truncate", "tar", "zip"}


def starting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `subprocess.Popen.__init__`: programs that change files are refused."""

    def init(process: Any, args: Any, *others: Any, **options: Any) -> None:
        words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
        _refuse(words)
        original(process, args, *others, **options)

    return init


def shell(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `os.system`: programs that change files are refused."""

    def system(command: Any) -> int:
        _refuse(os.fsdecode(command).split())
        return original(command)

    return system


def _refuse(words: list[str]) -> None:
    """Refuse programs that do not see the layer, and would change the files themselves."""
    if any(os.path.basename(word) in _MOVING for word in words):
        raise NotSimulatedError(
            f"'{' '.join(words)[:80]}'",
            "another program would change the files from before the run; use Python's os and shutil",
        )


def concerns(layer: Layer, path: Any, options: dict[str, Any]) -> bool:
    """Return whether a call with `options` is about a path that the layer may be over."""
    given = not any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
    return given and layer.concerns(path)


class Looking:
    """Wrappers of functions of `os` that look and change nothing."""

    def __init__(self, overlay: Layer) -> None:
        self._overlay = overlay

    def by_path(self, original: Callable[..., Any], *, follow: bool) -> Callable[..., Any]:
        """Wrap a function of one path; `follow`: whether it follows a link at its end."""

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self._overlay.is_empty or not concerns(self._overlay, path, options):
                return original(path, *args, **options)
            last = follow and options.get("follow_symlinks", True)
            return original(self._overlay.visible(path, follow=last), *args, **options)

        return call

    def listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `os.listdir`."""

        def listdir(path: Any = ".") -> Any:
            folder = self._layered(path)
            return original(path) if folder is None else self._overlay.names(folder)

        return listdir

    def scanning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `os.scandir`."""

        def scandir(path: Any = ".") -> Any:
            folder = self._layered(path)
            if folder is None:
                return original(path)
            return _Entries(
                _Entry(os.path.join(os.fsdecode(path), name)) for name in self._overlay.names(folder)
            )

        return scandir

    def _layered(self, path: Any) -> str | None:
        """Return the folder `path`, resolved, if a part of the layer is over it or in it; else None."""
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
    """The result of `os.scandir`: an iterator that is a context."""

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
