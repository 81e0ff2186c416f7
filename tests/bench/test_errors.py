"""Every exception of the packages comes out of a process pool as it went in."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdpbench
from fsdpbench.base.configuration.script_source import Variation
from fsdpbench.base.reading import UnreadableError
from fsdpbench.script.cuda.refusals import NotSimulatedError
from fsdpbench.workloads.shape import UnknownModelError

VALUES: dict[str, Any] = {
    "str": "a text",
    "int": 3,
    "object": Path("a/file.json"),
    "Path": Path("a/folder"),
    "Path | str": "a/trace.json",
    "Sequence[str]": ["near", "nearer"],
    "Variation": Variation.BY_UNIT,
    "Collection[int]": (1, 4),
}
"""An argument of `__init__` by its annotation."""


def _import_all() -> None:
    for found in pkgutil.walk_packages(fsdpbench.__path__, "fsdpbench.", onerror=lambda name: None):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # of an extra
                importlib.import_module(found.name)


def _subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _own() -> list[type[BaseException]]:
    """Return the exception classes of the packages; not those of functions, which no module names."""
    _import_all()
    own = {kind for kind in _subclasses(BaseException) if kind.__module__.startswith("fsdpbench")}
    return sorted((kind for kind in own if "<locals>" not in kind.__qualname__), key=lambda kind: str(kind))


def _made(kind: type[BaseException]) -> BaseException:
    if isinstance(kind.__init__, type(Exception.__init__)):
        return kind("a text", 3)
    parameters = inspect.signature(kind).parameters.values()
    names = (inspect.formatannotation(parameter.annotation).strip("'") for parameter in parameters)
    return kind(*(VALUES[re.sub(r"[\w.]+\.", "", name)] for name in names))


def test_exceptions_are_restored(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    own = _own()
    assert {UnreadableError, UnknownModelError, NotSimulatedError} < set(own)
    lost = []
    for kind in own:
        error = _made(kind)
        error.add_note("said on its way")
        for how in (copy.copy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))):
            try:
                found = how(error)
            except TypeError as failure:
                lost.append(f"{kind.__name__}: {failure}")
                break
            assert type(found) is kind
            assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error)), kind
    assert lost == []


def _fail(kind: type[BaseException]) -> None:
    raise _made(kind)


def test_a_pool_raises_what_its_worker_raised() -> None:
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        for kind in (UnreadableError, UnknownModelError, NotSimulatedError):
            raised = pool.submit(_fail, kind).exception(60)
            assert type(raised) is kind
            assert str(raised) == str(_made(kind))
