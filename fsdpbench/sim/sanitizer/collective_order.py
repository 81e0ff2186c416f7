"""Whether like steps call the same collectives in the same order.

Ranks that call them in different orders hang. One rank cannot show that, but an order that changes from step
to step on one rank (a set that is iterated, hooks that fire as gradients arrive) will one day differ between
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdpbench.sim.sanitizer.operation import Stack
from fsdpbench.sim.sanitizer.reporting.places import frames

_Call = tuple[str, str, int, int]


class CollectiveOrder:
    """The sequence of collectives of the step that runs, held against the last like one."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._stacks: list[Stack] = []
        # By what was called, in any order: the order, and how often it was another.
        self._known: dict[frozenset[tuple[_Call, int]], list[_Call]] = {}
        self._changes: list[dict[str, Any]] = []

    def note(
        self, step: int, kind: str, group: Any, inputs: Sequence[Any], outputs: Sequence[Any], stack: Stack
    ) -> None:
        """A collective is called."""
        sizes = (sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
        self._calls.append((kind, str(group), *sizes))
        self._stacks.append(stack)

    def step_ended(self) -> None:
        """The step's collectives are complete."""
        calls, stacks = self._calls, self._stacks
        self._calls, self._stacks = [], []
        like = frozenset(Counter(calls).items())
        known = self._known.setdefault(like, calls)
        if known == calls or len(self._changes) >= 5:
            return
        index = next(i for i, (before, now) in enumerate(zip(known, calls, strict=True)) if before != now)
        self._changes.append(
            {
                "kind": "collective_order",
                "count": 1,
                "stack": frames(stacks[index]),
                "hint": f"call {index + 1} of the step is {_told(calls[index])}, in an earlier step that "
                f"calls the same collectives it was {_told(known[index])}: ranks whose orders differ hang",
            }
        )

    def hints(self) -> list[dict[str, Any]]:
        """The first differences that were found."""
        return list(self._changes)


def _told(call: _Call) -> str:
    return f"{call[0]} of {call[2]} elements in group {call[1]}"
