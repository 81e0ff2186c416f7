"""The schedule of all-gathers: execution order, and prefetch with a depth.

A *stage* holds the units that one wrapped module gathers at the same time (one for each dtype). Forward
gathers each stage when its module starts. If the CPU runs ahead of the device, these all-gathers overlap with
computation. Explicit prefetch issues the all-gathers of the next ``depth`` stages right after a stage's own.
A CPU device does not run asynchronously, so there the next stage is gathered ahead even without a ``depth``.
As on a device, one more unit is then unsharded.

Backward needs prefetch: without it the all-gather of a stage is issued after the reduce-scatter of the stage
before, and queues behind it in the same communicator. Backward is assumed to run stages in the reverse of the
order in which they finished forward, which is recorded in every iteration::

    forward    F1  F2  F3            recorded: 1 2 3
    pre        AG3 [AG2] B3 RS3 [AG1] B2 RS2 B1 RS1         gather i-1 before computing i
    post       AG3 B3 [AG2] RS3 B2 [AG1] RS2 B1 RS1         gather i-1 after computing i, before reducing it
    none       AG3 B3 RS3 AG2 B2 RS2 AG1 B1 RS1

``pre`` is delayed to the first gradient of the stage while the gradients of the stage before wait for their
copy-in, and in the first stage, while the loss is in memory (``LatePrefetch``).
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

# Maximum length of the recorded order of forwards without a backward; then the order is cleared.
_LONGEST_ORDER = 10_000


class Schedule:
    """Issues the gathers of a tree of stages and waits for them, in the order of its modules' calls."""

    def __init__(
        self, settings: ScheduleSettings, limiter: RateLimiter, lent: LentMemory, has_streams: bool
    ) -> None:
        self.settings = settings
        self._limiter = limiter
        # With streams, waiting queues a wait on the device. It comes first, because the next gather's memory
        # may depend on it. Without streams, waiting blocks the program, so prefetch comes first.
        self._prefetch_before_wait = not has_streams
        # Whether the last forward gathered ahead, so that stages that it skipped are still gathered.
        self.gathered_ahead = False
        self._forward_depth = settings.forward_prefetch_depth or 0
        self._gathers_beside = settings.forward_prefetch_depth is None and not has_streams
        # Stages that this forward gathered ahead without explicit prefetch.
        self._ahead: list[Stage] = []
        self._forward_order: list[Stage] = []
        self._forward_so_far: list[Stage] = []
        self._post_forward_order: list[Stage] = []
        self._order_before = 0
        self._late = LatePrefetch(lent, self._prefetch_backward)
        implicit = settings.memory_handover is MemoryHandover.EVENTS and not settings.forward_prefetch_depth
        self._holds = implicit and has_streams

    def forward_hold(self, stage: Stage) -> int:
        """Return how many freed buffers forward holds for one more stage: those of all units of ``stage``.
        Without explicit prefetch, the next gather is issued before this stage computes on the device, and
        must not wait for that computation.
        """
        return len(stage.units) if self._holds else 0

    # -- gathers ---------------------------------------------------------------------------------------------

    def gather(self, stage: Stage, *, for_backward: bool = False) -> None:
        """Issue the gathers of sharded and stale units; ``for_backward``, only if ``unshard_in_backward``."""
        for unit in stage.units:
            stale = unit.state in GATHERED and unit.is_stale()
            # Not in backward, where the graph has saved the gathered parameters and must read those.
            if stale and current_graph_task_id() == -1:
                unit.reshard()
            if unit.state in RESHARDED and (unit.unshard_in_backward or not for_backward):
                if self._limiter.limit and unit.gather.fetches:
                    self._limiter.wait(unit.labels.limiter_wait)
                unit.all_gather(for_backward=for_backward)

    @staticmethod
    def await_stage(stage: Stage, hold: int = 0) -> None:
        """Make the compute stream wait for a stage's parameters."""
        for unit in stage.units:
            unit.wait_all_gather(hold)

    # -- forward ---------------------------------------------------------------------------------------------

    def enter_forward(self, stage: Stage) -> None:
        """Gather the parameters of a stage whose forward starts, and prefetch the next stages."""
        self.gather(stage)
        if self._ahead and self._ahead[-1] is stage:
            del self._ahead[-1]  # Invariant: stages left at the end of forward were gathered but not used
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
        # Another order than in the last iteration is not an error; then there is no prefetch.
        order = self._forward_order
        if position >= len(order) or order[position] is not stage:
            return
        if self._forward_depth:
            self.gathered_ahead = True
            for target in order[position + 1 : position + 1 + self._forward_depth]:
                self.gather(target)
        elif self._gathers_beside and position + 1 < len(order):
            # On a device, the CPU would have run ahead and issued this gather by now.
            target = order[position + 1]
            if any(unit.gathers and unit.state in RESHARDED for unit in target.units):
                self._ahead.append(target)
                self.gather(target)

    def leave_forward(self, stage: Stage) -> None:
        """Record the order in which stages finish forward, for backward."""
        if stage.units:  # also without grad, because checkpointing may run a part of forward without grad
            stage.forward_positions.append(len(self._post_forward_order))
            self._post_forward_order.append(stage)

    def begin_forward(self) -> None:
        """Record where the outermost forward starts in the recorded order."""
        self._order_before = len(self._post_forward_order)

    def end_forward(self) -> None:
        """Free unused gathers and keep the order of this forward to predict the next one."""
        for stage in self._ahead:
            if not stage.unsharded_by_hand:
                stage.drop_unused_gather()
        self._ahead.clear()
        if self._forward_so_far:
            self._forward_order = self._forward_so_far
            self._forward_so_far = []
        if not torch.is_grad_enabled():  # all of forward ran without grad, so no backward follows
            for stage in reversed(self._post_forward_order[self._order_before :]):
                stage.forward_positions.pop()
            del self._post_forward_order[self._order_before :]
        if len(self._post_forward_order) > _LONGEST_ORDER:
            # The backward of these forwards may never run. The order is only used for prefetch; without it a
            # stage is gathered when it is needed.
            for stage in set(self._post_forward_order):
                stage.forward_positions.clear()
            self._post_forward_order.clear()

    # -- backward --------------------------------------------------------------------------------------------

    def enter_backward(self, stage: Stage) -> None:
        """Gather the parameters of a stage whose backward starts, and prefetch the next stages."""
        self.gather(stage, for_backward=True)
        # If a stage ran several times, backward visits its calls in reverse order.
        position = stage.forward_positions.pop() if stage.forward_positions else -1
        stage.backward_position = position
        early = stage.backward_targets or self.settings.backward_prefetch == "pre"
        if self._prefetch_before_wait:  # without streams, where copies are synchronous
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
        """Issue prefetches that wait for a stage's gradients. The gradients are about to be reduced."""
        if not self._prefetch_before_wait:
            self._late.after_gradients(stage)
        if self.settings.backward_prefetch == "post" and not stage.backward_targets:
            self._prefetch_backward(stage)

    def _prefetch_backward(self, stage: Stage) -> None:
        if stage.backward_targets:
            for target in stage.backward_targets:
                if target.forward_positions:  # its backward is to come; other shards may be written to
                    self.gather(target, for_backward=True)
            return
        position = stage.backward_position
        for ahead in range(1, self.settings.backward_prefetch_depth + 1):
            if position - ahead < 0:
                return
            target = self._post_forward_order[position - ahead]
            # Its backward may be over already, if this stage ends later than the order predicts.
            if position - ahead in target.forward_positions:
                self.gather(target, for_backward=True)

    def next_in_backward(self) -> list[Stage]:
        """Return the stages whose backward is still to come, in the order of backward."""
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


