"""Counts the cases that a fuzzing test tried and that failed, and says how to see each failure again."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from forked_commands import Outcome, violations


@dataclass
class FuzzCount:
    """`allowed`: exit codes that are right here beside those of the contract."""

    allowed: frozenset[int] = frozenset()
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def judge(self, what: str, outcome: Outcome) -> None:
        """Take the outcome of one case into the count; `what` says how it was made."""
        self.codes["hung" if outcome.hung else str(outcome.code)] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        found = violations(outcome, self.allowed)
        if found:
            self.failures.append(f"{what}: {', '.join(found)}\n{outcome}")
        if self.tried % 20 == 0:  # what was seen, should the test be cut off
            print(self, flush=True)

    @property
    def tried(self) -> int:
        return sum(self.codes.values())

    def __str__(self) -> str:
        codes = ", ".join(f"{count} ended with {code}" for code, count in sorted(self.codes.items()))
        return (
            f"{self.tried} tried, {len(self.failures)} failed: {codes}; the slowest took {self.slowest:.0f} s"
        )

    def check(self) -> None:
        """Print the count, and fail if a case did."""
        print(self)
        assert not self.failures, f"{self}\n\n" + "\n\n".join(self.failures[:40])
