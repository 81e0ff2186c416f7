"""One iteration of a tree of stages: forward, backward, and recovery after an exception.

The tree is built when its outermost module first runs forward or is unsharded by hand. Only then is it known
which module is the root and which stages it contains (``ModuleHooks``).
"""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch

from ..collectives.agreement import OrderCheck, RankCheck, without
from ..shared import error_text
from ..shared.settings import ScheduleSettings
from ..shared.torch_internals import INTERNALS, queue_callback
from .buffer import keep_freed_pages
from .context import NOTHING, Context, span
from .gradient_state import any_gradient
from .presentation import Unreduced, count_steps
from .reduction import Reducer, call_hooks, keep_gradients, take_gradients
from .schedule import Schedule
from .stage import Stage, StageState
from .streams import Event, Streams
from .unit import GATHERED, OUTPUTS_NEEDED, Unit, UnitState

_log = logging.getLogger(__name__)
_COMPILED_AUTOGRAD = INTERNALS["compiled_autograd"].path

# Unsharded units in memory during backward: two units' parameters, two units' gradients, and two in flight.
_UNITS_KEPT = 6


class Runtime:
    """Runs the iterations of a tree of stages. ``root`` is the stage of the outermost module."""

    def __init__(self, root: Stage, stages: list[Stage], settings: ScheduleSettings) -> None:
        self.root = root
        self.stages = stages
        streams = root.streams if root.streams is not None else Streams(root.device)
        self.context = Context(streams, settings)
        units = [unit for stage in stages for unit in stage.units]
        if not streams.has_streams:
            keep_freed_pages(_bytes_of_steps(units))
        self.reducer = Reducer(streams, settings.memory_handover)
        self.schedule = Schedule(settings, self.context.limiter, self.reducer.lent, streams.has_streams)
        self.order_check = OrderCheck() if OrderCheck.is_asked_for() else None
        count_steps(unit.presentation for unit in units)
        # The stage of the outermost running forward. Not the root if a part of the model runs alone.
        self.forward_root: Stage | None = None
        self.is_last_backward = True
        # An event that the user recorded after the optimizer. Gathers wait for it, not for all computation.
        self.optimizer_event: Event | None = None
        # Units that show gradients of ``no_sync()``.
        self._unreduced: list[tuple[Unreduced, Unit]] = []
        # Whether a forward ran; until then the tree may become part of a larger one.
        self.ran = False
        # Whether a backward is running and has queued the callback for its end.
        self.callback_queued = False
        self._callback: Any = None

    # -- forward ---------------------------------------------------------------------------------------------

    def begin_forward(self, stage: Stage) -> None:
        """Begin the outermost forward. Gathers must see the writes of the optimizer."""
        if len(self.root.modules) > 1:
            _ = self.root.root_module  # raises: several modules wrapped as one cannot be a root
        self.forward_root = stage
        self.ran = True
        self.schedule.begin_forward()
        self._drop_what_changed()
        if self.schedule.gathered_ahead:
            self._drop_what_was_skipped()
        event, self.optimizer_event = self.optimizer_event, None
        self.context.let_gathers_wait(event)

    def _drop_what_changed(self) -> None:
        """Reshard stale parameters; update ``requires_grad`` of those that stay unsharded."""
        for stage in self.stages:
            for unit in stage.units:
                # Invariant: no forward reads parameters that were gathered before a write to their shard
                # (tests/impl/values, mutant "no drop of what changed").
                if unit.state is UnitState.SHARDED:
                    continue
                if unit.is_stale() or unit.presentation.changed():
                    unit.reshard()
                else:
                    unit.presentation.follow_freezing()

    def _drop_what_was_skipped(self) -> None:
        """Drop stages that the last forward gathered ahead but did not run: their values may have changed."""
        self.schedule.gathered_ahead = False
        for stage in self.stages:
            if not stage.unsharded_by_hand:
                stage.drop_unused_gather()
            stage.unsharded_by_hand = False

    def end_forward(self) -> None:
        """End the outermost forward."""
        if self.order_check is not None:
            self.order_check.leave()
        self.forward_root = None
        self.context.handover.trim()
        self.schedule.end_forward()
        if not torch.is_grad_enabled():
            # No backward will use the parameters that this forward left unsharded; shards may change next.
            for stage in self.stages:
                stage.drop_without_grad()
            self.context.await_host_read()

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Queue the callback for the end of this backward pass, when the first stage's backward starts."""
        if of_compiled_autograd("in_compiled_autograd_region"):
            refuse_compiled_autograd()
        self.callback_queued = True
        callback = partial(self._end_backward)
        self._callback = ref(callback, self._backward_dropped)
        queue_callback(callback)
        self._take_back_unreduced()
        if self.context.gathers_wait:
            # No forward since the last backward, or a unit was resharded by hand: shards may have changed.
            self.context.let_gathers_wait()

    def post_backward(self, stage: Stage) -> None:
        """Free the parameters of ``stage``, whose gradients are complete, and reduce the gradients."""
        stage.state = StageState.REDUCED
        if not stage.units:
            return
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING:  # with create_graph
            self._reduce_stage(stage)

    def _reduce_stage(self, stage: Stage) -> None:
        with span(stage.units[0].labels.post_backward):
            ready: list[tuple[Unit, tuple[int, ...], list[torch.Tensor]]] = []
            partial: list[Unit] = []
            # All ranks have the same order of units, so they issue collectives in the same order.
            for unit in reversed(stage.units):
                flat = unit.presentation.flat_param
                hooks = flat._backward_hooks if flat is not None else None
                if unit.gradients.synchronize:
                    which, gradients = take_gradients(unit)
                    if which:
                        if hooks:
                            which, gradients = call_hooks(unit, [*hooks.values()], which, gradients)
                        unit.presentation.had_gradients = True
                        ready.append((unit, which, gradients))
                    elif unit.gradients.partial is not None and unit.gradients.all_reduce:
                        partial.append(unit)
                elif hooks:
                    raise RuntimeError(error_text("tree.hooks_unreduced", unit.name))
                else:
                    keep_gradients(unit)
                if unit.reshard_after_backward:
                    unit.reshard()
                else:
                    unit.hide()
            # Before the reductions: a communicator runs calls in order, and the next gather is more urgent.
            self.schedule.after_gradients(stage)
            for unit in partial:
                self.reducer.reduce_partial(unit)
            if ready and self.context.streams.has_streams:
                self.reducer.begin_stage([unit for unit, _, _ in ready])
            for unit, which, gradients in ready:
                if self.context.rank_check is not None:
                    _check_reduction(self.context.rank_check, unit, which)
                self.reducer.reduce(unit, which, gradients)

    def _finish_backward(self, stage: Stage) -> None:
        """Run the missing post-backward of ``stage`` after the whole backward, and end its backward."""
        # Parameters that are used outside of their module may get gradients after the post-backward.
        late = False
        for unit in stage.units:
            late |= unit.gradients.synchronize and any_gradient(unit.unsharded)
        if stage.state is not StageState.REDUCED or late:
            if not stage.in_backward:
                stage.check_entered(only_late=True)
            self.post_backward(stage)
        for unit in stage.units:
            state = unit.gradients
            state.held_back = not state.synchronize or state.partial is not None
            if not state.synchronize:
                self._show_unreduced(unit)
        stage.end_backward()

    def _end_backward(self) -> None:
        self.forward_root = None
        for stage in self.stages:
            self._finish_backward(stage)
        self.reducer.finish()
        if self.reducer.in_flight:
            unit = self.reducer.in_flight[0].unit
            raise RuntimeError(f"backward ended without waiting for gradients of unit '{unit.name}'")
        self.callback_queued = False
        self.context.await_host_read()
        if self.is_last_backward:
            # The optimizer runs next, perhaps before another pass over the same graph.
            self.context.gathers_wait = True
            self.context.handover.trim()
            self.schedule.end_backward()
            self.context.limiter.end_iteration()
            if self.order_check is not None:
                self.order_check.end_iteration()
            if self.context.rank_check is not None:
                self.context.rank_check.end_iteration()
            for stage in self.stages:
                stage.forward_positions.clear()
                stage.drop_unused_gather()

    def _backward_dropped(self, _: object) -> None:
        """Warn with the unit at which backward failed: autograd drops the callback and names no unit."""
        if not self.callback_queued:
            return
        entered = [stage for stage in self.stages if stage.state is StageState.BACKWARD]
        waiting = [s for s in entered if any(unit.state not in GATHERED for unit in s.units)]
        if waiting := waiting or self.schedule.next_in_backward():
            _log.warning(error_text("tree.backward_dropped", waiting[0].name, OUTPUTS_NEEDED))

    @torch.no_grad()
    def _show_unreduced(self, unit: Unit) -> None:
        """Show the gradients that ``unit`` keeps for a later backward, if its front end supports that."""
        unreduced = unit.presentation.unreduced
        if unreduced is not None:
            unreduced.show(unit)
            if unreduced.shown:
                self._unreduced.append((unreduced, unit))

    @torch.no_grad()
    def _take_back_unreduced(self) -> None:
        for unreduced, unit in self._unreduced:
            unreduced.take_back(unit)
        self._unreduced.clear()

    # -- errors ----------------------------------------------------------------------------------------------

    def drop_failed_iteration(self, stage: Stage) -> None:
        """Drop an earlier iteration that did not finish, when a forward of ``stage`` starts outside backward.

        A backward calls back at its end, and the root's forward ends when it returns. If neither happened,
        there was an exception. Training continues with sharded parameters as if that iteration had not
        started. Gradients that were accumulated without communication before it stay.

        Raises:
            RuntimeError: the failed backward was adding to such gradients, so their earlier values are lost;
                they are dropped.
        """
        failed = self.callback_queued or stage.state in (StageState.BACKWARD, StageState.REDUCED)
        if failed or (self.forward_root is stage and len(stage.modules) == 1):
            at = next((each for each in self.stages if each.in_backward), stage)
            _log.warning(
                "the iteration before did not finish (an exception?): FSDP drops it, unit '%s'", at.name
            )
            spoilt = self._spoilt_units()
            self.reset()
            if spoilt:
                raise RuntimeError(error_text("tree.drop_failed_iteration", spoilt[0]))

    def _spoilt_units(self) -> list[str]:
        """Return the names of units whose accumulated gradients include a part of a failed backward."""
        return [
            unit.name
            for stage in self.stages
            if stage.in_backward
            for unit in stage.units
            if unit.gradients.held_back
        ]

    def disband(self) -> None:
        """Release all stages. This tree was built by an unshard by hand before the first forward."""
        self.reset()
        for stage in self.stages:
            stage.leave()

    def reset(self) -> None:
        """Reset after an exception: wait for work in flight, drop the iteration, show sharded parameters.

        Unreduced gradients of earlier passes stay, unless the failed backward added to some of them.
        """
        keep, failed_backward = not self._spoilt_units(), self.callback_queued
        self.callback_queued = False
        self.forward_root = None
        self.reducer.discard()
        for stage in self.stages:
            stage.reset(keep=keep)
            for unit in stage.units if failed_backward else ():
                if unit.gradients.held_back:
                    self._show_unreduced(unit)
        self.context.await_host_read()
        self.context.handover.trim()
        self.schedule.reset()


def of_compiled_autograd(state: str) -> bool:
    """Return a flag of compiled autograd; False if not imported, because importing it takes 0.25 s."""
    return getattr(sys.modules.get(_COMPILED_AUTOGRAD), state, False)


def refuse_compiled_autograd(*_: Any) -> NoReturn:
    """Raise RuntimeError: compiled autograd reads saved tensors before any hook gathers parameters."""
    raise RuntimeError(error_text("tree.refuse_compiled_autograd"))


def _check_reduction(check: RankCheck, unit: Unit, which: tuple[int, ...]) -> None:
    """Check that all ranks are about to reduce this unit, with gradients of the same parameters."""
    missing = [p.fqn for i, p in enumerate(unit.parameters) if p.requires_grad and i not in which]
    for group in (unit.groups.shard, unit.groups.replicate):
        check.agree(group, f"reduction of unit '{unit.name}'" + without(missing))


def _bytes_of_steps(units: Sequence[Unit]) -> int:
    """Estimate the bytes that a step allocates and frees: reduced gradients, and a few unsharded units."""
    whole = [unit.layout.full_numel * unit.precision.compute.itemsize for unit in units]
    return sum(unit.shard.nbytes for unit in units) + _UNITS_KEPT * max(whole, default=0)
