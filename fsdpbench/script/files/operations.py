"""`open`, `os` and `shutil` of a script, routed through the layer."""

import _io
import builtins
import contextlib
import errno
import functools
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdpbench.base.errors import error_text
from fsdpbench.script.cuda.refusals import NotSimulatedError
from fsdpbench.script.files.overlay import REAL, Layer, Overlay, settle
from fsdpbench.script.files.writing import Checkpoints, Writing
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_LOOKING = ("stat", "access", "getxattr", "listxattr", "statvfs")
_CHANGING = ("chmod", "utime", "truncate", "chown")
_WRITING_MODES = set("wax+")
_NAMED = 20


class ScriptFiles:
    """The files of one script. Call `install` before it starts, `settle` when it has ended. `accelerator`:
    None on real ranks. `keeps_all`: everything that the script writes goes into the layer."""

    def __init__(self, folder: Path, accelerator: Accelerator | None, *, keeps_all: bool) -> None:
        self._overlay = self.overlay = Overlay(folder / "files", folder, keeps_all=keeps_all)
        self._writing = Writing(self._overlay)
        self._restore: list[tuple[Any, str, Any]] = []
        self.checkpoints = Checkpoints(self._writing, self._replace, accelerator)
        # Workers of data loaders create sockets there, and remove them.
        self.overlay.made.add(getattr(multiprocessing.current_process(), "_config", {}).get("tempdir", ""))

    def install(self) -> None:
        """Install the wrappers: the script sees files through the layer from now on."""
        looking = Looking(self._overlay)
        for name in _LOOKING:
            self._replace(os, name, passing_to(functools.partial(looking.by_path, follow=True)))
        for name in ("lstat", "readlink"):
            self._replace(os, name, passing_to(functools.partial(looking.by_path, follow=False)))
        for name in _CHANGING:
            self._replace(os, name, self._through(self._change, follow=True))
        both = ("src", "dst")
        own = {
            "open": passing_to(self._os_open), "mkdir": self._through(self._make_folder, follow=True),
            "rmdir": self._through(self._remove_folder), "remove": self._through(self._remove),
            "unlink": self._through(self._remove), "rename": self._through(self._rename, both),
            "replace": self._through(self._rename, both), "listdir": passing_to(looking.listing),
            "scandir": passing_to(looking.scanning), "symlink": passing_to(self._linking),
            "link": self._through(self._hard_link, both), "system": passing_to(self._shell),
        }  # fmt: skip
        for name, wrapper in own.items():
            self._replace(os, name, wrapper)
        self._replace(shutil, "rmtree", self._through(self._remove_tree))
        self._replace(subprocess.Popen, "__init__", passing_to(self._starting))
        self._replace(sqlite3, "connect", passing_to(self._connecting))
        for module, name in _copies(builtins.open):
            self._replace(module, name, passing_to(self._opening))
        if self._overlay.keeps_all:
            self._restore.append((sys, "meta_path", sys.meta_path))
            sys.meta_path = [*sys.meta_path, _Modules(self._overlay)]
        self.checkpoints.install()

    def settle(self) -> dict[str, object] | None:
        """Restore the functions when the script has ended; return the layer's content for the result."""
        self._writing.close_all()
        for owner, name, original in reversed(self._restore):
            setattr(owner, name, original)
        overlay = self._overlay
        settle(overlay, self._writing.holds)
        if overlay.is_empty:
            return None
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
        replacement = wrapper(original)
        if not isinstance(replacement, type):
            replacement = functools.wraps(original)(replacement)
        self._restore.append((owner, name, original))
        setattr(owner, name, replacement)
        kept = os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids
        for known in kept:
            if original in known:
                known.add(replacement)

    def _opening(
        self,
        original: Callable[..., Any],
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        *args: Any,
        **options: Any,
    ) -> Any:
        overlay = self._overlay
        if isinstance(file, int) or options.get("opener") is not None or not overlay.concerns(file):
            return original(file, mode, buffering, *args, **options)
        if not _WRITING_MODES & set(mode):
            found = overlay.visible(file)
            if "b" in mode and (str(found).startswith(overlay.root) or found in overlay.holding):
                self._writing.escaped.note()  # copies of this may hold tensors
            return original(found, mode, buffering, *args, **options)
        path = overlay.resolve(file)
        if "x" in mode and self._exists(path):
            raise _error(errno.EEXIST, file)
        if "r" in mode and not self._exists(path):
            raise _error(errno.ENOENT, file)
        starts_empty = "w" in mode or "x" in mode
        replaces = starts_empty and not overlay.keeps(path) and overlay.is_before(path)
        if "b" in mode and replaces and not REAL.isdir(path):
            return self._writing.open(path, mode, buffering)
        place = overlay.plain_place(path, extends=not starts_empty)
        return original(place if place != path else file, mode, buffering, *args, **options)

    def _os_open(
        self,
        original: Callable[..., Any],
        path: Any,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        overlay = self._overlay
        if dir_fd is not None or not overlay.concerns(path):
            return original(path, flags, mode, dir_fd=dir_fd)
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        resolved = overlay.resolve(path)
        is_there = self._exists(resolved)
        if flags & os.O_DIRECTORY or not (writes or (flags & os.O_CREAT and not is_there)):
            return original(overlay.visible(path), flags, mode)
        if is_there and flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if not is_there and not flags & os.O_CREAT:
            raise _error(errno.ENOENT, path)
        place = overlay.plain_place(resolved, extends=not flags & os.O_TRUNC)
        return original(place, flags | os.O_CREAT, mode)

    def _connecting(self, original: Callable[..., Any], database: Any, *args: Any, **options: Any) -> Any:
        """Call `sqlite3.connect`, which opens files in C."""
        overlay = self._overlay
        text = os.fsdecode(database) if isinstance(database, (str, bytes, os.PathLike)) else ""
        if text in ("", ":memory:") or options.get("uri") or not overlay.concerns(text):
            return original(database, *args, **options)
        return original(overlay.plain_place(overlay.resolve(text), extends=True), *args, **options)

    def _through(
        self, act: Callable[..., Any], names: tuple[str, ...] = ("path",), *, follow: bool = False
    ) -> Callable[[Any], Any]:
        """Return a wrapper that calls `act(original, *paths, *others)` with resolved paths, if the layer may
        cover all of them. `names`: the paths' parameters; `follow`: follow a link at their end."""
        return passing_to(functools.partial(_act_on_paths, self._overlay, act, names, follow))

    def _change(self, original: Any, path: str, *args: Any, **options: Any) -> Any:
        overlay = self._overlay
        in_place = overlay.is_real(path) and not overlay.keeps(path)
        return original(path if in_place else overlay.copy_up(path), *args, **options)

    def _make_folder(self, original: Any, path: str, mode: int = 0o777) -> None:
        self._overlay.make_folder(path, lambda place: original(place, mode))

    def _remove(self, original: Any, path: str) -> None:
        self._check_kind(path, is_folder=False)
        self._overlay.remove(path)

    def _remove_folder(self, original: Any, path: str) -> None:
        self._check_kind(path, is_folder=True)
        if self._overlay.names(path):
            raise _error(errno.ENOTEMPTY, path)
        self._overlay.remove(path, tree=True)

    def _check_kind(self, path: str, *, is_folder: bool) -> None:
        if (os.path.isdir(path) and not os.path.islink(path)) is not is_folder and self._exists(path):
            raise _error(errno.ENOTDIR if is_folder else errno.EISDIR, path)

    def _exists(self, path: str) -> bool:
        return self._overlay.has(path) or self._overlay.is_real(path)

    def _remove_tree(
        self, original: Any, path: str, ignore_errors: bool = False, *args: Any, **options: Any
    ) -> None:
        tolerant = ignore_errors or any(options.get(name) for name in ("onerror", "onexc")) or any(args)
        if self._exists(path) or not tolerant:
            self._overlay.remove(path, tree=True)

    def _rename(self, original: Any, source: str, target: str) -> None:
        self._overlay.rename(source, target, self._writing.holds)

    def _linking(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **options: Any) -> None:
        overlay = self._overlay
        if not concerns(overlay, dst, options):
            return original(src, dst, *args, **options)
        path = overlay.resolve(dst, follow=False)
        if self._exists(path):
            raise _error(errno.EEXIST, path)
        is_over = REAL.lexists(path) or overlay.keeps(path)
        return original(src, overlay.place(path) if is_over else overlay.own(path))

    def _hard_link(self, original: Any, source: str, target: str, **options: Any) -> None:
        overlay = self._overlay
        os.lstat(source)
        if self._exists(target):
            raise _error(errno.EEXIST, target)
        free = not REAL.lexists(target) and not overlay.keeps(target)
        if not free or overlay.has(source) or not overlay.is_made(source):
            shutil.copyfile(source, target)  # files from before must not change under another name
            return
        original(source, overlay.own(target))
        if source in overlay.holding:
            overlay.hold(target)

    def _starting(
        self, original: Callable[..., Any], process: Any, args: Any, *others: Any, **options: Any
    ) -> None:
        """Call `subprocess.Popen.__init__`, but refuse programs that would change files from before."""
        words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
        _refuse(self._overlay, words, options.get("cwd") or os.getcwd())
        original(process, args, *others, **options)

    def _shell(self, original: Callable[..., Any], command: Any) -> int:
        """Call `os.system`, but refuse programs that would change files from before."""
        _refuse(self._overlay, os.fsdecode(command).split(), os.getcwd())
        return original(command)


def _copies(original: Any) -> list[tuple[ModuleType, str]]:
    """Return the modules that hold `open`, and its name there (`tarfile`, `bz2` and `tokenize` copy it)."""
    held = [each for each in sys.modules.values() if isinstance(each, ModuleType) and each is not _io]
    return [(each, name) for each in held for name, value in vars(each).items() if value is original]


class _Modules(MetaPathFinder):
    """A finder of modules that the script itself wrote into the layer."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        places = (self._overlay.over(self._overlay.resolve(each)) for each in path or sys.path)
        return PathFinder.find_spec(name, [each for each in places if REAL.isdir(each)])


def _refuse(overlay: Overlay, words: list[str], folder: Any) -> None:
    """Refuse programs that would move or remove files from before the run, or would not find the layer's."""
    names = {os.path.basename(word) for word in words}
    if not names & (_REMOVING | _COPYING):
        return
    for word in words[1:]:
        path = overlay.resolve(os.path.join(folder, word))
        if overlay.has(path) or (names & _REMOVING and overlay.is_before(path) and word[:1] != "-"):
            raise NotSimulatedError(f"'{' '.join(words)[:80]}'", error_text("operations.program"))


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), path)


