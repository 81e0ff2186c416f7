"""Situations that a user can meet, each with its program, and what comes of one on either side.

An outcome is the type of the exception or what the program returns, and the categories of the warnings. Where
both sides differ on purpose, a ``Known`` says what each does and names the words of the document that tell
users.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch

Program = Callable[[Any], Any]
"""Takes a side; its name is the row's."""

NOT_OF_FSDP = ("`_get_pg_default_device`", "Multiple backends are registered", "TypedStorage is deprecated")
"""Warnings that torch's FSDP gets from other parts of torch."""


@dataclass(frozen=True)
class Row:
    """One situation.

    Attributes:
        modes: values of ``use_orig_params`` to try.
        quick: whether the plain suite runs it; the campaign runs all.
    """

    name: str
    program: Program
    modes: tuple[bool, ...] = (False,)
    quick: bool = False


class Table:
    """Rows in the order in which they were added."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, **how: Any) -> Callable[[Program], Program]:
        def add(program: Program) -> Program:
            self.rows.append(Row(program.__name__, program, **how))
            return program

        return add

    def family(self, prefix: str, programs: dict[str, Program], **how: Any) -> None:
        """Add programs of one kind, named by their keys."""
        for name, program in programs.items():
            self.rows.append(Row(f"{prefix}{name}", program, **how))


@dataclass(frozen=True)
class Known:
    """A difference on purpose.

    Attributes:
        rows: a regular expression of whole names of rows.
        torch, impl: regular expressions of the whole outcomes.
        words: found in the document, and not without its row there.
    """

    rows: str
    torch: str
    impl: str
    words: str

    def covers(self, name: str, theirs: str, ours: str) -> bool:
        pairs = ((self.rows, name), (self.torch, theirs), (self.impl, ours))
        return all(re.fullmatch(pattern, text) for pattern, text in pairs)


@dataclass(frozen=True)
class Difference:
    """What a row shows where the sides are not alike."""

    name: str
    mode: bool
    torch: str
    impl: str


def outcome(action: Callable[[], Any]) -> str:
    """What comes of ``action``, in words.

    ``FutureWarning`` is left out: torch announces that it deprecates calls of FSDP1, ours stay.
    """
    quiet = StringIO()  # torch prints stacks
    with warnings.catch_warnings(record=True) as caught, redirect_stderr(quiet), redirect_stdout(quiet):
        warnings.simplefilter("always")
        try:
            value = action()
            ended = "done" if value is None else f"done: {value}"
        except Exception as error:
            ended = type(error).__name__
    said = [w for w in caught if not issubclass(w.category, FutureWarning)]
    kinds = {w.category.__name__ for w in said if not str(w.message).startswith(NOT_OF_FSDP)}
    torch.manual_seed(0)
    return " ".join([ended, *(f"+ {kind}" for kind in sorted(kinds))])


def differences(rows: list[Row], side_of: Callable[[str, bool], Any]) -> list[Difference]:
    """Run rows on both sides; ``side_of`` makes what a program takes, of a side's name and a mode."""
    found: list[Difference] = []
    for row in rows:
        for mode in row.modes:
            sides = [side_of(kind, mode) for kind in ("torch", "impl")]
            theirs, ours = (outcome(partial(row.program, side)) for side in sides)
            if theirs != ours:
                found.append(Difference(row.name, mode, theirs, ours))
    return found
