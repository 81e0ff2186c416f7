"""The answer of `upgrade`: the gate's verdict, the differences by cause, and what was executed and priced."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import msgspec

from fsdpbench.answers.check.compare import Comparison, Verdict
from fsdpbench.answers.check.text import as_json, as_text
from fsdpbench.answers.upgrade.bisection import Tried
from fsdpbench.answers.upgrade.differences import Difference
from fsdpbench.answers.upgrade.environments import Environment

EXECUTED = "the packages' own code: which kernels, collectives, copies and allocations it issues"
PRICED = (
    "the time of each, by the same table on both sides: a kernel that is faster or slower in the newer "
    "version is not seen"
)
_WIDTH = 79
_MOST_LINES = 20
_MOST_PACKAGES = 6


class Upgrade(msgspec.Struct, frozen=True):
    """The answer. `packages`: versions on both sides of those that differ; `bisection`: None if not asked for."""

    script: str
    gpus: int
    hardware: str
    before: Environment
    after: Environment
    packages: dict[str, tuple[str | None, str | None]]
    comparison: Comparison
    differences: list[Difference]
    bisection: list[Tried] | None

    @property
    def verdict(self) -> str:
        """Return `worse`, `cannot judge`, `better` or `equal`."""
        if self.comparison.regressions:
            return "worse"
        if self.comparison.unjudged or not self.comparison.compared:
            return "cannot judge"
        return "better" if self.comparison.of(Verdict.BETTER) else "equal"

    def to_dict(self) -> dict[str, Any]:
        """Return the answer for programs."""
        sides = {"from": self.before, "to": self.after}
        return {
            "schema": 1,
            "script": self.script,
            "gpus": self.gpus,
            "hardware": self.hardware,
            **{name: {"python": each.version, "interpreter": each.python} for name, each in sides.items()},
            "packages": {name: {"from": old, "to": new} for name, (old, new) in self.packages.items()},
            "verdict": self.verdict,
            "comparison": json.loads(as_json(self.comparison)),
            "differences": msgspec.to_builtins(self.differences),
            "executed": EXECUTED,
            "priced": PRICED,
            "bisection": msgspec.to_builtins(self.bisection),
        }

    def as_text(self) -> str:
        """Return the answer as lines."""
        named = [f"{name} {old or 'none'} -> {new or 'none'}" for name, (old, new) in self.packages.items()]
        more = len(named) - _MOST_PACKAGES
        shown = ", ".join(named[:_MOST_PACKAGES]) + (f" and {more} more" if more > 0 else "")
        lines = [
            f"{self.script} on {self.gpus} x {self.hardware}, simulated",
            *_wrapped("packages that differ: ", shown or "none"),
            as_text(self.comparison, closing=""),
        ]
        if self.differences:
            lines.append("differences of a step by cause, the largest first:")
            lines += [each.line() for each in self.differences[:_MOST_LINES]]
            more = len(self.differences) - _MOST_LINES
            lines += [f"  and {more} more (--json has all)"] if more > 0 else []
            lines.append("")
        if self.bisection is not None:
            lines += ["newer versions alone:", *(f"  {each.line()}" for each in self.bisection), ""]
        lines += [*_wrapped("executed: ", EXECUTED), *_wrapped("priced: ", PRICED), self._closing()]
        return "\n".join(lines)

    def _closing(self) -> str:
        worse, better = len(self.comparison.regressions), len(self.comparison.of(Verdict.BETTER))
        return {
            "worse": f"Worse: {worse} figure{'s' * (worse != 1)}, and {better} better.",
            "cannot judge": "Cannot judge: see above.",
            "better": f"May be upgraded: {better} figure{'s' * (better != 1)} better, none worse.",
            "equal": "May be upgraded: no figure is worse.",
        }[self.verdict]


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(head + text, _WIDTH, subsequent_indent=" " * len(head), break_long_words=False)
