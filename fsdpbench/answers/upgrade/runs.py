"""Run a script in package environments with the current sources of fsdpbench: two runs are compared, and more
runs find the packages that cause a difference. The answer has the gate's verdict, the differences of a step,
and which parts were executed and which only priced."""

import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

import fsdpbench
from fsdpbench.answers.check.compare import Comparison, compare
from fsdpbench.answers.check.records.baseline import Surroundings, require_alike
from fsdpbench.answers.check.records.sides import Side, absent_of, paired, read_side
from fsdpbench.answers.check.text import as_json, as_text, summary
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.upgrade.environments import Cache, Environment, Wanted, differing, finished, last_line
from fsdpbench.base.errors import CannotJudgeError, ExitCode, UsageError
from fsdpbench.base.reading import one_line, parse_json
from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.analysis.trace_diff import TraceDiff, describe_diff, diff_ranks
from fsdpbench.reports.result import Result

_STARTING_S = 600.0  # to import packages, in addition to ten times the limit (for a busy processor)
_PRICES = {
    "executed": "the packages' own code: the kernels, collectives, copies and allocations that it issues",
    "priced": "the time of each, by one table for both sides: a kernel that got faster or slower is not seen",
}
_WIDTH = 79
_MOST_PACKAGES = 8


@dataclass(frozen=True)
class Run:
    """A finished run: its figures as the gate reads them, its result, and its trace if there is one."""

    side: Side
    result: Result
    trace: RankAnalysis | None


@dataclass(frozen=True)
class Program:
    """A script to run in environments. `words`: of `fsdpbench run`; `sources`: where fsdpbench is linked."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    limit_s: float
    sources: Path
    tell: Callable[[str], None]

    def run(self, environment: Environment, folder: Path, label: str) -> Run:
        """Run the script in `environment` and write a run folder. Raises `UsageError` if `fsdpbench run`
        rejects its arguments, `CannotJudgeError` if there is no result; both name `label`."""
        self.tell(f"{label}: running in {environment.python}")
        if not (self.sources / "fsdpbench").is_symlink():
            (self.sources / "fsdpbench").symlink_to(Path(fsdpbench.__file__).parent)
        paths = [str(self.sources), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = [str(Path(environment.python).absolute().parent), os.environ.get("PATH", os.defpath)]
        more = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(found)}
        own = ["-m", "fsdpbench", "run", "-o", str(folder), "--timeout", f"{self.limit_s:g}", "--json"]
        words = [environment.python, *own, *self.words, "--", *self.arguments]
        done = finished(words, 10 * self.limit_s + _STARTING_S, more)
        if done.returncode == ExitCode.USAGE:
            raise UsageError(f"{label}: {last_line(done)}")
        if done.returncode not in (ExitCode.OK, ExitCode.SOME_FAILED):
            failed = f"fsdpbench cannot run there: {last_line(done)}"
            raise CannotJudgeError(f"{label}: {failed} (`{environment.python} -m pip check` may say why)")
        return run_in(folder, Result.of(parse_json(done.stdout, label)))


def run_in(folder: Path, result: Result) -> Run:
    """Return the run of `result` from its run folder. Raises `BenchError`."""
    traces = sorted(Path(result.folder or folder).glob("trace/*_trace.json.gz"))
    ranks = analyze(traces[:1]).ranks if traces else ()
    side = read_side(folder)
    # The versions of torch may differ, since they are compared here; everything else must be equal.
    facts = {name: value for name, value in side.surroundings.facts.items() if name != "torch"}
    return Run(replace(side, surroundings=Surroundings(facts)), result, ranks[0] if ranks else None)


def compared(before: Run, after: Run, thresholds: Thresholds) -> Comparison:
    """Return the gate's comparison. Raises `CannotJudgeError` if the sides cannot be compared."""
    require_alike(before.side.surroundings, after.side.surroundings)
    return compare(*paired(before.side, after.side), thresholds, absent_of(before.side, after.side))


