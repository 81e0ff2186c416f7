"""When all-gathers are issued: execution order, and prefetch with a depth.

A *stage* is what one wrapped module gathers at the same time (one unit, or one for each dtype). Forward
gathers each stage when its module starts; where the CPU runs ahead of the device this overlaps by itself.
Explicit prefetch issues the all-gathers of the next ``depth`` stages right after a stage's own. On the CPU,
which runs ahead of nothing, the next stage's is issued there without a ``depth`` too: a unit more is
gathered, as on a device.

Backward needs prefetch: without it the all-gather of a stage is issued after the reduce-scatter of the stage
before, and the two queue behind each other in one communicator. The order of backward is taken to be the
reverse of the order in which stages finished forward, recorded in every iteration::

    forward    F1  F2  F3            recorded: 1 2 3
    pre        AG3 [AG2] B3 RS3 [AG1] B2 RS2 B1 RS1         gather i-1 before computing i
    post       AG3 B3 [AG2] RS3 B2 [AG1] RS2 B1 RS1         gather i-1 after computing i, before reducing it
    none       AG3 B3 RS3 AG2 B2 RS2 AG1 B1 RS1

While gradients of the stage before are kept until they are copied, and beside the loss, ``pre`` waits for the
first gradient of the stage (``late_prefetch.py``).
"""

from __future__ import annotations

import torch

from ..shared.settings import MemoryHandover, ScheduleSettings
from ..shared.torch_internals import current_graph_task_id
from .gradients.lent import LentMemory
from .late_prefetch import LatePrefetch
from .rate_limiter import RateLimiter
from .stage import Stage
from .unit import UnitState

_LONGEST_ORDER = 10_000
"""Stages in the recorded order of forwards that still await their backward, before it is forgotten."""


