"""What is left of an exception that was not expected: one line, and a file with the traceback.

Python's own remedy is exit code 1, which a pipeline reads as a regression.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import tempfile
import traceback

from fsdpbench import __version__


def told(error: BaseException) -> str:
    """One line on `error`: what and where, and the file that holds the traceback."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        way_out = "raise the limit (ulimit -n 4096) or take fewer --jobs; what is finished is kept"
        return f"{error.strerror}: {way_out}"
    where = _place(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        file = _write(error)
    except OSError as refused:
        kept = f"its traceback cannot be written to {tempfile.gettempdir()} ({refused.strerror})"
    else:
        kept = f"its traceback is in {file}"
    return f"the bench itself failed: {what} (at {where}); {kept}"


def _write(error: BaseException) -> str:
    """Write the traceback into the folder for temporary files. Raises `OSError` where that cannot be."""
    handle, path = tempfile.mkstemp(prefix="fsdpbench-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        torch = sys.modules.get("torch")
        versions = f"fsdpbench {__version__}, Python {platform.python_version()}, "
        file.write(versions + f"torch {getattr(torch, '__version__', 'not loaded')}, {platform.platform()}\n")
        file.write(f"{sys.argv}\n\n")
        file.writelines(traceback.format_exception(error))
    return path


def _place(error: BaseException) -> str:
    """The innermost line of the traceback, as `fsdpbench/results/store.py:42`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    folder, name = os.path.split(frames[-1].filename)
    return f"{os.path.basename(folder)}/{name}:{frames[-1].lineno}"
