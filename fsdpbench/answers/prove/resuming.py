"""Part 5 of a proof: what a script saves on some ranks is what it has when it continues on others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fsdpbench.answers.prove.real_runs import run_ranks
from fsdpbench.answers.prove.verdict import shown
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import CannotJudgeError
from fsdpbench.script.real_ranks.checkpoints import State, read_states, saved_after
from fsdpbench.script.real_ranks.pieces import Piece, whole
from fsdpbench.script.real_ranks.rank import Task, Way

_MOST_STEPS = 12


def resume(
    config: Config, folder: Path, ranks: Sequence[int], timeout_s: float, arguments: tuple[str, ...]
) -> tuple[list[str], list[int], str]:
    """Let the script save on `ranks[0]` ranks and continue on each of `ranks`; return findings, the numbers
    that it continued on, and what was not judged. `arguments`: of the runs that continue, behind the script's
    own. Raises `CannotJudgeError` if it saves or loads nothing."""
    first = ranks[0]
    run = run_ranks(config, folder / "saves", first, timeout_s, Task(Way.SAVES, _MOST_STEPS))
    steps, place = saved_after(run.folder)
    before = read_states(run.folder, steps, first) if steps else []
    if not before:
        nothing = f"the script saves no checkpoint in {_MOST_STEPS} steps or until its end"
        raise CannotJudgeError(run.failure or nothing)
    assert config.script is not None
    again = replace(config, script=replace(config.script, arguments=config.script.arguments + arguments))
    findings: dict[str, None] = {}
    done, missing = list[int](), ""
    for count in ranks:
        target = folder / f"resumes{count}"
        target.mkdir()
        shutil.copytree(run.folder / "files", target / "files")
        continued = run_ranks(again, target, count, timeout_s, Task(Way.RESUMES, _MOST_STEPS))
        after = read_states(continued.folder, 0, count)
        if not after and continued.is_to_blame:
            findings[f"saved on {first} ranks, fails on {count}: {continued.failure}"] = None
        elif not after:
            early = "the script ends before it takes a step with what it loaded"
            if not done and not findings:
                raise CannotJudgeError(continued.failure or early)
            missing = f"on {count}: {continued.failure or early}"
            continue
        elif not after[0].place:
            raise CannotJudgeError(
                f"the checkpoint of {place} is not loaded when the script starts again; give the "
                "arguments that resume it: --resume-with='--resume FOLDER'"
            )
        else:
            findings |= dict.fromkeys(f"{after[0].place}: {each}" for each in _compared(before, after))
            if not before[0].next or not after[0].next:
                missing = "the data's position: no step follows the checkpoint"
            done.append(count)
    return [*findings], done, missing


def _compared(before: list[State], after: list[State]) -> Iterator[str]:
    """Yield findings: weights, optimizer states, counts, and the data of the next step."""
    changed = _differing([each.weights for each in before], [each.weights for each in after])
    if changed:
        yield f"{len(changed)} parameters ({shown(changed)}) have other weights than were saved"
    for kind in before[0].states:
        if kind not in after[0].states:
            yield f"the optimizer's {kind} is not loaded: it begins again"
            continue
        changed = _differing([each.states[kind] for each in before], [each.states[kind] for each in after])
        if changed:
            of = f"{len(changed)} parameters ({shown(changed)})"
            yield f"the optimizer's {kind} of {of} is not what was saved"
    for kind, value in before[0].counts.items():
        got = after[0].counts[kind]
        if abs(got - value) > 1e-6 * abs(value):
            yield f"{kind} was {value:g} when it was saved, and is {got:g}"
    pairs = [(one, other) for one, other in zip(before, after, strict=False) if one.next and other.next]
    if any(one.next != other.next for one, other in pairs):
        if all(one.first == other.next for one, other in pairs):
            yield "the data starts again: the next step reads what the first step read"
        elif len(before) == len(after):
            yield "the next step reads other data than without the interruption"


def _differing(
    before: Sequence[Mapping[str, Piece | None]], after: Sequence[Mapping[str, Piece | None]]
) -> list[str]:
    """Return the names of tensors that are not equal, bit by bit."""
    found = []
    for name in before[0]:
        one = whole(each.get(name) for each in before)
        other = whole(each.get(name) for each in after)
        if one is not None and (other is None or not torch.equal(one.values, other.values)):
            found.append(name)
    return found
