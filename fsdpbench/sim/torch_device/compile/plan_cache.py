"""Folder of plans on disk, into which only this user can write.

Inductor's cache holds pickles and Python files, so that write access to it is execution. Its default is a
name in the common temporary folder, which another user may have taken first. Inductor replaces broken pickles
itself, and trusts a Python file that is there.
"""

import functools
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpbench.base.torch_internals import inductor_default_cache_dir, patch
from fsdpbench.base.writing import write_whole
from fsdpbench.sim.torch_device.compile import ASKED_FOLDER, CACHE_VARIABLE
from fsdpbench.sim.torch_device.patches.dynamo import passing_to


@functools.cache
def of_compiler() -> str:
    """Return a digest of the sources that make plans, read once by this process or its fork server."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def choose_folder(asked: str | None = ASKED_FOLDER) -> Path:
    """Create and return the folder for this process and its children: `asked`, or the user's cache.

    Where others can write into the folder `compiled` of our caches, or it cannot be made, return a new one
    that no other process shares, with a warning.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if asked and Path(asked) == Path(inductor_default_cache_dir()):
        asked = None  # not a user's: torch writes it into the environment when its compiler is imported
    folder = Path(asked) if asked else home / "fsdpbench" / "compiled"
    problem = _problem(folder)
    if problem:
        named = f"{CACHE_VARIABLE}={asked}" if asked else str(folder)
        warnings.warn(
            f"{named}: {problem}; compiled plans are not kept. Name a folder of your own in {CACHE_VARIABLE}",
            stacklevel=2,
        )
        folder = Path(tempfile.mkdtemp(prefix="fsdpbench-compiled-"))
    os.environ[CACHE_VARIABLE] = str(folder.absolute())
    return folder


def _problem(folder: Path) -> str:
    """Return why nothing may be read from there; "" for no reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        return f"it cannot be used ({error.strerror})"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write into it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def check_code_on_disk() -> None:
    """Rewrite each Python file of the cache that differs from its intended contents, before its import."""

    def of_code(original: Callable[..., tuple[str, str]]) -> Any:
        def write(source_code: str, *args: Any, **options: Any) -> tuple[str, str]:
            key, path = original(source_code, *args, **options)
            _mend(path, source_code)
            return key, path

        return staticmethod(write)

    def write_to_disk(original: Callable[[Any], str], graph: Any) -> str:
        path = original(graph)
        _mend(path, graph.source_code)
        return path

    patch("compiled_code_to_disk", of_code)
    patch("compiled_graph_to_disk", passing_to(write_to_disk))


def _mend(path: str, source: str) -> None:
    if Path(path).read_bytes() != source.encode():
        write_whole(Path(path), source)
