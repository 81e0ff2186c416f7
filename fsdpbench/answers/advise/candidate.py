"""A candidate for advice, made of its row in `advice.toml`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from fsdpbench.answers.advise.edits import Edit
from fsdpbench.base.files.documents import table_beside


class Kind(StrEnum):
    """wrong: the script does not train. fault: named whatever it gains. mistake: what the script asks for is
    worse than what it would get unasked. free: nothing of the training changes. choice: the batch, or the
    start of the training, changes. no_effect: named if it changes nothing."""

    WRONG = "wrong"
    FAULT = "fault"
    MISTAKE = "mistake"
    FREE = "free"
    CHOICE = "choice"
    NO_EFFECT = "no_effect"


@dataclass(frozen=True)
class Candidate:
    """`variation`: what is simulated (`script/variations`; nothing, where it is empty). `place`: the line of
    the script (`train.py:12`), `what` is the matter there, `write`: what to write, and `edits` that do it,
    or why there are none. `changes_work`: a step trains on other samples."""

    variation: str
    kind: Kind
    place: str
    what: str
    write: str
    edits: tuple[Edit, ...] | str = ()
    changes_work: bool = False
    worth: float = 0.03
    """The gain from which it is advice, of those that are `free`."""
    most: float | None = None
    """What it could gain at most, of one that is not simulated since that is too little."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the table, as its head explains it."""

    what: str
    write: str
    variation: str = ""
    kind: Kind = Kind.WRONG
    no_edits: str = ""
    worth: float = 0.03
    changes_work: bool = False


@functools.cache
def _rows() -> Mapping[str, _Row]:
    return msgspec.convert(table_beside(__file__, "advice.toml"), dict[str, _Row])


def advice(
    name: str,
    place: str,
    edits: tuple[Edit, ...] | None = None,
    kind: Kind | None = None,
    words: Mapping[str, Any] | None = None,
) -> Candidate:
    """Return the candidate of a row, with `words` filled in. Without `edits` the row says why."""
    row, words = _rows()[name], words or {}
    what, write = row.what.format_map(words), row.write.format_map(words)
    done = row.no_edits if edits is None else edits
    return Candidate(row.variation, kind or row.kind, place, what, write, done, row.changes_work, row.worth)


def place_of(call: Mapping[str, Any]) -> str:
    """`train.py:12`."""
    return f"{os.path.basename(call['file'])}:{call['line']}" if call.get("file") else ""
