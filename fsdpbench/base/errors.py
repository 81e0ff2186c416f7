"""Errors that end a command with one clear line and a documented exit code."""

import contextlib
import difflib
import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any


class ExitCode(IntEnum):
    """The exit codes of the process (docs/reference/results.md)."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    CANNOT_JUDGE = 3
    SOME_FAILED = 4
    BENCH_FAILED = 5


class PicklableError(Exception):
    """An error that is unpickled from its `args` and attributes, whatever arguments its `__init__` takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


class BenchError(PicklableError):
    """An error that ends the command with `exit_code` and only the message, without a traceback."""

    exit_code = ExitCode.BENCH_FAILED


class UsageError(BenchError):
    """A request for something that does not exist or does not fit."""

    exit_code = ExitCode.USAGE


class CannotJudgeError(BenchError):
    """A request for a comparison that the inputs cannot decide."""

    exit_code = ExitCode.CANNOT_JUDGE


class SomeFailedError(BenchError):
    """The end of a command that did its work while some configurations failed."""

    exit_code = ExitCode.SOME_FAILED


def error_text(name: str, *values: object) -> str:
    """Return the error text called `name` in `errors.toml`, formatted with `values`."""
    return _texts()[name].format(*values)


@functools.cache
def _texts() -> Mapping[str, str]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@contextlib.contextmanager
def written(path: object, way_out: str = "") -> Iterator[None]:
    """Report in one line that `path` cannot be written, followed by `way_out`. Raises `BenchError`."""
    try:
        yield
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror}){way_out}") from None


def unknown(kind: str, value: str, known: Iterable[str], way_out: str) -> UsageError:
    """Return a `UsageError` for an unknown `value`; it names similar ones and `way_out`, which lists all."""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.4)
    offer = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(names)}."
    return UsageError(f"unknown {kind} {value!r}.{offer} `{way_out}` lists them all.")
