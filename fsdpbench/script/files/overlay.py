"""A layer over files from before the run, which stay unchanged; and what the run creates beside it.

    files/                                the run's folder
      home/me/ckpt/model.pt               covers /home/me/ckpt/model.pt, which stays unchanged
      home/me/ckpt/.gone.step-10          the script removed /home/me/ckpt/step-10; it still exists

A file without tensors really replaces one from before. New files are really created; those with tensors
are moved here when the script has ended. Any library may write data from memory, so a file's
first bytes decide whether it holds arrays; formats of tables, databases and text are never checkpoints.
Symbolic links in the layer are the script's own, and lead to what the script sees under their target.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpbench.base.errors import error_text
from fsdpbench.base.writing import write_whole
from fsdpbench.script.cuda.refusals import NotSimulatedError

_GONE = ".gone."
_MOST_LINKS = 40
_NOT_FILES = ("/dev", "/proc", "/sys")
_HEAD = 4096
_PICKLE = 1 << 20
_ARRAYS = (b"\x93NUMPY", b"\x89HDF", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""NumPy, HDF5, and compressed files, whose content is unknown; archives (tar) count too."""
_TABLES = (
    b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"SQLite format 3", b"ORC", b"\x7fELF", b"GIF8", b"\x89PNG",
)  # fmt: skip


