"""When all-gathers are issued: execution order, and prefetch with a depth.

A *stage* is what one wrapped module gathers at the same time (one unit, or one for each dtype). Forward
gathers each stage when its module starts; where the CPU runs ahead of the device this overlaps by itself.
Explicit prefetch issues the all-gathers of the next ``depth`` stages right after a stage's own. On the CPU,
which runs ahead of nothing, the next stage's is issued there without a ``depth`` too: a unit more is
gathered, as on a device.

Backward needs prefetch: without it the all-gather of a stage is issued after the reduce-scatter of the stage
before, and the two queue behind each other in one communicator. The order of backward is assumed to be the
reverse of the order in which stages finished forward, recorded in every iteration::

    forward    F1  F2  F3            recorded: 1 2 3
    pre        AG3 [AG2] B3 RS3 [AG1] B2 RS2 B1 RS1         gather i-1 before computing i
    post       AG3 B3 [AG2] RS3 B2 [AG1] RS2 B1 RS1         gather i-1 after computing i, before reducing it
    none       AG3 B3 RS3 AG2 B2 RS2 AG1 B1 RS1

While gradients of the stage before are kept until they are copied, and beside the loss, ``pre`` waits for the
first gradient of the stage (``LatePrefetch``).
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..shared.settings import MemoryHandover, ScheduleSettings
from ..shared.torch_internals import current_graph_task_id
from .context import RateLimiter
from .lent import LentMemory
from .stage import Stage
from .unit import GATHERED, RESHARDED

# Stages in the recorded order of forwards that still await their backward, before it is forgotten.
_LONGEST_ORDER = 10_000


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
        # Whether the last forward gathered ahead: what it then skipped is still gathered.
        self.gathered_ahead = False
        self._forward_depth = settings.forward_prefetch_depth or 0
        self._gathers_beside = settings.forward_prefetch_depth is None and not has_streams
        # Stages of this forward that were gathered ahead without a setting that says so.
        self._ahead: list[Stage] = []
        self._forward_order: list[Stage] = []
        self._forward_so_far: list[Stage] = []
        self._post_forward_order: list[Stage] = []
        self._order_before = 0
        self._late = LatePrefetch(lent, self._prefetch_backward)
        implicit = settings.memory_handover is MemoryHandover.EVENTS and not settings.forward_prefetch_depth
        self._holds = implicit and has_streams

    def forward_hold(self, stage: Stage) -> int:
        """Return freed buffers that stay for one more turn in forward, those of all units of ``stage``:
        without explicit prefetch the next gather is issued before this stage computes on the device, and must
        not wait for it.
        """
        return len(stage.units) if self._holds else 0

    # -- gathers ---------------------------------------------------------------------------------------------

    def gather(self, stage: Stage, *, for_backward: bool = False) -> None:
        """Issue the gathers of a stage that is sharded or was written to, as needed ``for_backward``."""
        for unit in stage.units:
            stale = unit.state in GATHERED and unit.is_stale()
            # Not in backward: a graph has saved what was gathered, and is right with that alone.
            if stale and current_graph_task_id() == -1:
                unit.reshard()
            if unit.state in RESHARDED and (unit.unshard_in_backward or not for_backward):
                if self._limiter.limit and unit.gather.fetches:
                    self._limiter.wait(unit.labels.limiter_wait)
                unit.all_gather(for_backward=for_backward)

    @staticmethod
    def await_stage(stage: Stage, hold: int = 0) -> None:
        """Make computation wait for a stage's parameters."""
        for unit in stage.units:
            unit.wait_all_gather(hold)

    # -- forward ---------------------------------------------------------------------------------------------

    def enter_forward(self, stage: Stage) -> None:
        """Gather the parameters of a stage whose forward starts, and prefetch those of the next."""
        self.gather(stage)
        if self._ahead and self._ahead[-1] is stage:
            del self._ahead[-1]  # Invariant: what is left at the end of forward was gathered for nothing
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
            # As a CPU that runs ahead of its device would have by now.
            target = order[position + 1]
            if any(unit.gathers and unit.state in RESHARDED for unit in target.units):
                self._ahead.append(target)
                self.gather(target)

    def leave_forward(self, stage: Stage) -> None:
        """Remember the order of stages whose forward is done, for the backward that they may have."""
        if stage.units:  # also without grad: checkpointing may run a part of the forward so
            stage.forward_positions.append(len(self._post_forward_order))
            self._post_forward_order.append(stage)

    def begin_forward(self) -> None:
        """Note where the outermost forward starts in the recorded order."""
        self._order_before = len(self._post_forward_order)

    def end_forward(self) -> None:
        """Keep the order of the root's forward, which predicts the next one's."""
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
        """Gather the parameters of a stage whose backward starts, and prefetch those of the next."""
        self.gather(stage, for_backward=True)
        # A stage that ran several times comes back in the reverse order of its calls.
        position = stage.forward_positions.pop() if stage.forward_positions else -1
        stage.backward_position = position
        early = stage.backward_targets or self.settings.backward_prefetch == "pre"
        if self._prefetch_before_wait:  # without streams, where a copy is done when it is made
            if early:
                self._prefetch_backward(stage)
            self.await_stage(stage)
            return
        self._late.enter_backward(stage)
        self.await_stage(stage)
        if early and self._late.puts_off(stage):
            self._late.put_off(stage)
        elif early:
            self._prefetch_backward(stage)

    def after_gradients(self, stage: Stage) -> None:
        """Prefetch what waits for a stage's gradients, which are about to be reduced."""
        if not self._prefetch_before_wait:
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
        """Return the stages whose backward is to come, in the recorded order."""
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


