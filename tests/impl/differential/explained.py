"""Differences that are meant or torch's own fault, each with its reason and the place that documents it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from differential import operations as ops
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


FLAT = "docs/impl-fsdp1.md"
SHARDED = "docs/impl-fsdp2.md"


def _has(*words: str) -> Callable[[str], bool]:
    return lambda text: any(word in text for word in words)


EXPLANATIONS: list[Explanation] = [
    Explanation(
        "several dtypes in one unit",
        "ours becomes one unit a dtype, torch refuses",
        f"{SHARDED}#where-it-differs-on-purpose",
        lambda s: "FSDP expects uniform original parameter dtype" in s.torch_words and not s.impl_words,
    ),
    Explanation(
        "deep copy of a flat wrapper",
        "torch's fails in the middle (RuntimeError) or crashes, ours refuses (TypeError)",
        f"{FLAT}#training-and-settings",
        lambda s: isinstance(s.operation, ops.Copy) and s.torch == "RuntimeError" and s.impl == "TypeError",
        ends=False,
    ),
    Explanation(
        "sync_module_states on a CPU",
        "gloo can broadcast from a CPU; torch asks for a GPU whatever the backend",
        f"{FLAT}#training-and-settings",
        lambda s: "`sync_module_states=True`, which requires them to be on GPU" in s.torch_words and not s.impl_words,
    ),
]


def explanation_of(situation: Situation) -> Explanation | None:
    """The first that applies."""
    return next((each for each in EXPLANATIONS if each.applies(situation)), None)
