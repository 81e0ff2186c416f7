"""The answer of `upgrade`: the gate's verdict, what differs in a step, what was executed and what priced."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

import msgspec

from fsdpbench.answers.check.compare import Comparison, Verdict
from fsdpbench.answers.check.text import as_json, as_text
from fsdpbench.answers.upgrade.bisection import Tried
from fsdpbench.answers.upgrade.environments import Environment, differing
from fsdpbench.answers.upgrade.runs import Run
from fsdpbench.reports.analysis.trace_diff import TraceDiff, describe_diff, diff_ranks

_PRICES = {
    "executed": "the packages' own code: the kernels, collectives, copies and allocations that it issues",
    "priced": "the time of each, by one table for both sides: a kernel that got faster or slower is not seen",
}
_CLOSING = {
    "worse": "Worse, for the causes above.",
    "cannot judge": "Cannot be judged.",
    "better": "May be upgraded: nothing is worse, and some figures are better.",
    "equal": "May be upgraded: nothing is worse.",
}
_WIDTH = 79
_MOST_PACKAGES = 8


@dataclass(frozen=True)
class Upgrade:
    """The answer on a `program`, the older side first. `tried`: None if nothing was bisected."""

    program: str
    environments: tuple[Environment, Environment]
    runs: tuple[Run, Run]
    comparison: Comparison
    tried: list[Tried] | None

    @property
    def verdict(self) -> str:
        """Return `worse`, `cannot judge`, `better` or `equal`."""
        if self.comparison.regressions:
            return "worse"
        if self.comparison.unjudged or not self.comparison.compared:
            return "cannot judge"
        return "better" if self.comparison.of(Verdict.BETTER) else "equal"

    @property
    def step(self) -> TraceDiff | None:
        """Return the changes of a traced step; None unless both sides have a trace."""
        traces = [run.trace for run in self.runs if run.trace is not None]
        return diff_ranks(*traces) if len(traces) == 2 else None

    def to_dict(self) -> dict[str, object]:
        """Return the answer for programs."""
        sides = dict(zip(("from", "to"), self.environments, strict=True))
        changed = differing(*self.environments)
        return {
            "schema": 1,
            "program": self.program,
            "verdict": self.verdict,
            **{side: each.python for side, each in sides.items()},
            "packages": {
                n: {side: next(iter(e.lines([n])), None) for side, e in sides.items()} for n in changed
            },
            "comparison": json.loads(as_json(self.comparison)),
            "step": self.step and self.step.to_dict(),
            "waits": self._waits(),
            "bisection": msgspec.to_builtins(self.tried),
            **_PRICES,
        }

    def as_text(self) -> str:
        """Return the answer as lines."""
        changed = differing(*self.environments)
        pairs = [tuple(each.lines([name]) for each in self.environments) for name in changed]
        shown = [f"{old[0]} -> {new[0]}" for old, new in pairs if old and new][:_MOST_PACKAGES]
        others = [f"{len(changed) - len(shown)} others"] if len(changed) > len(shown) else []
        lines = [self.program, *_wrapped("packages that differ", ", ".join(shown + others) or "none")]
        lines.append(as_text(self.comparison, closing=""))
        if (step := self.step) is not None:
            lines += [*describe_diff(step).split("\n")[2:], ""]  # the first two name the traces
        lines += self._waits()
        if self.tried is not None:
            lines += ["newer versions alone:", *(each.line() for each in self.tried), ""]
        lines += [line for item in _PRICES.items() for line in _wrapped(*item)]
        return "\n".join([*lines, _CLOSING[self.verdict]])

    def _waits(self) -> list[str]:
        """Return the lines of the script that wait for the GPU more often or less often than before."""
        found = [run.result.stored("script.observed.waits") or () for run in self.runs]
        old, new = ({f"{each['file']}:{each['line']}": each["per_step"] for each in waits} for waits in found)
        counts = {place: (old.get(place, 0), new.get(place, 0)) for place in {**old, **new}}
        return [
            f"waits for the GPU at {place}: {before:g} -> {after:g} a step"
            for place, (before, after) in counts.items()
            if before != after
        ]


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(f"{head}: {text}", _WIDTH, subsequent_indent="  ", break_long_words=False)
