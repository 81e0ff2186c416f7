"""Types of options: numbers within bounds, and paths that a file system can hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import click

from fsdpbench.base.numbers import LARGEST_INTEGER, MOST_GPUS, finite_number, whole_number

MOST_RUNS = 10_000
MOST_JOBS = 1024
MOST_SECONDS = 10**8
"""Three years."""
_NEVER_A_FILE = (errno.ENAMETOOLONG, errno.ELOOP)


class _Whole(click.IntRange):
    """A whole number as `numbers.whole_number` reads it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(whole_number(str(value)), param, ctx)
        except ValueError as error:
            self.fail(f"{value!r}: {error}.", param, ctx)

    def _describe_range(self) -> str:
        """Return `at least 1` where no one meets the upper bound, `1 to 1024` where it is a limit."""
        least, most = self.min or 0, self.max or LARGEST_INTEGER
        return f"at least {least}" if most >= MOST_GPUS else f"{least} to {most:,}"


def whole(least: int = 1, most: int = LARGEST_INTEGER) -> click.IntRange:
    """A whole number from `least` to `most`."""
    return _Whole(min=least, max=most)


class Positive(click.FloatRange):
    """A finite number above zero, of at most `most`."""

    def __init__(self, most: float) -> None:
        super().__init__(min=0, max=most, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(finite_number(str(value)), param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a finite number.", param, ctx)

    def _describe_range(self) -> str:
        """Return the bound that people may meet; the upper one keeps sums finite."""
        return "above 0"


class PossiblePath(click.Path):
    """A path, of something that is there or not yet."""

    def __init__(self, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.stat(value)
        except OSError as error:
            if error.errno in _NEVER_A_FILE:
                self.fail(f"{os.fspath(value)!r} is not a valid path ({error.strerror}).", param, ctx)
        except ValueError as error:
            self.fail(f"{os.fspath(value)!r} is not a valid path ({error}).", param, ctx)
        return super().convert(value, param, ctx)


class PlaceForFile(PossiblePath):
    """Where a file is to be written: in a folder that is there."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Path = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r} to write {path.name!r} into.", param, ctx)
        return path
