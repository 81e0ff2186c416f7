"""A function that runs in place of a script's file, on a simulated rank or on real CPU ranks.

The process that asks and those that run it share the file of the function, not its memory: the function is
found by module and name, as pickle finds it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.script.cuda.refusals import explained
from fsdpbench.script.own_files import Place


def run_function(source: ScriptSource) -> object:
    """Call the function of `source` with its arguments, and return its value. Raises what it raises."""
    asked = source.function
    assert asked is not None
    multiprocessing.set_start_method(None, force=True)  # as a fresh interpreter starts data loaders
    sys.argv = [source.path]
    _import(asked.module, source.path)
    function, (args, named) = pickle.loads(Path(asked.folder, "call.pickle").read_bytes())
    return function(*args, **named)


def _import(name: str, path: str) -> None:
    """Import the module `name` if it is the file at `path`, else the file under that name: pytest gives names
    that no import finds."""
    with contextlib.suppress(ImportError):
        if os.path.realpath(str(importlib.import_module(name).__file__)) == path:
            return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def with_line(error: BaseException, place: Place) -> str:
    """Return an error in a line, and the line of the function's own that it passed last."""
    text = linecache.getline(place.file, place.line).strip()
    return f"{explained(error)}, at {place.short}: {text}" if place.file else explained(error)
