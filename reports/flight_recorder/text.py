"""The verdict on a job's dumps for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fsdpbench.reports.flight_recorder.dump import Dump
from fsdpbench.reports.flight_recorder.matching import Problem
from fsdpbench.reports.flight_recorder.verdict import Verdict, calls_text, group_text, ranks_text, sentence

_MOST_RANKS = 32
_MOST_FRAMES = 8


def describe(verdict: Verdict) -> str:
    """The culprit first, then what led to it, then what each rank did last."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    versions = ", ".join(dict.fromkeys(dump.version for dump in verdict.dumps))
    there = ranks_text([dump.rank for dump in verdict.dumps])
    yield f"Flight Recorder dumps of {there} (version {versions})"
    if verdict.missing_dumps:
        yield f"no dump of {ranks_text(verdict.missing_dumps)}"
    yield f"culprit: {verdict.culprit}"
    for problem in verdict.problems:
        yield ""
        yield from _problem(problem, told=verdict.culprit)
    yield ""
    yield "last calls:"
    for dump in verdict.dumps[:_MOST_RANKS]:
        yield f"  rank {dump.rank}: {_last(dump)}"
    if len(verdict.dumps) > _MOST_RANKS:
        yield f"  ... {len(verdict.dumps) - _MOST_RANKS:,} more ranks; --json has all"


def _problem(problem: Problem, told: str) -> Iterator[str]:
    message = sentence(problem)
    yield message if message != told else f"collective {problem.sequence} of {group_text(problem.group)}:"
    blamed = problem.ranks[0]
    shown = [rank for rank in (blamed, *problem.others[:1]) if rank in problem.calls]
    for rank in shown:
        yield f"  rank {rank} called it from"
        for frame in problem.calls[rank][0].own_frames[:_MOST_FRAMES]:
            yield f"    {frame}"
    if blamed in problem.last:
        yield f"  rank {blamed} called its last one of this group from"
        for frame in problem.last[blamed].own_frames[:_MOST_FRAMES]:
            yield f"    {frame}"


def _last(dump: Dump) -> str:
    if not dump.entries:
        return "no call recorded"
    entry = dump.entries[-1]
    collectives = [each for each in dump.entries if not each.is_p2p]
    number = "" if entry.is_p2p else f", collective {entry.sequence} of group {entry.group.description}"
    if not all(each.knows_states for each in collectives):
        counts = f"{len(collectives):,} collectives; gloo records no states"
    else:
        states = Counter(each.state for each in collectives)
        counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    return f"{calls_text((entry,))}{number} ({counts})"