class Tried(msgspec.Struct, frozen=True):
    """A run with only some packages of the newer side: figures that are worse, or why it was skipped."""

    packages: list[str]
    worse: list[str] = []
    skipped: str = ""

    def line(self) -> str:
        """Return the outcome as a line of text."""
        found = f"skipped: {self.skipped}" if self.skipped else f"worse: {', '.join(self.worse) or 'nothing'}"
        return f"  {one_line(', '.join(self.packages), 60)}: {found}"  # a terminal's line


def bisect(
    cache: Cache, program: Program, sides: tuple[Environment, Environment],
    judge: Callable[[Run], Comparison], folder: Path, named: Collection[str],
) -> Iterator[Tried]:  # fmt: skip
    """Try the differing packages in `named` one at a time in the older side; then all other differing ones,
    bisected while a half is worse. `judge` compares with the older side's run; `folder`: for runs."""
    before, after = sides
    changed = list(differing(before, after))

    def tried(unit: list[str]) -> Tried:
        """Try `unit` with dependencies that the older side lacks; if that fails, with all dependencies."""
        last = ""
        for among in ([name for name in changed if name not in before.packages], changed):
            group = list(unit)
            for name in group:  # the list grows during the loop
                group += [each for each in among if each in after.needs.get(name, ()) and each not in group]
            names = {**before.packages, **after.packages}.keys()
            lines = [(after if name in group else before).packages.get(name) for name in sorted(names)]
            try:
                environment = cache.environment(Wanted("bisect", tuple(filter(None, lines))))
                run = program.run(environment, folder / f"with-{unit[0]}-{len(group)}", f"with {unit[0]}")
            except CannotJudgeError as error:
                last = str(error)
            else:
                worse = [f"{each.metric} {each.reason or ''}".strip() for each in judge(run).regressions]
                return Tried(group, sorted(worse))
        return Tried(unit, skipped=last)

    seen: set[str] = set()
    for name in (name for name in changed if name in named):
        yield (found := tried([name]))
        seen.update(found.packages)
    todo = [[name for name in changed if name not in seen]]
    while todo:
        if unit := todo.pop(0):
            yield (found := tried(unit))
            half = len(unit) // 2
            todo = [unit[:half], unit[half:], *todo] if found.worse and half else todo


@dataclass(frozen=True)
class Upgrade:
    """The answer for a `program`, the older side first. `tried`: None without bisection."""

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
        """Return the answer as plain values for JSON."""
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
        """Return the answer as text."""
        changed = differing(*self.environments).values()
        named = [f"{old} -> {new}" for old, new in changed if old and new][:_MOST_PACKAGES]
        named += [f"{len(changed) - len(named)} others"] if len(changed) > len(named) else []
        lines = [self.program, *_wrapped(f"packages that differ: {', '.join(named) or 'none'}")]
        for line in as_text(self.comparison).split("\n")[:-1]:  # without the summary line
            lines += _wrapped(line) if line.startswith("cause") else [line]
        if (step := self.step) is not None:
            lines += [*describe_diff(step).split("\n")[2:], ""]  # without the two lines that name the traces
        lines += self._waits()
        if self.tried is not None:
            lines += ["newer versions alone:", *(line for t in self.tried for line in _wrapped(t.line())), ""]
        lines += [line for name, text in _PRICES.items() for line in _wrapped(f"{name}: {text}")]
        fails = self.comparison.regressions or self.comparison.unjudged
        lines.append(summary(self.comparison) if fails else "May be upgraded: nothing is worse.")
        return "\n".join(lines)

    def _waits(self) -> list[str]:
        """Return the script lines that wait for the GPU more or less often than before."""
        both = [run.result.observed for run in self.runs]
        found = [seen.waits if seen else [] for seen in both]
        old, new = ({f"{each.file}:{each.line}": each.per_step for each in waits} for waits in found)
        return [
            f"waits for the GPU at {place}: {old.get(place, 0):g} -> {new.get(place, 0):g} a step"
            for place in {**old, **new}
            if old.get(place) != new.get(place)
        ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
