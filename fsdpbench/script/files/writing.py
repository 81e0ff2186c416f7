"""Files that hold simulated tensors, and the writers of tensors: torch, safetensors, numpy.

`torch.save` and safetensors name the file that they write to. Once tensors have become bytes or arrays in
memory, a script may write them anywhere, and the files' content decides. A file that replaces one from before
the run is written in the layer first: when it is complete, it is known whether it holds tensors. If not, it
replaces the old one.
"""

import contextlib
import errno
import io
import mmap
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.base.errors import error_text
from fsdpbench.script.cuda.refusals import NotSimulatedError
from fsdpbench.script.files.overlay import REAL, Overlay, holds_arrays
from fsdpbench.script.numbers import plain
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_NUMBERS = 64
"""Most elements of a tensor that is read as numbers, not as a part of a model."""
_SLACK_S = 0.02
"""The clock of file systems may be behind by this much."""
_now = time.time


class Escaped:
    """A record of whether bytes of tensors are in memory, outside of any tensor."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self) -> None:
        """Note that tensors became bytes or arrays now."""
        if self._since is None:
            self._since = _now() - _SLACK_S

    def may_be_in(self, path: str, *, unknown: bool) -> bool:
        """Return whether they may be in a file. `unknown`: the answer for an unknown format."""
        if self._since is None or os.lstat(path).st_mtime < self._since:
            return False
        answer = holds_arrays(path)
        return unknown if answer is None else answer


class Writing:
    """The files that are being written over files from before, and the files that hold tensors."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.escaped = Escaped()
        self._open: dict[int, _Raw] = {}
        self._files: weakref.WeakSet[Any] = weakref.WeakSet()

    def holds(self, path: str) -> bool:
        """Return whether a file (resolved, at its own place) holds simulated tensors."""
        return path in self.overlay.holding or self.escaped.may_be_in(path, unknown=False)

    def open(self, path: str, mode: str, buffering: int) -> Any:
        """Open the file `path` (resolved), from before the run, to replace its content."""
        place = self.overlay.place(path)
        raw = _Raw(place, mode.replace("b", "").replace("t", ""))
        raw.writing, raw.name = self, path
        self._open[raw.fileno()] = raw
        self.overlay.pending.add(path)
        file: Any = raw
        if buffering != 0:
            size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
            file = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        self._files.add(file)
        return file

    def ended(self, raw: "_Raw", number: int) -> None:
        """Decide where a complete file belongs. `number`: its former descriptor."""
        path = str(raw.name)
        if self._open.pop(number, None) is None:
            return
        self.overlay.pending.discard(path)
        over = self.overlay.over(path)
        if REAL.lexists(over) and not raw.tainted and not self.escaped.may_be_in(over, unknown=True):
            self.publish(path)

    def publish(self, path: str) -> None:
        """Move a file without tensors to the place where the script expects it."""
        over = self.overlay.over(path)
        if self.overlay.is_real(path):
            REAL.chmod(over, REAL.lstat(path).st_mode & 0o7777)
        try:
            REAL.rename(over, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with io.FileIO(over) as source, io.FileIO(path, "w") as target:
                shutil.copyfileobj(source, target)
            REAL.remove(over)
        self.overlay.show(path)
        self.overlay.made.add(path)

    def mapped(self, number: int) -> None:
        """Move a file to its place before it is mapped into memory: it is written after it was closed."""
        raw = self._open.pop(number, None)
        if raw is None:
            return
        path = str(raw.name)
        self.overlay.pending.discard(path)
        self.publish(path)
        if os.fstat(number).st_ino != os.lstat(path).st_ino:  # another file system: a copy
            place = REAL.open(path, os.O_RDWR)
            os.dup2(place, number)
            os.close(place)

    def written(self, file: Any) -> None:
        """Note that tensors were written to an open file, or to an object that only looks like one."""
        raw = getattr(file, "raw", file)
        path = path_of(raw)
        if isinstance(raw, _Raw):
            raw.tainted = True
        elif path is None:
            self.escaped.note()
        elif self.overlay.concerns(path) and not path.startswith(self.overlay.root):
            self.overlay.hold(path)

    def refuse_extending(self, file: Any) -> None:
        """Raise `NotSimulatedError` if tensors are about to be written into a file from before the run."""
        raw = getattr(file, "raw", file)
        path = None if isinstance(raw, _Raw) else path_of(raw)
        if path is not None and self.overlay.concerns(path) and self.overlay.is_before(path):
            raise NotSimulatedError(error_text("files.saving", path), "open it with 'wb'")

    def close_all(self) -> None:
        """Close the files that the script left open when it ended: they are complete now."""
        for file in list(self._files):
            file.close()


class _Raw(io.FileIO):
    """A file that reports when it is closed. `name`: the name that the script gave."""

    writing: Writing
    tainted = False

    def close(self) -> None:
        if not self.closed:
            number = self.fileno()
            super().close()
            self.writing.ended(self, number)


def path_of(file: Any) -> str | None:
    """Return the path of an open file (resolved), None for an object that only looks like one."""
    try:
        return os.path.realpath(REAL.readlink(f"/proc/self/fd/{file.fileno()}"))
    except (AttributeError, OSError, ValueError):
        return None


def _with_plain_numbers(value: Any) -> Any:
    """Return the containers with plain numbers instead of followed ones, which other readers do not know."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_numbers, value))
    if type(value) is dict:
        return {key: _with_plain_numbers(each) for key, each in value.items()}
    return plain(value)


class Checkpoints:
    """The wrappers of `torch.save`, `torch.load`, safetensors' functions and memory maps.

    `replace(owner, name, wrapper)` replaces a function while the script runs.
    """

    def __init__(
        self,
        writing: Writing,
        replace: Callable[[Any, str, Callable[[Any], Any]], None],
        accelerator: Accelerator | None,
    ) -> None:
        self._accelerator = accelerator
        self._overlay = writing.overlay
        self._writing = writing
        self._replace = replace
        self._saw_storage = False
        self._file: Any = None
        self._counted: set[int] = set()
        self.on_save: Callable[[bool], object] = lambda is_sharded: None
        self.on_storage: Callable[[int], object] = lambda nbytes: None

    @property
    def _copied_to_host(self) -> bool:
        """Return whether tensors on the host may be copies of simulated ones."""
        return self._accelerator is not None and self._accelerator.copied_to_host

    def install(self) -> None:
        """Route checkpoints through the layer from now on."""
        for module in (torch, torch.serialization):
            self._replace(module, "save", passing_to(self._saving))
            self._replace(module, "load", passing_to(self._loading))
        self._replace(torch.serialization, "location_tag", passing_to(self._seen))
        for name in ("numpy", "__array__"):
            self._replace(torch.Tensor, name, passing_to(self._array))
        self._replace(mmap, "mmap", self._mapping)
        self._install_safetensors()

    def _saving(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **options: Any) -> None:
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        self.on_save(caller.startswith(_SHARDED))
        self._counted.clear()
        obj = _with_plain_numbers(obj)
        before = self._saw_storage, self._file
        self._saw_storage, self._file = False, f
        try:
            if isinstance(f, (str, os.PathLike)) and self._overlay.concerns(f):
                path = self._overlay.resolve(f)
                self._to_path(path, lambda place: original(obj, place, *args, **options))
            else:
                original(obj, f, *args, **options)
                if self._saw_storage:
                    self._writing.written(f)
                    if caller.startswith(_SHARDED):
                        self._writing.escaped.note()  # the metadata file belongs to it
        finally:
            self._saw_storage, self._file = before[0] or self._saw_storage, before[1]

    def _to_path(self, path: str, write: Callable[[str], Any]) -> None:
        """Write a file with `write(place)`; in the layer, if it replaces one from before."""
        overlay = self._overlay
        if overlay.keeps(path) or overlay.is_before(path):
            kept = overlay.keeps(path)
            write(overlay.place(path))
            if not kept and not self._saw_storage:
                self._writing.publish(path)
            return
        write(overlay.own(path))
        if self._saw_storage:
            overlay.hold(path)

    def _loading(self, original: Callable[..., Any], f: Any, *args: Any, **options: Any) -> Any:
        path = self._overlay.visible(f) if isinstance(f, (str, os.PathLike)) else f
        return original(path, *args, **options)

    def _seen(self, original: Callable[..., Any], storage: Any) -> Any:
        """Note a storage that is saved, before its data are; return torch's tag for its location."""
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self.on_storage(storage.nbytes())
        if storage.device.type != "cpu" or self._copied_to_host:
            if not self._saw_storage:
                self._writing.refuse_extending(self._file)
            self._saw_storage = True
        return original(storage)

    def _array(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if self._copied_to_host and tensor.numel() > _NUMBERS:
            self._writing.escaped.note()
        return original(tensor, *args, **options)

    def _mapping(self, original: Any) -> Any:
        writing = self._writing

        class Map(original):
            """`mmap.mmap`."""

            def __new__(cls, fileno: int, length: int, *args: Any, **options: Any) -> Any:
                writing.mapped(fileno)
                return original.__new__(cls, fileno, length, *args, **options)

        return Map

    def _install_safetensors(self) -> None:
        """Wrap functions of safetensors and tokenizers, whose files are written and read in Rust."""
        try:
            import safetensors
        except ImportError:
            return
        overlay = self._overlay

        def writing(
            original: Callable[..., Any], tensor_dict: Any, filename: Any, *args: Any, **options: Any
        ) -> Any:
            self._saw_storage = self._copied_to_host
            path = overlay.resolve(filename)
            self._to_path(path, lambda place: original(tensor_dict, place, *args, **options))

        def serializing(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self._copied_to_host:
                self._writing.escaped.note()
            return original(*args, **options)

        def reading(original: Callable[..., Any], filename: Any, *args: Any, **options: Any) -> Any:
            return original(overlay.visible(filename), *args, **options)

        for module in (
            safetensors,
            sys.modules.get("safetensors.torch"),
            sys.modules.get("safetensors.numpy"),
        ):
            if module is not None:
                self._replace(module, "serialize_file", passing_to(writing))
                self._replace(module, "serialize", passing_to(serializing))
                self._replace(module, "safe_open", passing_to(reading))
        with contextlib.suppress(ImportError):
            from tokenizers import Tokenizer

            def saving(
                original: Callable[..., Any], tokenizer: Any, path: Any, *args: Any, **named: Any
            ) -> None:
                writing(original, tokenizer, path, *args, **named)

            self._replace(Tokenizer, "save", passing_to(saving))


_SHARDED = "torch.distributed.checkpoint"
