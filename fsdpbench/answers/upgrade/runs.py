"""One run of a script in an environment, by the sources of fsdpbench that run here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

import fsdpbench
from fsdpbench.answers.check.records.sides import Side, read_side
from fsdpbench.answers.check.records.surroundings import Surroundings
from fsdpbench.answers.upgrade.environments import Environment, finished, last_line
from fsdpbench.base.errors import CannotJudgeError, ExitCode, UsageError
from fsdpbench.base.reading import parse_json
from fsdpbench.reports.analysis import RankAnalysis, analyze, intervals
from fsdpbench.reports.analysis.windows import step_marks
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.result import Result

_STARTING_S = 600.0
"""Beyond its own limit a run may import its packages and write its result."""


@dataclass(frozen=True)
class Run:
    """A finished run. `side`: its figures as the gate reads them. `trace`: its analysis, with the CPU's time
    of a mean step (ns) as `drawing`; None if it left no trace."""

    label: str
    side: Side
    result: Result
    trace: RankAnalysis | None


@dataclass(frozen=True)
class Program:
    """What runs in every environment: words of `fsdpbench run`, the script's own arguments, a time limit.
    `sources`: a folder in which fsdpbench's sources are linked."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    limit_s: float
    sources: Path

    def run(self, environment: Environment, folder: Path, label: str, tell: Callable[[str], None]) -> Run:
        """Run it in `environment` and leave a run folder. Raises `UsageError` for what `fsdpbench run`
        refuses, `CannotJudgeError` if it leaves no result; both name `label`."""
        tell(f"{label}: running ({environment.words()})")
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
            raise CannotJudgeError(
                f"{label} ({environment.words()}): fsdpbench cannot run there: {last_line(done)}; "
                f"`{environment.python} -m pip check` shows what is broken"
            )
        result = Result.of(parse_json(done.stdout, label))
        traces = sorted(Path(result.folder or folder).glob("trace/*_trace.json.gz"))
        ranks = analyze(traces[:1], draw=_host_time).ranks if traces else ()
        side = read_side(folder)
        # Another version of torch is what is asked about; all else has to be alike.
        facts = {name: value for name, value in side.surroundings.facts.items() if name != "torch"}
        side = replace(side, label=label, surroundings=Surroundings(facts))
        return Run(label, side, result, ranks[0] if ranks else None)


def _host_time(trace: Trace, rank: RankAnalysis) -> float:
    """Return the time that the CPU spends on operators and calls of the driver in a mean step, waits for the
    device left out, ns."""
    waits = trace.names_that(lambda name: "Synchronize" in name)
    rows = trace.rows(Category.CPU_OP, Category.RUNTIME)
    rows = rows[~waits[trace.events.name[rows]]]
    busy = intervals.of(trace.events.start[rows], trace.events.end[rows])
    marks = step_marks(trace)
    ends = (np.array([getattr(mark, end) for mark in marks], np.int64) for end in ("start", "end"))
    return fmean(intervals.covered(busy, *ends).tolist()) if marks else 0.0