# Late prefetch: delay backward's prefetch to a stage's first gradient if memory is short before that.
#
# This applies while the gradients of the stage before wait for their copy-in: by the first gradient they are
# copied, and the gather reuses their memory. It also applies to the first stage: the loss and its gradient,
# often the peak of the step, are freed by then. On a device the gather starts no later if the CPU runs ahead.
#
# Which parameter gets the first gradient is not known in advance, and a hook on every parameter would cost
# one call for each. So all parameters have a hook once, and after that only the first one::
#
#     first backward     w1  w2  w3  norm      all have a hook; norm is first
#     later              norm                  if its gradient does not come, all get a hook again


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
        """Remove the hooks, so that all parameters get one next time: the expected gradient did not come."""
        self.expected = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class LatePrefetch:
    """Delays the prefetch of one stage at a time.

    Args:
        prefetch: issues the prefetches of a stage.
    """

    def __init__(self, lent: LentMemory, prefetch: Callable[[Stage], None]) -> None:
        self._lent = lent
        self._prefetch = prefetch
        # The stage that prefetches at its first gradient, until it does.
        self._stage: Stage | None = None
        self._first_gradients: dict[Stage, FirstGradient] = {}
        self._never: set[Stage] = set()
        # Whether backward has no gradient yet; only relevant if the compute stream lends inputs.
        self._starts = lent.lends_inputs

    def enter_backward(self, stage: Stage) -> None:
        """Prefetch for the delayed stage now if ``stage`` starts before its first gradient."""
        late = self._stage
        if late is not None and stage.backward_position < late.backward_position:
            # ``stage`` is inside ``late``, and more stages may follow before the first gradient of ``late``.
            self._never.add(late)
            self._prefetch_now(late)

    def puts_off(self, stage: Stage) -> bool:
        """Return whether ``stage`` should prefetch later, by ``put_off``."""
        # If another stage is delayed, this one contains it and gathers nothing new.
        if self._stage is not None or stage in self._never:
            return False
        return self._starts or self._lent.is_copying(_stages_held(stage))

    def put_off(self, stage: Stage) -> None:
        """Delay the prefetch to the first gradient of ``stage``, whose parameters are unsharded."""
        self._stage = stage
        first = self._first_gradients.get(stage)
        if first is None:
            first = self._first_gradients[stage] = FirstGradient(self._arrived)
        first.expect(parameter for unit in stage.units for parameter in unit.unsharded)

    def after_gradients(self, stage: Stage) -> None:
        """Prefetch now if no gradient of ``stage`` came."""
        self._starts = False
        if self._stage is stage:
            self._prefetch_now(stage)

    def end_backward(self) -> None:
        """Reset for the next backward, which starts from the loss."""
        self._starts = self._lent.lends_inputs

    def reset(self) -> None:
        """Drop the delayed prefetch after a failed iteration."""
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
    """Return of how many earlier stages the gradients may be kept while ``stage`` is in backward."""
    return max(unit.gradients.held for unit in stage.units) - 1
