"""Execution of some steps of a soak, and replay of the others from their record.

A step is recorded whenever it is executed. It may be replayed once two executions of it in the same situation
(`Moment`: the live blocks before it, and the last step's structure) were equal. The program itself does not
run then: its tensors keep their memory. Before it continues, its addresses are updated, which takes a moment
that is equal for it; so the session looks ahead, and executes the steps from such a moment on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fsdpbench.sim.followers.replay_log import END, StepLog
from fsdpbench.sim.followers.replay_world import (
    BEFORE,
    Moment,
    Name,
    RecordedStep,
    UnnamedError,
    World,
    do_again,
    structure_of,
)
from fsdpbench.sim.model.allocator import SimOutOfMemoryError
from fsdpbench.sim.model.timeline import Marker
from fsdpbench.sim.torch_device.accelerator import Accelerator

_WORTH_KEEPING = 3
"""A rarer kind is never replayed: that takes two executions."""
_MOST_OPERATIONS = 10_000_000
"""Over all records: about 1.5 GiB."""
_DIFFERS = "it did not do the same as the time before"


class _Case:
    """One kind of step in one situation: its last execution, and whether the one before was equal."""

    def __init__(self) -> None:
        self.step: RecordedStep | None = None
        self.proven = False


class ReplaySession:
    """The steps of one soak. `kinds[i]` is the work of step i: equal kinds are the same work.

    `executed` and `replayed` count steps; `refusals` counts executed steps without a record by reason.
    """

    def __init__(self, accelerator: Accelerator, kinds: Sequence[Hashable]) -> None:
        self._accelerator = accelerator
        self._kinds, self._counts = kinds, Counter(kinds)
        self._world = World(accelerator.allocator.active_blocks.values())
        self._cases: dict[tuple[Hashable, Moment], _Case] = {}
        self._structures: dict[tuple[Any, ...], int] = {}
        self._now = self._program = self._world.moment()
        self._holders: list[tuple[Any, Name]] = []
        self._program_markers: dict[tuple[int, int], list[Marker]] = {}
        self._stale = self._never = False
        self._replay_until = self._execute_until = 0
        self._operations = 0
        self.executed = self.replayed = 0
        self.refusals: Counter[str] = Counter()
        self._accelerator.holders = {}

    def run(self, index: int, step: Callable[[], object]) -> None:
        """Run step `index`, executed by `step()` or replayed. Raises `torch.OutOfMemoryError` either way."""
        if index >= max(self._replay_until, self._execute_until):
            self._plan(index)
        if index < self._replay_until:
            self._replay(self._cases[self._kinds[index], self._now])
        else:
            self._execute(self._kinds[index], step)

    def end(self) -> None:
        """End the program: its tensors release memory that is no longer theirs."""
        if self._stale:
            for record, name in self._holders:
                if name.structure != BEFORE:
                    record.block = None
        self._accelerator.holders = None

    def _plan(self, index: int) -> None:
        """Replay from `index` on as long as all is known and the program can continue at the end; then
        execute up to the unknown step."""
        moment, alike = self._now, index
        for ahead in range(index, len(self._kinds)):
            if moment == self._program:
                alike = ahead
            case = self._cases.get((self._kinds[ahead], moment))
            if case is None or not case.proven or case.step is None or self._never:
                self._replay_until, self._execute_until = alike, ahead + 1
                return
            moment = case.step.after
        self._replay_until = self._execute_until = len(self._kinds)

    def _execute(self, kind: Hashable, step: Callable[[], object]) -> None:
        if self._stale:
            self._bring_up_to_date()
        before = self._now
        log = StepLog(self._accelerator.timeline)
        self._accelerator.follow(log)
        try:
            step()
            log.add(END)
        finally:
            self._accelerator.stop_following(log)
        self.executed += 1
        recorded = self._named(log)
        self._now = self._program = recorded.after
        if log.refusal is not None:
            self._never = self._never or log.for_good
            self.refusals[log.refusal] += 1
        elif self._counts[kind] >= _WORTH_KEEPING:
            self._keep(self._cases.setdefault((kind, before), _Case()), recorded)
        self._remember_program()

    def _keep(self, case: _Case, recorded: RecordedStep) -> None:
        if case.step is not None:
            case.proven = case.step == recorded
            if case.proven:
                return
            self.refusals[_DIFFERS] += 1
        elif self._operations > _MOST_OPERATIONS:
            self.refusals[f"the records of other steps have {_MOST_OPERATIONS:,} operations already"] += 1
            return
        else:
            self._operations += len(recorded.operations)
        case.step = recorded

    def _named(self, log: StepLog) -> RecordedStep:
        """Return the log in names, and the world at its end."""
        world = self._world
        try:
            blocks = tuple(map(world.name, log.blocks.before))
            markers = tuple(map(world.marker_name, log.markers.before))
        except UnnamedError:
            log.refuse("it waits for a point from before the steps that are recorded")
            blocks = markers = ()
        structure = self._structures.setdefault(structure_of(log), len(self._structures))
        for place in log.freed:
            if place < 0:
                world.died(log.blocks.before[-place - 1])
        count = world.step_ended(structure, log.markers.own)
        survivors = list(log.survivors())
        for place, block in survivors:
            world.born(block, structure, count, place)
        return RecordedStep(
            tuple(log.operations),
            blocks,
            markers,
            tuple(place for place, _ in survivors),
            structure,
            world.moment(),
        )

    def _remember_program(self) -> None:
        """Record the storages' blocks, and the markers that the program may wait for."""
        holders, world = self._accelerator.holders or {}, self._world
        self._holders = []
        for block in world.alive():
            record, name = holders.get(id(block)), world.name(block)
            if record is not None and record.block is block:
                self._holders.append((record, name))
            elif name.structure != BEFORE:
                self._never = True
                self.refusals["it leaves memory behind that no tensor holds"] += 1
        self._program_markers = world.kept_markers()

    def _bring_up_to_date(self) -> None:
        """Update the program at an equal moment: equal names denote its blocks and markers."""
        holders: dict[int, Any] = {}
        for record, name in self._holders:
            record.block = self._world.block(name)
            holders[id(record.block)] = record
        self._accelerator.holders = holders
        for (structure, ago), markers in self._program_markers.items():
            self._world.replace_markers(structure, ago, markers)
        self._stale = False

    def _replay(self, case: _Case) -> None:
        assert case.step is not None
        self._stale = True
        try:
            do_again(case.step, self._world, self._accelerator.timeline, self._accelerator.allocator)
        except SimOutOfMemoryError as error:
            message = str(error)
        else:
            self._now = case.step.after
            self.replayed += 1
            return
        if self._accelerator.on_out_of_memory is not None:
            self._accelerator.on_out_of_memory(message)
        raise torch.OutOfMemoryError(message)
