"""One thing that could be changed in a script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdpbench.advise.edits import Edit

NOT_SIMULATED = ""


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


def place_of(call: Mapping[str, Any]) -> str:
    """`train.py:12`."""
    return f"{os.path.basename(call['file'])}:{call['line']}" if call.get("file") else ""