# Backward's prefetch, put off to a stage's first gradient where memory is short until then.
#
# While gradients of the stage before are copied: they are copied by then, and the gather takes their place.
# And in the first stage: the loss and its gradient, often the peak of the step, are not there any more. On a
# device this is no later, as long as the CPU runs ahead.
#
# Where backward begins in a stage is not known beforehand, and a hook on each parameter would be a call each.
# So all parameters are asked once, and later the one alone that was first::
#
#     first backward     w1  w2  w3  norm      all have a hook; norm is first
#     later              norm                  until it does not come: then all are asked again


class FirstGradient:
    """Calls ``arrived`` at the first gradient after ``expect``, once."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self.expected = False

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Expect a gradient of one of these ``parameters``, as a backward starts."""
        self.expected = True
        if not self._hooks:
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                    self._hooks[parameter] = hook

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self.expected:
            return
        self.expected = False
        if len(self._hooks) > 1:
            own = self._hooks.pop(parameter)
            self.miss()
            self._hooks[parameter] = own
        self._arrived()

    def miss(self) -> None:
        """Ask all parameters next time: none came, or the one that is asked is no longer the first."""
        self.expected = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class LatePrefetch:
    """Puts off the prefetch of one stage at a time.

    Args:
        prefetch: issues what a stage prefetches.
    """

    def __init__(self, lent: LentMemory, prefetch: Callable[[Stage], None]) -> None:
        self._lent = lent
        self._prefetch = prefetch
        # The stage that prefetches at its first gradient, until it does.
        self._stage: Stage | None = None
        self._first_gradients: dict[Stage, FirstGradient] = {}
        self._never: set[Stage] = set()
        # Whether backward has no gradient yet, and memory is handed over such that it depends on this.
        self._starts = lent.lends_inputs

    def enter_backward(self, stage: Stage) -> None:
        """Prefetch for the stage that is awaited, if ``stage`` comes before its first gradient."""
        late = self._stage
        if late is not None and stage.backward_position < late.backward_position:
            # It comes before that one's first gradient: it is inside, and there may be more.
            self._never.add(late)
            self._prefetch_now(late)

    def puts_off(self, stage: Stage) -> bool:
        """Return whether ``stage`` should prefetch later: then ``put_off``."""
        # Where another stage is awaited, this one is around it and gathers nothing new.
        if self._stage is not None or stage in self._never:
            return False
        return self._starts or self._lent.is_copying(_stages_held(stage))

    def put_off(self, stage: Stage) -> None:
        """Prefetch at the first gradient of ``stage``, whose parameters are there."""
        self._stage = stage
        first = self._first_gradients.get(stage)
        if first is None:
            first = self._first_gradients[stage] = FirstGradient(self._arrived)
        first.expect(parameter for unit in stage.units for parameter in unit.unsharded)

    def after_gradients(self, stage: Stage) -> None:
        """Prefetch now, where no gradient of ``stage`` came."""
        self._starts = False
        if self._stage is stage:
            self._prefetch_now(stage)

    def end_backward(self) -> None:
        """Begin with the loss again in the next backward."""
        self._starts = self._lent.lends_inputs

    def reset(self) -> None:
        """Forget what is awaited, as the iteration failed."""
        self.end_backward()
        if self._stage is not None:
            self._first_gradients[self._stage].miss()
            self._stage = None

    def _arrived(self) -> None:
        stage, self._stage = self._stage, None
        self._starts = False
        assert stage is not None
        self._lent.take_back_copied(_stages_held(stage))
        self._prefetch(stage)

    def _prefetch_now(self, stage: Stage) -> None:
        self._first_gradients[stage].miss()
        self._stage = None
        self._prefetch(stage)


def _stages_held(stage: Stage) -> int:
    """Return how many stages' gradients may stay kept while this one is in backward."""
    return max(unit.gradients.held for unit in stage.units) - 1
