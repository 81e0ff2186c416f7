"""Runs of a script in environments, by the sources of fsdpbench that run here; and two of them compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import fsdpbench
from fsdpbench.answers.check.compare import Comparison, compare
from fsdpbench.answers.check.records.sides import Side, absent_of, paired, read_side
from fsdpbench.answers.check.records.surroundings import Surroundings, require_alike
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.upgrade.environments import Environment, finished, last_line
from fsdpbench.base.errors import CannotJudgeError, ExitCode, UsageError
from fsdpbench.base.reading import parse_json
from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.result import Result

_STARTING_S = 600.0
"""Beyond ten times its limit (waits for a busy processor), a run may import its packages."""


@dataclass(frozen=True)
class Run:
    """A finished run: its figures as the gate reads them; and its trace, None if it left none."""

    side: Side
    result: Result
    trace: RankAnalysis | None


@dataclass(frozen=True)
class Program:
    """A script to run in environments: words of `fsdpbench run`, the script's own arguments, a time limit.
    `sources`: a folder in which fsdpbench's sources are linked. `tell` hears what runs."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    limit_s: float
    sources: Path
    tell: Callable[[str], None]

    def run(self, environment: Environment, folder: Path, label: str) -> Run:
        """Run it in `environment` and leave a run folder. Raises `UsageError` for what `fsdpbench run`
        refuses, `CannotJudgeError` if it leaves no result; both name `label`."""
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
            check = f"`{environment.python} -m pip check` shows what is broken there"
            raise CannotJudgeError(f"{label}: fsdpbench cannot run there: {last_line(done)}; {check}")
        result = Result.of(parse_json(done.stdout, label))
        traces = sorted(Path(result.folder or folder).glob("trace/*_trace.json.gz"))
        ranks = analyze(traces[:1]).ranks if traces else ()
        side = read_side(folder)
        # Another version of torch is what is asked about; all else has to be alike.
        facts = {name: value for name, value in side.surroundings.facts.items() if name != "torch"}
        side = replace(side, label=label, surroundings=Surroundings(facts))
        return Run(side, result, ranks[0] if ranks else None)


def compared(before: Run, after: Run, thresholds: Thresholds) -> Comparison:
    """Return the gate's comparison. Raises `CannotJudgeError` for sides that cannot be compared."""
    require_alike(before.side.surroundings, after.side.surroundings)
    absent = absent_of(before.side, after.side)
    return compare(*paired(before.side, after.side), thresholds, absent)
