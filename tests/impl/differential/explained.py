"""Differences that are meant or torch's own fault, each with its reason and the place that documents it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from differential.specs import Program


@dataclass(frozen=True)
class Situation:
    """One difference: after which operation, of what, and both values."""

    program: Program
    index: int
    operation: Any
    name: str
    torch: Any
    impl: Any
    torch_words: str
    impl_words: str


@dataclass(frozen=True)
class Explanation:
    """Why a difference is none of ours.

    Args:
        document: the file and heading that tells users.
        ends: the program ends here, since the sides can no longer be compared.
    """

    name: str
    reason: str
    document: str
    applies: Callable[[Situation], bool]
    ends: bool = True


EXPLANATIONS: list[Explanation] = []


def explanation_of(situation: Situation) -> Explanation | None:
    """The first that applies."""
    return next((each for each in EXPLANATIONS if each.applies(situation)), None)
