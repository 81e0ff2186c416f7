"""Synchronisations that order nothing: each holds the CPU or a stream up for no gain."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.followers.sanitizer.places import frames
from fsdpbench.sim.followers.sanitizer.shadow import Stack, Stacks

_MOST_HINTS = 20


class Synchronisations:
    """Counts what synchronised, by place, and how often it ordered something."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        # By place: how often, and how often something was ordered.
        self._host: dict[Stack, list[int]] = {}
        self.ordering_queries = 0

    def note(self, kind: str, ordered: bool) -> None:
        """A stream (``wait``) or the CPU (``synchronize``) waited, or a ``query`` was answered with yes."""
        if kind == "query":
            self.ordering_queries += ordered
        elif kind == "synchronize":
            counts = self._host.setdefault(self._stacks.here(3), [0, 0])
            counts[0] += 1
            counts[1] += ordered

    def hints(self) -> list[dict[str, Any]]:
        """Places where the CPU waits and never learns anything, the most frequent first."""
        useless = [(counts[0], stack) for stack, counts in self._host.items() if not counts[1]]
        useless.sort(key=lambda each: -each[0])
        return [
            {
                "kind": "needless_synchronisation",
                "count": count,
                "stack": frames(stack),
                "hint": "the CPU waits here for work that it already knows to be done; remove the call",
            }
            for count, stack in useless[:_MOST_HINTS]
        ]
