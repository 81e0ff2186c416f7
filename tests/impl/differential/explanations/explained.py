"""Differences that are meant or torch's own fault, each with its reason and the place that documents it."""

from __future__ import annotations

from differential.explanations.explained_flat import FLAT
from differential.explanations.explained_reads import READS
from differential.explanations.explained_sharded import SHARDED
from differential.explanations.situation import Explanation, Situation

FUZZER_DOC = "docs/impl.md#the-differential-fuzzer"

# What ends a process is no difference of values: the driver finds out whose it is.
TORCH_CRASHES = Explanation(
    "torch crashes", "its process ends by a signal, also without ours beside it", FUZZER_DOC, lambda s: False
)
TORCH_HANGS = Explanation(
    "torch hangs", "ranks wait for each other, also without ours beside it", FUZZER_DOC, lambda s: False
)

EXPLANATIONS: list[Explanation] = [TORCH_CRASHES, TORCH_HANGS, *SHARDED, *FLAT, *READS]


def explanation_of(situation: Situation) -> Explanation | None:
    """The first that applies."""
    return next((each for each in EXPLANATIONS if each.applies(situation)), None)
