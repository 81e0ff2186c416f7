"""Which package causes which difference: the script in environments of the older side, with some packages as
the newer side has them. What pip refuses is tried again together with its dependencies, else skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdpbench.answers.check.compare import Comparison
from fsdpbench.answers.upgrade.environments import Cache, Environment, Wanted, differing
from fsdpbench.answers.upgrade.runs import Program, Run
from fsdpbench.base.errors import CannotJudgeError

_SHOWN = 4


class Tried(msgspec.Struct, frozen=True):
    """Some packages alone as the newer side has them: figures that become worse, or why none are known."""

    packages: list[str]
    worse: list[str] = []
    skipped: str = ""

    def line(self) -> str:
        """Return it as a line."""
        more = len(self.packages) - _SHOWN
        names = ", ".join(self.packages[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        found = f"skipped: {self.skipped}" if self.skipped else f"worse: {', '.join(self.worse) or 'nothing'}"
        return f"  {names}: {found}"


@dataclass(frozen=True)
class Bisection:
    """A search between two environments. `judge` compares a run with the older side's; `folder` gets runs."""

    cache: Cache
    program: Program
    before: Environment
    after: Environment
    judge: Callable[[Run], Comparison]
    folder: Path

    def search(self, named: Collection[str]) -> Iterator[Tried]:
        """Try the packages `named` that differ, one at a time; then all others together, halved while a half
        makes a figure worse."""
        changed = list(differing(self.before, self.after))
        seen: set[str] = set()
        for name in (name for name in changed if name in named):
            yield (tried := self._tried([name], changed))
            seen.update(tried.packages)
        todo = [[name for name in changed if name not in seen]]
        while todo:
            if unit := todo.pop(0):
                yield (tried := self._tried(unit, changed))
                half = len(unit) // 2
                todo = [unit[:half], unit[half:], *todo] if tried.worse and half else todo

    def _tried(self, unit: list[str], changed: list[str]) -> Tried:
        """Try `unit` with what it needs and the older side lacks; refused by pip, with all that it needs."""
        last = ""
        for among in ([name for name in changed if name not in self.before.packages], changed):
            group = list(unit)
            for name in group:  # grows meanwhile
                needs = self.after.packages.get(name, ("", ()))[1]
                group += [each for each in among if each in needs and each not in group]
            kept = self.before.lines(sorted(self.before.packages.keys() - set(group)))
            try:
                wanted = Wanted("bisect", (*self.after.lines(group), *kept))
                folder = self.folder / f"with-{unit[0]}-{len(group)}"
                run = self.program.run(self.cache.environment(wanted), folder, f"with {unit[0]}")
            except CannotJudgeError as error:
                last = str(error)
            else:
                return Tried(group, sorted({change.metric for change in self.judge(run).regressions}))
        return Tried(unit, skipped=last)