_REMOVING = {"rm", "mv", "rsync", "rmdir", "unlink", "truncate"}
_COPYING = {"cp", "ln", "tar", "zip"}


def concerns(layer: Layer, path: Any, options: dict[str, object]) -> bool:
    """Return whether a call with `options` concerns a path that the layer may cover."""
    given = not any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
    return given and layer.concerns(path)


def _act_on_paths(
    layer: Layer,
    act: Callable[..., Any],
    names: tuple[str, ...],
    follow: bool,
    original: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Call `act` with the resolved paths of a call, or `original` if the layer is not concerned."""
    named = [options[name] for name in names[len(args) :] if name in options]
    given = [*args[: len(names)], *named]
    if not all(concerns(layer, each, options) for each in given):
        return original(*args, **options)
    paths = [layer.resolve(each, follow=follow) for each in given]
    others = {
        name: value for name, value in options.items() if name not in names and not name.endswith("dir_fd")
    }
    return act(original, *paths, *args[len(names) :], **others)


class Looking:
    """Wrappers of functions of `os` that only read."""

    def __init__(self, overlay: Layer) -> None:
        self._overlay = overlay

    def by_path(
        self, original: Callable[..., Any], path: Any, *args: Any, follow: bool, **options: Any
    ) -> Any:
        """Call a function of one path; `follow`: whether it follows a link at its end."""
        if self._overlay.is_empty or not concerns(self._overlay, path, options):
            return original(path, *args, **options)
        last = follow and options.get("follow_symlinks", True)
        return original(self._overlay.visible(path, follow=last), *args, **options)

    def listing(self, original: Callable[..., Any], path: Any = ".") -> Any:
        """Call `os.listdir`."""
        folder = self._layered(path)
        return original(path) if folder is None else self._overlay.names(folder)

    def scanning(self, original: Callable[..., Any], path: Any = ".") -> Any:
        """Call `os.scandir`."""
        folder = self._layered(path)
        if folder is None:
            return original(path)
        return _Entries(_Entry(os.path.join(os.fsdecode(path), name)) for name in self._overlay.names(folder))

    def _layered(self, path: Any) -> str | None:
        """Return the folder `path`, resolved, if the script sees another one there than the system does."""
        overlay = self._overlay
        if overlay.is_empty or not overlay.concerns(path):
            return None
        folder = overlay.resolve(path)
        if overlay.hides(folder) and not overlay.has(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        seen_as_is = folder == os.path.abspath(os.fsdecode(path)) and not os.path.isdir(overlay.over(folder))
        return None if seen_as_is else folder


class _Entry:
    """A substitute for `os.DirEntry`, with a script's path."""

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


class _Entries(list[_Entry], contextlib.AbstractContextManager[Any]):
    """The result of `os.scandir`: an iterator that is also a context manager."""

    close = list.clear

    def __next__(self) -> _Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __exit__(self, *exc_info: object) -> None:
        self.close()
