"""Situations that a user can meet, each with its program; what comes of one is seen as the type of the
exception, the categories of the warnings and what the program returns.

A row that is a known difference names the place that documents it: a file and words that are found there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch

Program = Callable[[Any], Any]
"""Takes a side (``flat_programs.Side`` or an API with its mesh)."""

FLAT_DOC = "docs/impl-fsdp1.md"
SHARDED_DOC = "docs/impl-fsdp2.md"


NOT_OF_FSDP = ("`_get_pg_default_device`", "Multiple backends are registered", "TypedStorage is deprecated")
"""Warnings that torch's own code gets from another part of torch."""


@dataclass(frozen=True)
class Row:
    """One situation.

    Attributes:
        modes: values of ``use_orig_params`` to try; of no meaning to ``fully_shard``.
        ranks: how many ranks run it.
        known: (torch's outcome, ours, words of the document) where both differ on purpose.
        quick: whether the plain suite runs it.
    """

    name: str
    program: Program
    modes: tuple[bool, ...] = (False,)
    ranks: int = 1
    known: tuple[str, str, str] | None = None
    quick: bool = True


class Table:
    """Rows in the order in which they were added."""

    def __init__(self, document: str) -> None:
        self.document = document
        self.rows: list[Row] = []

    def row(self, **how: Any) -> Callable[[Program], Program]:
        def add(program: Program) -> Program:
            self.rows.append(Row(program.__name__, program, **how))
            return program

        return add


def outcome(action: Callable[[], Any]) -> str:
    """What comes of ``action`` in words: exception or value, then categories of warnings.

    ``FutureWarning`` is left out: torch announces that it deprecates FSDP1's calls, ours stay.
    """
    with (
        warnings.catch_warnings(record=True) as caught,
        redirect_stderr(StringIO()),
        redirect_stdout(StringIO()),
    ):
        warnings.simplefilter("always")
        try:
            value = action()
            ended = "done" if value is None else f"done: {value}"
        except Exception as error:
            ended = type(error).__name__
    said = [w for w in caught if not issubclass(w.category, FutureWarning)]
    kinds = {w.category.__name__ for w in said if not str(w.message).startswith(NOT_OF_FSDP)}
    import os

    if os.environ.get("SHOW"):
        print(
            [
                str(w.message)[:150] + w.filename[-50:]
                for w in caught
                if not issubclass(w.category, FutureWarning)
            ]
        )
    torch.manual_seed(0)
    return " ".join([ended, *(f"+ {kind}" for kind in sorted(kinds))])
