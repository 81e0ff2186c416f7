"""Option types (bounded numbers, paths that a file system can hold), and groups of options."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fsdpbench import base
from fsdpbench.base.numbers import LARGEST_INTEGER, MOST_GPUS, finite_number, whole_number
from fsdpbench.base.reading import read_rows
from fsdpbench.cli.output import show

F = TypeVar("F", bound=Callable[..., Any])

MOST_RUNS = 10_000
MOST_JOBS = 1024
MOST_SECONDS = 10**8
"""About three years."""
_SECTIONS, _SHOW_ALL = Path(base.__file__).with_name("help_sections.csv"), "fsdpbench.help_all"
_NEVER_A_FILE = (errno.ENAMETOOLONG, errno.ELOOP)


def grouped(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds `options` to a command; its help lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class SectionedCommand(click.Command):
    """A command whose help shows the most used options by section; `--help-all` shows all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {each.name: record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))}
        sections: dict[str, list[tuple[str, str]]] = {}
        for row in read_rows(_SECTIONS):
            if row["option"] in left:
                sections.setdefault(row["section"], []).append(left.pop(row["option"]))
        if ctx.meta.get(_SHOW_ALL):
            sections["All others"] = list(left.values())
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOW_ALL] = True
        show(ctx.get_help())
        ctx.exit()


help_all_option = click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options; `fsdpbench list settings` explains each setting.",
)


class _Whole(click.IntRange):
    """A whole number in the form of `numbers.whole_number`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(whole_number(str(value)), param, ctx)
        except ValueError as error:
            self.fail(f"{value!r}: {error}.", param, ctx)

    def _describe_range(self) -> str:
        """Return `at least 1` if the upper bound is out of reach, otherwise `1 to 1024`."""
        least, most = self.min or 0, self.max or LARGEST_INTEGER
        return f"at least {least}" if most >= MOST_GPUS else f"{least} to {most:,}"


def whole(least: int = 1, most: int = LARGEST_INTEGER) -> click.IntRange:
    """Return the option type of a whole number from `least` to `most`."""
    return _Whole(min=least, max=most)


class Positive(click.FloatRange):
    """A finite number above zero, and at most `most`."""

    def __init__(self, most: float) -> None:
        super().__init__(min=0, max=most, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(finite_number(str(value)), param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a finite number.", param, ctx)

    def _describe_range(self) -> str:
        """Return only the lower bound; the upper one just keeps sums finite."""
        return "above 0"


class PossiblePath(click.Path):
    """A path that the file system can hold, whether or not it exists."""

    def __init__(self, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        try:
            os.stat(value)
        except OSError as error:
            if error.errno in _NEVER_A_FILE:
                self.fail(f"{os.fspath(value)!r} is not a valid path ({error.strerror}).", param, ctx)
        except ValueError as error:
            self.fail(f"{os.fspath(value)!r} is not a valid path ({error}).", param, ctx)
        return super().convert(value, param, ctx)


class PlaceForFile(PossiblePath):
    """A path of a file to write, in a folder that exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Path = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r} to write {path.name!r} into.", param, ctx)
        return path