class Schedule:
    """Issues and awaits the gathers of a tree of stages, in the order of its modules' calls."""

    def __init__(
        self, settings: ScheduleSettings, limiter: RateLimiter, lent: LentMemory, has_streams: bool
    ) -> None:
        self.settings = settings
        self._limiter = limiter
        # With streams, waiting queues a wait on the device: do it first, as the next gather's memory may
        # depend on it. Without them waiting blocks the program: issue the next gathers first.
        self._prefetch_before_wait = not has_streams
        self.gathered_ahead = False
        """Whether the last forward gathered ahead: what it then skipped is still gathered."""
        self._forward_depth = settings.forward_prefetch_depth or 0
        self._gathers_beside = settings.forward_prefetch_depth is None and not has_streams
        self._ahead: list[Stage] = []
        """Stages of this forward that were gathered ahead without a setting that says so."""
        self._forward_order: list[Stage] = []
        self._forward_so_far: list[Stage] = []
        self._post_forward_order: list[Stage] = []
        self._order_before = 0
        self._late = LatePrefetch(lent, self._prefetch_backward)
        implicit = settings.memory_handover is MemoryHandover.EVENTS and not settings.forward_prefetch_depth
        self._holds = implicit and has_streams

    def forward_hold(self, stage: Stage) -> int:
        """Freed buffers that stay for one more turn in forward, those of all units of ``stage``: without
        explicit prefetch the next gather is issued before this stage computes on the device, and must not
        wait for it."""
        return len(stage.units) if self._holds else 0

    # -- gathers ---------------------------------------------------------------------------------------------

    def gather(self, stage: Stage, *, for_backward: bool = False) -> None:
        """Issue the gathers of a stage that is sharded or was written to, as needed ``for_backward``."""
        for unit in stage.units:
            stale = unit.state is UnitState.UNSHARDED and unit.presentation.writes != unit.gathered_writes
            if stale and current_graph_task_id() == -1:
                unit.reshard()
            if unit.state is UnitState.SHARDED and (unit.unshard_in_backward or not for_backward):
                if unit.fetches:
                    self._limiter.wait(unit.labels.limiter_wait)
                unit.all_gather(for_backward=for_backward)

    @staticmethod
    def await_stage(stage: Stage, hold: int = 0) -> None:
        """Make computation wait for a stage's parameters."""
        for unit in stage.units:
            unit.wait_all_gather(hold)

    # -- forward ---------------------------------------------------------------------------------------------

    def enter_forward(self, stage: Stage) -> None:
        """A stage's forward starts: have its parameters, prefetch those of the next."""
        self.gather(stage)
        if self._prefetch_before_wait:
            self._prefetch_forward(stage)
        self.await_stage(stage, self.forward_hold(stage))
        if not self._prefetch_before_wait:
            self._prefetch_forward(stage)

    def _prefetch_forward(self, stage: Stage) -> None:
        position = len(self._forward_so_far)
        if stage.units:
            self._forward_so_far.append(stage)
        for target in stage.forward_targets:
            self.gathered_ahead = True
            self.gather(target)
        if stage.forward_targets:
            return
        # Another order than last time is no error: there is just nothing to go by.
        order = self._forward_order
        if position >= len(order) or order[position] is not stage:
            return
        if self._forward_depth:
            self.gathered_ahead = True
            for target in order[position + 1 : position + 1 + self._forward_depth]:
                self.gather(target)
        elif self._gathers_beside and position + 1 < len(order):
            self._gather_beside(order[position + 1])

    def _gather_beside(self, stage: Stage) -> None:
        """Issue the gathers of the next stage, as a CPU that runs ahead of its device would have by now."""
        if any(unit.gathers and unit.state is UnitState.SHARDED for unit in stage.units):
            self._ahead.append(stage)
            self.gather(stage)

    def leave_forward(self, stage: Stage) -> None:
        """A stage's forward is done: remember the order for the backward that it may have."""
        if stage.units:  # also without grad: checkpointing may run a part of the forward so
            stage.forward_positions.append(len(self._post_forward_order))
            self._post_forward_order.append(stage)

    def begin_forward(self) -> None:
        """The outermost forward starts."""
        self._order_before = len(self._post_forward_order)

    def end_forward(self) -> None:
        """The root's forward is done: its order predicts the next one's."""
        for stage in self._ahead:
            if not stage.unsharded_by_hand:
                stage.drop_unused_gather()
        self._ahead.clear()
        if self._forward_so_far:
            self._forward_order = self._forward_so_far
            self._forward_so_far = []
        if not torch.is_grad_enabled():  # all of it ran without: no backward comes
            for stage in reversed(self._post_forward_order[self._order_before :]):
                stage.forward_positions.pop()
            del self._post_forward_order[self._order_before :]
        if len(self._post_forward_order) > _LONGEST_ORDER:
            # Forwards whose backward may never come. The order serves prefetch alone: without it a stage is
            # gathered when it is needed.
            for stage in set(self._post_forward_order):
                stage.forward_positions.clear()
            self._post_forward_order.clear()

    # -- backward --------------------------------------------------------------------------------------------

    def enter_backward(self, stage: Stage) -> None:
        """A stage's backward starts: have its parameters, prefetch those of the next."""
        self.gather(stage, for_backward=True)
        position = stage.forward_positions.pop() if stage.forward_positions else -1
        stage.backward_position = position
        early = stage.backward_targets or self.settings.backward_prefetch == "pre"
        self._late.enter_backward(stage)
        if early and self._prefetch_before_wait:  # without streams, where a copy is done when it is made
            self._prefetch_backward(stage)
        self.await_stage(stage)
        if early and not self._prefetch_before_wait:
            if self._late.puts_off(stage):
                self._late.put_off(stage)
            else:
                self._prefetch_backward(stage)

    def after_gradients(self, stage: Stage) -> None:
        """A stage's gradients were computed and are about to be reduced."""
        self._late.after_gradients(stage)
        if self.settings.backward_prefetch == "post" and not stage.backward_targets:
            self._prefetch_backward(stage)

    def _prefetch_backward(self, stage: Stage) -> None:
        if stage.backward_targets:
            for target in stage.backward_targets:
                if target.forward_positions:  # its backward is to come: a skipped one may be written to
                    self.gather(target, for_backward=True)
            return
        position = stage.backward_position
        for ahead in range(1, self.settings.backward_prefetch_depth + 1):
            if position - ahead < 0:
                return
            target = self._post_forward_order[position - ahead]
            # Its backward may have been already, where this stage ends later than the order says.
            if position - ahead in target.forward_positions:
                self.gather(target, for_backward=True)

    def next_in_backward(self) -> list[Stage]:
        """The stages whose backward is to come, in the recorded order."""
        return [stage for stage in reversed(self._post_forward_order) if stage.forward_positions]

    def end_backward(self) -> None:
        """Forget the order of the forward that this backward belonged to."""
        self._late.end_backward()
        self._post_forward_order.clear()

    def reset(self) -> None:
        """Forget everything about an iteration that failed."""
        self._late.reset()
        self._ahead.clear()
        self._forward_so_far.clear()
        self._post_forward_order.clear()