class Layer:
    """The layer in `root`, and a script's view through it. Paths are absolute, as the script sees them."""

    def __init__(self, root: Path, exempt: Path) -> None:
        self.root = str(root)
        caches = os.environ.get("HF_HOME", "~/.cache/huggingface"), os.environ.get("HF_DATASETS_CACHE")
        self._exempt: tuple[str, ...] = (*_NOT_FILES, str(exempt))
        self._caches = tuple(os.path.abspath(os.path.expanduser(each)) for each in caches if each)
        """Folders that C code writes too: they are real, and so are the folders above them."""

    def concerns(self, path: Any) -> bool:
        """Return whether the layer may cover `path` (not a file descriptor, not a path of the bench)."""
        if isinstance(path, int):
            return False
        absolute = os.path.abspath(os.fsdecode(path))
        for cache in self._caches:
            if _is_in(absolute, cache):
                with contextlib.suppress(OSError):  # the script gets the error itself
                    REAL.makedirs(os.path.dirname(cache))
                return False
        return not any(_is_in(absolute, folder) for folder in self._exempt)

    def exempt(self, folder: str) -> None:
        """Exclude files in `folder` from the layer from now on: they are not the script's."""
        self._exempt = (*self._exempt, os.path.abspath(folder))

    @property
    def is_empty(self) -> bool:
        return not REAL.lexists(self.root)

    def over(self, path: str) -> str:
        """Return the path in the layer that covers `path`."""
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
        """Return whether the layer has a file or folder that covers `path`."""
        return REAL.lexists(self.over(path))

    def hides(self, path: str) -> bool:
        """Return whether the script removed the real `path`, or a folder above it."""
        if self.is_empty:
            return False
        while path != "/":
            if REAL.lexists(self.marker(path)) and not self._is_written_since(path):
                return True
            path = os.path.dirname(path)
        return False

    def _is_written_since(self, path: str) -> bool:
        """Return whether another program, or C code, wrote the file `path` after the script removed it."""
        if not REAL.lexists(path) or REAL.isdir(path):
            return False
        return bool(REAL.lstat(path).st_mtime_ns > REAL.lstat(self.marker(path)).st_mtime_ns)

    def is_real(self, path: str) -> bool:
        """Return whether there is a real file or folder at `path` that the script can see."""
        return REAL.lexists(path) and not self.hides(path)

    def visible(self, path: Any, *, follow: bool = True) -> Any:
        """Return the file that the script sees at `path`."""
        if not self.concerns(path) or self.is_empty:
            return path
        found = self.resolve(path, follow=follow)
        return self.over(found) if self.has(found) or self.hides(found) else found

    def names(self, path: str) -> list[str]:
        """Return the names that a script finds in the folder `path` (resolved)."""
        found: dict[str, None] = {}
        if self.is_real(path) and REAL.isdir(path):
            found.update(dict.fromkeys(REAL.listdir(path)))
        if self.has(path):
            inside = REAL.listdir(self.over(path))
            for name in inside:
                real = os.path.join(path, name.removeprefix(_GONE))
                if name.startswith(_GONE) and not self._is_written_since(real):
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
        """Return the paths that the script removed but that still exist."""
        found = [
            os.path.join(folder, name.removeprefix(_GONE)).removeprefix(self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
            if name.startswith(_GONE)
        ]
        return sorted(path for path in found if not self.has(path))

    def marker(self, path: str) -> str:
        """Return the path of the marker that `path` was removed."""
        folder, name = os.path.split(path)
        return os.path.join(self.root + folder, _GONE + name)


class _Real:
    """The functions of `os` as they were when this module was imported."""

    def __init__(self) -> None:
        functions: dict[str, Callable[..., Any]] = vars(os)
        self.open, self.listdir, self.rename = functions["open"], functions["listdir"], functions["replace"]
        self.remove, self.rmdir, self.mkdir = functions["remove"], functions["rmdir"], functions["mkdir"]
        self.readlink, self.lstat = functions["readlink"], functions["lstat"]
        self.link, self.chmod = functions["link"], functions["chmod"]

    def lexists(self, path: str) -> bool:
        try:
            self.lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Return whether `path` is a folder, not a link to one."""
        return self.lexists(path) and stat.S_ISDIR(self.lstat(path).st_mode)

    def makedirs(self, path: str) -> None:
        if not self.lexists(path):
            self.makedirs(os.path.dirname(path))
            with contextlib.suppress(FileExistsError):  # another rank was first
                self.mkdir(path)


REAL = _Real()


def move(source: str, target: str) -> None:
    """Move a real file, also between file systems."""
    try:
        REAL.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)
        REAL.remove(source)


def remove(path: str, *, tree: bool) -> None:
    """Remove a file, an empty folder, or with `tree` a folder and its content."""
    if not tree or not REAL.isdir(path):
        (REAL.rmdir if REAL.isdir(path) else REAL.remove)(path)
        return
    for name in REAL.listdir(path):
        remove(os.path.join(path, name), tree=True)
    REAL.rmdir(path)


class Overlay(Layer):
    """The layer with its changes, and what the run creates beside it, at the script's own paths.

    `made`: new files and folders (with all their content). `holding`: those that hold simulated tensors; they
    stay in place until the script has ended. `keeps_all`: everything that is written goes into the layer.
    """

    def __init__(self, root: Path, exempt: Path, keeps_all: bool = False) -> None:
        super().__init__(root, exempt)
        self.keeps_all = keeps_all
        self.made: set[str] = set()
        self.holding: set[str] = set()
        self.pending: set[str] = set()
        """Files that the script is replacing with bytes at the moment."""
        self.on_place: Callable[[str], object] | None = None
        """Called with each path that a file here is about to cover, or that holds tensors."""
        self._linked: set[str] = set()
        self.state = Path(f"{self.root}.open.json")

    def is_made(self, path: str) -> bool:
        """Return whether this run created `path`, or a folder above it."""
        while path != "/":
            if path in self.made:
                return True
            path = os.path.dirname(path)
        return False

    def is_before(self, path: str) -> bool:
        """Return whether `path` existed before the run, visible or hidden now."""
        return REAL.lexists(path) and not self.is_made(path)

    def guards(self, folder: str) -> bool:
        """Return whether the script wrote tensors into `folder`: files from before are not replaced there."""
        if any(os.path.dirname(path) == folder for path in self.holding):
            return True
        if not self.has(folder):
            return False
        names = (name for name in REAL.listdir(self.over(folder)) if not name.startswith(_GONE))
        inside = (os.path.join(folder, name) for name in names)
        return any(path not in self.pending and not REAL.isdir(self.over(path)) for path in inside)

    def keeps(self, path: str) -> bool:
        """Return whether everything that the script writes to `path` goes into the layer."""
        folder = os.path.dirname(path)
        if self.keeps_all or self.hides(folder) or (self.has(folder) and not REAL.lexists(folder)):
            return True
        if self.has(path) and REAL.lexists(path):
            return True
        return self.is_before(path) and not REAL.isdir(path) and self.guards(folder)

    def own(self, path: str) -> str:
        """Make `path` the script's own from now on, written really, without tensors; return it."""
        if self.has(path):
            remove(self.over(path), tree=True)
        if self.hides(path) and REAL.lexists(path):
            REAL.remove(path)
        self.show(path)
        if REAL.isdir(os.path.dirname(path)) and not self.is_made(path):
            self.made.add(path)
        return path

    def plain_place(self, path: str, *, extends: bool) -> str:
        """Return the place to write a file without tensors. `extends`: its content stays."""
        if self.keeps(path) or (extends and self.has(path)):
            return self.copy_up(path) if extends else self.place(path)
        return path if extends and self.is_real(path) else self.own(path)

    def hold(self, path: str) -> None:
        """Note, also on disk because the process may be killed, that a new file holds tensors."""
        self.holding.add(path)
        if self.on_place is not None:
            self.on_place(path)
        self._save()

    def _save(self) -> None:
        state = {"made": sorted(self.made), "holding": sorted(self.holding)}
        write_whole(self.state, json.dumps(state))

    def place(self, path: str) -> str:
        """Return the place to write what covers `path` (resolved); its folder exists if the script's does."""
        if self.on_place is not None:
            self.on_place(path)
        target = self.over(path)
        if path in self._linked:
            self._linked.discard(path)
            REAL.remove(target)
        folder = os.path.dirname(path)
        if self.has(folder) or (self.is_real(folder) and REAL.isdir(folder)):
            REAL.makedirs(os.path.dirname(target))
        return target

    def link(self, file: str, path: str) -> None:
        """Cover `path` by `file` of another layer until something is written there; create it if a folder."""
        target = self.over(path)
        if REAL.isdir(file):
            REAL.makedirs(target)
        elif not self.has(path) and not self.hides(path):
            REAL.makedirs(os.path.dirname(target))
            REAL.link(file, target)
            self._linked.add(path)

    def hide(self, path: str) -> None:
        """Hide the real `path` from the script."""
        if self.is_real(path):
            marker = self.marker(path)
            REAL.makedirs(os.path.dirname(marker))
            os.close(REAL.open(marker, os.O_CREAT | os.O_WRONLY))

    def show(self, path: str) -> None:
        """Make the real `path` visible to the script again."""
        if REAL.lexists(self.marker(path)):
            REAL.remove(self.marker(path))

    def copy_up(self, path: str) -> str:
        """Copy the real file `path` into the layer, to change it there; return the copy's path."""
        target = self.place(path)
        if not self.has(path) and self.is_real(path):
            copy = f"{target}.{os.getpid()}"
            shutil.copyfile(path, copy)
            with contextlib.suppress(FileExistsError):  # another rank was first
                REAL.link(copy, target)
            REAL.remove(copy)
        return target

    def absorb(self, path: str) -> None:
        """Move a file or folder that this run created into the layer, with all its content."""
        over = self.over(path)
        if REAL.isdir(path):
            for name in REAL.listdir(path):
                self.absorb(os.path.join(path, name))
            REAL.makedirs(over)
            REAL.rmdir(path)
        elif not self.has(path):
            REAL.makedirs(os.path.dirname(over))
            move(path, over)
        else:
            REAL.remove(path)
        self._forget(path)

    def _forget(self, path: str) -> None:
        for known in (self.made, self.holding, self._linked):
            known -= {each for each in known if _is_in(each, path)}

    def make_folder(self, path: str, make: Callable[[str], None]) -> None:
        """Create the folder `path` with `make`: in the layer, if it replaces a removed one from before that
        holds a checkpoint; any other removed folder becomes visible again, with its content removed."""
        parent = os.path.dirname(path)
        if not self.hides(path) or self.has(path):
            if self.has(path) or not REAL.lexists(parent) or (self.keeps_all and not REAL.lexists(path)):
                return make(self.place(path))
            make(path)
            if not self.is_made(path):
                self.made.add(path)
            return None
        names = REAL.listdir(path) if REAL.isdir(path) and not self.hides(parent) else None
        if names is None or any(holds_arrays(os.path.join(path, name)) is not False for name in names):
            return make(self.place(path))
        self.show(path)
        for name in names:
            self.hide(os.path.join(path, name))
        return None

    def remove(self, path: str, *, tree: bool = False) -> None:
        """Remove a file, or a folder with its content. What existed before the run is only hidden."""
        os.lstat(path)
        if self.has(path):
            remove(self.over(path), tree=tree)
        for made in [path] if self.is_made(path) else [each for each in self.made if _is_in(each, path)]:
            if REAL.lexists(made):
                remove(made, tree=True)
        self._forget(path)
        self.hide(path)

    def rename(self, source: str, target: str, holds: Callable[[str], bool]) -> None:
        """Move `source` to `target`: really, or within the layer. `holds`: whether a file holds tensors.

        Raises `NotSimulatedError` for a folder that existed before the run.
        """
        is_folder = os.path.isdir(source) and not os.path.islink(source)
        _check_rename(self, source, target, is_folder=is_folder)
        if self.is_made(source) and not self.has(source):
            files = [source]
            if is_folder:
                files = [os.path.join(place, name) for place, _, names in os.walk(source) for name in names]
            if not self.keeps(target) and not (self.is_before(target) and any(map(holds, files))):
                return self._rename_really(source, target, is_folder=is_folder)
            self.absorb(source)
        elif not self.has(source) or (REAL.isdir(self.over(source)) and self.is_real(source)):
            if is_folder:
                what = f"renaming the folder {source}, which was there before the run,"
                raise NotSimulatedError(what, error_text("files.renaming"))
            if not (self.keeps(target) or self.is_before(target) or holds_arrays(source)):
                shutil.copy2(source, self.own(target))
                return self.hide(source)
            self.copy_up(source)
        elif not (is_folder or self.keeps(target)) and holds_arrays(self.over(source)) is False:
            move(self.over(source), self.own(target))
            return self.hide(source)
        REAL.rename(self.over(source), self.place(target))
        for path in (target, source):
            if self.is_made(path) and REAL.lexists(path):
                remove(path, tree=True)
            self._forget(path)
            self.hide(path)
        return None

    def _rename_really(self, source: str, target: str, *, is_folder: bool) -> None:
        """Move what the run created; the content of a removed folder from before stays there, hidden."""
        if self.hides(target) and is_folder and REAL.isdir(target):
            self.make_folder(target, REAL.mkdir)
            for name in REAL.listdir(source):
                self.rename(os.path.join(source, name), os.path.join(target, name), lambda path: False)
            return self.remove(source, tree=True)
        if self.hides(target):
            self.own(target)
        REAL.rename(source, target)
        held = [each for each in self.holding if _is_in(each, source)]
        self._forget(source)
        self.own(target)
        for each in held:
            self.hold(target + each.removeprefix(source))
        return None


def settle(overlay: Overlay, holds: Callable[[str], bool]) -> None:
    """Move all files that hold tensors into the layer, each with its folder if the run created that."""
    links = []
    for made in sorted(overlay.made):
        if os.path.islink(made):
            links.append(made)
        elif REAL.isdir(made):
            _settle_folder(overlay, made, holds)
        elif REAL.lexists(made) and holds(made):
            overlay.absorb(made)
    for link in links:
        if REAL.lexists(link) and not os.path.exists(link):
            overlay.absorb(link)
    overlay.state.unlink(missing_ok=True)


def _settle_folder(overlay: Overlay, folder: str, holds: Callable[[str], bool]) -> None:
    inside = [os.path.join(folder, name) for name in REAL.listdir(folder)]
    folders = [path for path in inside if REAL.isdir(path)]
    if any(holds(path) for path in inside if path not in folders):
        return overlay.absorb(folder)
    for each in folders:
        _settle_folder(overlay, each, holds)
    return None


def settle_after_death(folder: Path) -> None:
    """Move the files with tensors of a script whose process was killed into its run's `folder`."""
    overlay = Overlay(folder / "files", folder)
    try:
        state = json.loads(Path(f"{overlay.root}.open.json").read_text())
    except (OSError, ValueError):
        return
    overlay.made, overlay.holding = set(state["made"]), set(state["holding"])
    settle(overlay, overlay.holding.__contains__)


def holds_arrays(path: str) -> bool | None:
    """Return whether a file's format is one for arrays; None for bytes of an unknown format."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
            head = file.read(_HEAD)
            if head[:1] == b"\x80":
                head += file.read(_PICKLE)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if head.startswith(_ARRAYS) or head[257:262] == b"ustar":
        return True
    if head.startswith(b"PK\x03\x04"):
        return b"data.pkl" in head or b".npy" in head or b"constants.pkl" in head
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return b"torch" in head or b"numpy" in head
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < size:
        return True  # safetensors
    if not head or head.startswith(_TABLES):
        return False
    return None if b"\0" in head else False


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _check_rename(layer: Layer, source: str, target: str, *, is_folder: bool) -> None:
    """Raise the `OSError` of an impossible rename, before anything is changed for it."""
    os.lstat(source)
    os.lstat(os.path.dirname(target))
    number = 0
    if source != target and _is_in(source, target):
        number = errno.ENOTEMPTY
    elif os.path.isdir(target) and not os.path.islink(target):
        number = (errno.ENOTEMPTY if layer.names(target) else 0) if is_folder else errno.EISDIR
    elif not os.path.isdir(os.path.dirname(target)) or (is_folder and os.path.lexists(target)):
        number = errno.ENOTDIR
    if number:
        raise OSError(number, os.strerror(number), source, None, target)
