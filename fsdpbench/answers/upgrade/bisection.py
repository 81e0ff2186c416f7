"""Which package causes which difference: the script in environments of the older side, with some packages as
the newer side has them. What pip refuses is tried again together with its dependencies, else skipped. A group
that makes a figure worse is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpbench.answers.check.compare import Comparison
from fsdpbench.answers.upgrade.environments import Cache, Environment, Wanted, differing
from fsdpbench.answers.upgrade.runs import Program, Run
from fsdpbench.base.errors import CannotJudgeError

_SHOWN = 4


class Tried(msgspec.Struct, frozen=True):
    """Some packages alone as the newer side has them: the figures that become worse, or why they cannot be
    tried."""

    packages: list[str]
    worse: list[str] = []
    skipped: str = ""

    def line(self) -> str:
        """Return it as a line."""
        more = len(self.packages) - _SHOWN
        names = ", ".join(self.packages[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        if self.skipped:
            return f"{names}: skipped: {self.skipped}"
        return f"{names}: {'worse: ' + ', '.join(self.worse) if self.worse else 'nothing becomes worse'}"


@dataclass(frozen=True)
class Bisection:
    """A search between two environments. `judge` compares a run with the older side's; runs are left in
    `folder`."""

    cache: Cache
    program: Program
    before: Environment
    after: Environment
    judge: Callable[[Run], Comparison]
    folder: Path

    def search(self, named: Sequence[str]) -> list[Tried]:
        """Try the packages `named` (those that were asked for) one at a time, then all others that differ as a
        group; groups are halved."""
        changed = list(differing(self.before, self.after))
        todo = [[name] for name in changed if name in named]
        found: list[Tried] = []
        seen: set[str] = set()
        others = [name for name in changed if name not in named]
        while todo or others:
            if not todo:
                todo, others = [[name for name in others if name not in seen]], []
            if not (unit := todo.pop(0)):
                continue
            found.append(tried := self._tried(unit, changed))
            seen.update(tried.packages)
            if tried.worse and len(unit) > 1:
                todo = [unit[: len(unit) // 2], unit[len(unit) // 2 :], *todo]
        return found

    def _tried(self, unit: list[str], changed: list[str]) -> Tried:
        """Try `unit` with what it needs and the older side lacks; refused by pip, with all that it needs."""
        last = ""
        for needed in ([name for name in changed if name not in self.before.packages], changed):
            group = self._with_needs(unit, needed)
            try:
                environment = self.cache.environment(Wanted("bisect", self._requirements(group)))
                folder = self.folder / f"with {' '.join(group)}"[:100]
                run = self.program.run(environment, folder, f"with {', '.join(unit)}", self.cache.tell)
            except CannotJudgeError as error:
                last = str(error)
                continue
            return Tried(group, sorted({change.metric for change in self.judge(run).regressions}))
        return Tried(unit, skipped=last)

    def _with_needs(self, unit: list[str], among: Sequence[str]) -> list[str]:
        group = list(unit)
        for name in group:  # grows meanwhile
            package = self.after.packages.get(name)
            needs = package.needs if package else []
            group += [need for need in among if need in needs and need not in group]
        return group

    def _requirements(self, group: Sequence[str]) -> tuple[str, ...]:
        """Return every package's line: of those of `group` the newer side's."""
        names = sorted({*self.before.packages, *group})
        sides = (self.after if name in group else self.before for name in names)
        found = [side.packages.get(name) for name, side in zip(names, sides, strict=True)]
        return tuple(each.line for each in found if each is not None)
