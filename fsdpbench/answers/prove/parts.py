"""Run the parts of a proof independently, each with its time limit. Part 5, resuming, is in this file."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import torch

from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.prove import gradients, real_runs, simulated
from fsdpbench.answers.prove.real_runs import Pair, fails_otherwise, run_pair, run_ranks, with_rounding
from fsdpbench.answers.prove.verdict import Part, PartVerdict, Proof, Verdict, judged, shown, unknown
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, CannotJudgeError, error_text
from fsdpbench.reports.result import Result
from fsdpbench.script.real_ranks.checkpoints import State, read_states, saved_after
from fsdpbench.script.real_ranks.pieces import Piece, whole
from fsdpbench.script.real_ranks.rank import Task, Way
from fsdpbench.sweep.trials import thrown_away

_MOST_STEPS = 12


def resume(
    config: Config, folder: Path, ranks: Sequence[int], timeout_s: float, arguments: tuple[str, ...]
) -> tuple[list[str], list[int], str]:
    """Run the script on `ranks[0]` ranks until it saves, and continue on each of `ranks`. Return findings,
    the numbers of ranks on which it continued, and what was not judged. `arguments`: appended to the script's
    own when it continues. Raises `CannotJudgeError` if it saves or loads nothing."""
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
        task = Task(Way.RESUMES, _MOST_STEPS, whole=run.whole)
        continued = run_ranks(again, target, count, timeout_s, task)
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
            raise CannotJudgeError(error_text("parts.checkpoint_loaded", place))
        else:
            findings |= dict.fromkeys(f"{after[0].place}: {each}" for each in _compared(before, after))
            if not before[0].next or not after[0].next:
                missing = "the data's position: no step follows the checkpoint"
            done.append(count)
    return [*findings], done, missing


def _compared(before: list[State], after: list[State]) -> Iterator[str]:
    """Yield differences in weights, optimizer states, counts, and the data of the next step."""
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
    """Return the names of tensors that are not bitwise equal."""
    found = []
    for name in before[0]:
        one = whole(each.get(name) for each in before)
        other = whole(each.get(name) for each in after)
        if one is not None and (other is None or not torch.equal(one.values, other.values)):
            found.append(name)
    return found


def _on_ranks(done: Sequence[str], lines: list[str], said: str, seen: list[str]) -> PartVerdict:
    """Return the verdict on gradients. What only a later number of ranks shows is not judged: a mesh may have
    no second dimension there."""
    if lines and done[1:]:
        return unknown(Part.GRADIENTS, f"{said}; with {done[-1]} ranks alone: {'; '.join(lines)}", seen)
    return judged(Part.GRADIENTS, lines + seen, said)


@dataclass
class Request:
    """The options of a proof. `real_ranks`: numbers of CPU ranks; `resume_with`: arguments of the script when
    it resumes; `limit_s`: time limit for each run of a part."""

    config: Config
    only: frozenset[Part] = frozenset(Part)
    real_ranks: tuple[int, ...] = (4, 2)
    resume_with: tuple[str, ...] = ()
    baseline: Path | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    limit_s: float = 120.0
    tell: Callable[[str], None] = lambda line: None


def prove(request: Request) -> Proof:
    """Run the requested parts. Raises `BenchError` only if the command itself fails, not a part of it."""
    config = request.config
    assert config.script is not None
    request.config = replace(config, script=replace(config.script, keeps_files=True))
    with thrown_away("prove") as folder:
        running = _Running(request, folder)
        parts = [running.run(part) for part in Part if part in request.only]
    return Proof(config.model, config.gpus, config.hardware or "", parts)


class _Running:
    """Runs the parts of one proof in `folder`."""

    def __init__(self, request: Request, folder: Path) -> None:
        self._request, self._folder = request, folder

    def run(self, part: Part) -> PartVerdict:
        """Return a part's verdict: unknown if it fails with a `BenchError`."""
        self._request.tell(f"{part.value}: running")
        began = time.monotonic()
        own = {Part.GRADIENTS: self._gradients, Part.SPEED: self._speed, Part.RESUME: self._resume}
        try:
            if part in own:
                found = own[part]()
            else:
                found = simulated.judge(part, self._simulated, self._request.config)
        except BenchError as error:
            found = unknown(part, str(error))
        return msgspec.structs.replace(found, seconds=time.monotonic() - began)

    @cached_property
    def _simulated(self) -> Result:
        checks = Part.RANKS in self._request.only
        return simulated.simulate(self._request.config, self._folder / "simulated", checks)

    def _gradients(self) -> PartVerdict:
        seen: list[str] = []
        if self._request.only - {Part.GRADIENTS, Part.RESUME}:
            with contextlib.suppress(BenchError):  # the parts that need the simulated run report the error
                seen = list(simulated.unreduced(self._simulated))
        try:
            return self._compared(seen)
        except BenchError as error:
            return unknown(Part.GRADIENTS, str(error), seen)

    def _compared(self, seen: list[str]) -> PartVerdict:
        """Compare the runs on each number of ranks until there is a finding. `seen`: simulated findings."""
        request = self._request
        done: list[str] = []
        power: int | None = None
        for ranks in request.real_ranks:
            folder = self._folder / f"gradients{ranks}"
            pair = run_pair(request.config, folder, ranks, request.limit_s, power)
            power = pair.power
            sharded, plain, done = pair.sharded, pair.reference, [*done, str(ranks)]
            if sharded.is_to_blame and sharded.steps < plain.steps and sharded.place != plain.place:
                fails = f"{sharded.place}: fails sharded, and runs unsharded: {sharded.cause}"
                said = f"{sharded.steps or 'no'} step{'s' * (sharded.steps > 1)} on {ranks} CPU ranks"
                others = (
                    int(done[0])
                    if len(done) > 1
                    else fails_otherwise(request.config, sharded, folder, request.limit_s)
                )
                if others:  # the script may need that many ranks
                    return unknown(Part.GRADIENTS, f"{said}; {others} do not fail so: {fails}", seen)
                return judged(Part.GRADIENTS, [fails, *seen], said)
            found = self._found(pair, folder)
            if found.may_be_compressed:
                found = self._without_hook(found, pair, folder)
            elif found.keeps_own:
                longer = Task(Way.SHARDED, _MOST_STEPS)
                run = run_ranks(request.config, folder / "longer", ranks, request.limit_s, longer)
                gradients.require_apart(run, min(step for *_, step, _ in found.findings), _MOST_STEPS)
            lines, right = found.lines(), len(found.compared - found.wrong - found.hidden)
            notes = ["summed over ranks, as the loss asks"] * (pair.power < 0)
            notes.append(", ".join(sharded.notes) or "model as it is")
            ran = f"{' and '.join(done)} CPU ranks, different data each; {'; '.join(notes)}"
            said = f"{right} of {len(found.trained)} parameters equal to the unsharded model's ({ran})"
            if lines:
                break
            if failure := sharded.failure or (plain.steps < sharded.steps and plain.failure):
                return unknown(Part.GRADIENTS, f"{failure}; until then {said}", seen)
            if found.hidden:
                said += f"; rounding changes {shown(sorted(found.hidden))} as much as faults do: try float32"
            if right < len(found.trained):
                return unknown(Part.GRADIENTS, f"only {said}", seen)
            if pair.dropped and not pair.task.follows:
                return unknown(Part.GRADIENTS, error_text("gradients.dropped", pair.dropped, said), seen)
            lines = [] if done[1:] else real_runs.repeated(request.config, folder, sharded, request.limit_s)
            if lines:
                break
        return _on_ranks(done, lines, said, seen)

    def _found(self, pair: Pair, folder: Path) -> gradients.Compared:
        found, (config, limit_s) = gradients.compare(pair), (self._request.config, self._request.limit_s)
        if found.may_be_summed:
            folder /= "summed"
            pair = run_pair(config, folder, pair.sharded.ranks, limit_s, power=-1)
            found = gradients.compare(pair)
        if found.is_doubtful:
            found = gradients.compare(with_rounding(config, pair, folder, limit_s, found.epsilon))
        if not found.findings:
            apart = real_runs.kept_apart(config, pair, folder, limit_s)
            found.add_kept(apart, pair.sharded.records(0)[0].place)
        return found

    def _without_hook(self, found: gradients.Compared, pair: Pair, folder: Path) -> gradients.Compared:
        """Compare again with torch's reduction instead of the script's own hook. Raises `CannotJudgeError` if
        that has no finding: the hook may lose parts of gradients on purpose."""
        request, aside = self._request, folder / "plain"
        pair = run_pair(request.config, aside, pair.sharded.ranks, request.limit_s, pair.power, plain=True)
        without = self._found(pair, aside)
        if without.findings:
            return without
        equal = f"{len(without.compared)} of {len(without.trained)} parameters are equal"
        raise CannotJudgeError(error_text("parts.own_hook", found.hook, found.findings[0][0], equal))

    def _speed(self) -> PartVerdict:
        asked = self._request
        if asked.baseline is None:
            return PartVerdict(Part.SPEED, Verdict.SKIPPED, "no --baseline")
        _ = self._simulated
        return simulated.speed(self._folder / "simulated", asked.config, asked.baseline, asked.thresholds)

    def _resume(self) -> PartVerdict:
        request = self._request
        ranks, folder = request.real_ranks, self._folder / "resume"
        findings, done, missing = resume(request.config, folder, ranks, request.limit_s, request.resume_with)
        said = f"saved on {ranks[0]} CPU ranks, loaded on {' and '.join(map(str, done or ranks))}"
        time_s = self._saving_words()
        if findings:
            return judged(Part.RESUME, findings, said)
        if missing:
            return unknown(Part.RESUME, f"{said}: equal, but not {missing}{time_s}")
        return judged(Part.RESUME, [], f"{said}: weights, optimizer and data position equal{time_s}")

    def _saving_words(self) -> str:
        """Return the time of a checkpoint at full size as text, if another part simulates the script."""
        if not self._request.only - {Part.GRADIENTS, Part.RESUME}:
            return ""
        with contextlib.suppress(BenchError):  # the other parts report why there is no simulated run
            words = simulated.saving_words(self._simulated, self._request.config)
            return f"; {words}" if words else ""
        return ""
