"""Runs the parts of a proof, each within its time, whatever the others find."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.prove import gradients, resuming, simulated
from fsdpbench.answers.prove.real_runs import run_pair
from fsdpbench.answers.prove.verdict import Part, PartVerdict, Proof, Verdict, judged, unknown
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import thrown_away


@dataclass
class Request:
    """A proof that is asked for. `real_ranks`: numbers of CPU ranks; `resume_with`: arguments of the script
    when it starts again; `limit_s`: for each run of a part."""

    config: Config
    only: frozenset[Part] = frozenset(Part)
    real_ranks: tuple[int, ...] = (4, 2)
    resume_with: tuple[str, ...] = ()
    baseline: Path | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    limit_s: float = 120.0
    tell: Callable[[str], None] = lambda line: None


def prove(request: Request) -> Proof:
    """Run the parts that are asked for. Raises `BenchError` only for what the command itself cannot do."""
    config = request.config
    assert config.script is not None
    request.config = replace(config, script=replace(config.script, keeps_files=True))
    with thrown_away("prove") as folder:
        running = _Running(request, folder)
        parts = [running.run(part) for part in Part if part in request.only]
    return Proof(config.model, config.gpus, config.hardware or "", parts)


class _Running:
    """The parts of one proof as they run, in `folder`."""

    def __init__(self, request: Request, folder: Path) -> None:
        self._request, self._folder = request, folder

    def run(self, part: Part) -> PartVerdict:
        """Return a part's verdict; what fails in it could not be judged."""
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
            with contextlib.suppress(BenchError):  # its own parts say why
                seen = list(simulated.unreduced(self._simulated))
        try:
            return self._compared(seen)
        except BenchError as error:
            return unknown(Part.GRADIENTS, str(error), seen)

    def _compared(self, seen: list[str]) -> PartVerdict:
        """Compare the runs on each number of ranks, until one shows a finding. `seen`: those simulated."""
        request = self._request
        done: list[str] = []
        summed: bool | None = None
        for ranks in request.real_ranks:
            folder = self._folder / f"gradients{ranks}"
            pair = run_pair(request.config, folder, ranks, request.limit_s, summed)
            summed = pair.summed
            sharded, done = pair.sharded, [*done, str(ranks)]
            if not sharded.steps:
                fails = f"{sharded.place}: fails sharded, and runs unsharded: {sharded.cause}"
                return judged(Part.GRADIENTS, [fails, *seen], f"no step on {ranks} CPU ranks")
            found = gradients.compare(pair)
            lines, right = found.lines(), len(found.compared - found.wrong)
            notes = ["summed over ranks, as the loss asks"] * pair.summed
            notes.append(", ".join(sharded.notes) or "model as it is")
            ran = f"{' and '.join(done)} CPU ranks, different data each; {'; '.join(notes)}"
            said = f"{right} of {len(found.trained)} parameters equal to the unsharded model's ({ran})"
            if lines:
                break
            if sharded.cause:
                return unknown(Part.GRADIENTS, f"{sharded.failure}; until then {said}", seen)
            if right < len(found.trained):
                return unknown(Part.GRADIENTS, f"only {said}", seen)
        return judged(Part.GRADIENTS, lines + seen, said)

    def _speed(self) -> PartVerdict:
        asked = self._request
        if asked.baseline is None:
            return PartVerdict(Part.SPEED, Verdict.SKIPPED, "no --baseline")
        _ = self._simulated
        return simulated.speed(self._folder / "simulated", asked.config, asked.baseline, asked.thresholds)

    def _resume(self) -> PartVerdict:
        request = self._request
        ranks, folder = request.real_ranks, self._folder / "resume"
        findings, done, missing = resuming.resume(
            request.config, folder, ranks, request.limit_s, request.resume_with
        )
        said = f"saved on {ranks[0]} CPU ranks, loaded on {' and '.join(map(str, done or ranks))}"
        time_s = self._saving_words()
        if findings:
            return judged(Part.RESUME, findings, said)
        if missing:
            return unknown(Part.RESUME, f"{said}: equal, but not {missing}{time_s}")
        return judged(Part.RESUME, [], f"{said}: weights, optimizer and data position equal{time_s}")

    def _saving_words(self) -> str:
        """Return the time of a checkpoint at full size, if that is simulated for another part."""
        if not self._request.only - {Part.GRADIENTS, Part.RESUME}:
            return ""
        with contextlib.suppress(BenchError):  # the other parts say why there is no simulated run
            words = simulated.saving_words(self._simulated, self._request.config)
            return f"; {words}" if words else ""
        return ""
