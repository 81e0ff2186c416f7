"""The answer of `upgrade`: the gate's verdict, what differs in a step, what was executed and what priced."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

import msgspec

from fsdpbench.answers.check.compare import Comparison
from fsdpbench.answers.check.text import as_json, as_text, summary
from fsdpbench.answers.upgrade.environments import Environment, differing
from fsdpbench.answers.upgrade.runs import Run, Tried
from fsdpbench.reports.analysis.trace_diff import TraceDiff, describe_diff, diff_ranks

_PRICES = {
    "executed": "the packages' own code: the kernels, collectives, copies and allocations that it issues",
    "priced": "the time of each, by one table for both sides: a kernel that got faster or slower is not seen",
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
    def step(self) -> TraceDiff | None:
        """Return the changes of a traced step; None unless both sides have a trace."""
        traces = [run.trace for run in self.runs if run.trace is not None]
        return diff_ranks(*traces) if len(traces) == 2 else None

    def to_dict(self) -> dict[str, object]:
        """Return the answer for programs."""
        before, after = self.environments
        changed = differing(before, after).items()
        return {
            "schema": 1,
            "program": self.program,
            "from": before.python,
            "to": after.python,
            "packages": {name: {"from": old, "to": new} for name, (old, new) in changed},
            "comparison": json.loads(as_json(self.comparison)),
            "step": self.step and self.step.to_dict(),
            "waits": self._waits(),
            "bisection": msgspec.to_builtins(self.tried),
            **_PRICES,
        }

    def as_text(self) -> str:
        """Return the answer as lines."""
        changed = differing(*self.environments).values()
        named = [f"{old} -> {new}" for old, new in changed if old and new][:_MOST_PACKAGES]
        named += [f"{len(changed) - len(named)} others"] if len(changed) > len(named) else []
        lines = [self.program, *_wrapped(f"packages that differ: {', '.join(named) or 'none'}")]
        for line in as_text(self.comparison).split("\n")[:-1]:  # the last one sums up
            lines += _wrapped(line) if line.startswith("cause") else [line]
        if (step := self.step) is not None:
            lines += [*describe_diff(step).split("\n")[2:], ""]  # the first two name the traces
        lines += self._waits()
        if self.tried is not None:
            lines += ["newer versions alone:", *(line for t in self.tried for line in _wrapped(t.line())), ""]
        lines += [line for name, text in _PRICES.items() for line in _wrapped(f"{name}: {text}")]
        fails = self.comparison.regressions or self.comparison.unjudged
        lines.append(summary(self.comparison) if fails else "May be upgraded: nothing is worse.")
        return "\n".join(lines)

    def _waits(self) -> list[str]:
        """Return the lines of the script that wait for the GPU more often or less often than before."""
        found = [run.result.stored("script.observed.waits") or () for run in self.runs]
        old, new = ({f"{each['file']}:{each['line']}": each["per_step"] for each in waits} for waits in found)
        return [
            f"waits for the GPU at {place}: {old.get(place, 0):g} -> {new.get(place, 0):g} a step"
            for place in {**old, **new}
            if old.get(place) != new.get(place)
        ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
