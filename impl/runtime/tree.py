"""What the units of one tree share: lanes, memory handover, schedule, reduction, and the life of an
iteration.

The tree is found when its outermost module first runs forward (or unshards): only then is it known which
module is the root and which stages it holds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from ..collectives.rank_check import RankCheck
from ..shared.settings import ScheduleSettings
from .buffer import Handover
from .order_check import order_check
from .reduction import Reducer
from .schedule import RateLimiter, Schedule
from .streams import Lanes
from .unit import Unit, UnitState

if TYPE_CHECKING:
    from .stage import Stage
    from .streams import Mark

_log = logging.getLogger(__name__)

# Wrappers that rename the modules inside them; units are named as the user knows them.
_WRAPPER_NAMES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers put into it."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


class Runtime:
    """The shared state of a tree of stages; ``root`` is the stage whose module runs forward first."""

    def __init__(self, root: Stage, stages: list[Stage], settings: ScheduleSettings) -> None:
        self.root = root
        self.stages = stages
        self.settings = settings
        self.lanes = root.lanes if root.lanes is not None else Lanes(root.device)
        self.handover = Handover(settings.memory_handover)
        self.limiter = RateLimiter(
            settings.limit_all_gathers, self.lanes.count_retries if settings.adapt_limit else None
        )
        self.schedule = Schedule(settings, self.limiter, self.lanes.has_streams)
        self.reducer = Reducer(self.lanes, settings.memory_handover)
        self.order_check = order_check(stages)
        self.forward_root: Stage | None = None
        """The stage whose forward is the outermost one running now; not the root where a part runs alone."""
        self.is_last_backward = True
        self.optimizer_mark: Mark | None = None
        """An event that the user recorded after the optimizer, for gathers to wait on instead of
        everything.
        """
        self._gathers_wait = True
        """Whether shards may have been written since gathers last waited for computation."""
        self.host_read: Mark | None = None
        """With CPU offload: when the last copy out of a shard on the host is done."""
        self.rank_check: RankCheck | None = None
        if settings.check_ranks:
            self.rank_check = RankCheck(None if settings.check_ranks is True else settings.check_ranks)
        self._unreduced: list[Unit] = []
        """Units that show gradients of ``no_sync()``."""
        self.ran = False
        """Whether a forward ran; before that the tree may become part of a larger one."""
        self._callback_queued = False

    # -- forward ---------------------------------------------------------------------------------------------

    def begin_forward(self, stage: Stage) -> None:
        """The outermost forward starts: gathers must see what the optimizer wrote."""
        if len(self.root.modules) > 1:
            _ = self.root.root_module  # which tells that these modules are no root
        self.forward_root = stage
        self.ran = True
        self.schedule.begin_forward()
        self._drop_what_changed()
        if self.schedule.gathered_ahead:
            self._drop_what_was_skipped()
        mark, self.optimizer_mark = self.optimizer_mark, None
        self.let_gathers_wait(mark)

    def _drop_what_changed(self) -> None:
        """Drop parameters that an earlier forward left gathered, where the shards were written to since."""
        for stage in self.stages:
            for unit in stage.units:
                if unit.state is UnitState.UNSHARDED and unit.presentation.changed():
                    unit.reshard()

    def _drop_what_was_skipped(self) -> None:
        """Drop what the forward before gathered ahead and did not come to: values may have changed since."""
        self.schedule.gathered_ahead = False
        for stage in self.stages:
            if not stage.unsharded_by_hand:
                stage.drop_unused_gather()
            stage.unsharded_by_hand = False

    def let_gathers_wait(self, mark: Mark | None = None) -> None:
        """Let later gathers start only after ``mark``, by default after all that computation was given so
        far, which may have written to shards.
        """
        lanes = self.lanes
        if mark is None:
            mark = lanes.compute.record()
        lanes.cast.wait(mark)
        lanes.gather.wait(mark)
        self._gathers_wait = False

    def shards_may_change(self) -> None:
        """Somebody outside is about to write to shards, on the device or on the host."""
        self._gathers_wait = True
        self.await_host_read()

    def end_forward(self) -> None:
        """The outermost forward is done."""
        if self.order_check is not None:
            self.order_check.leave()
        self.forward_root = None
        self.handover.trim()
        self.schedule.end_forward()
        if not torch.is_grad_enabled():
            self._drop_without_grad()
            self.await_host_read()

    def _drop_without_grad(self) -> None:
        """No backward will use what this forward left gathered, and values may be changed in any way next."""
        for stage in self.stages:
            for unit in stage.units:
                if not unit.kept_without_grad and unit.state is UnitState.UNSHARDED:
                    unit.reshard()

    def await_host_read(self) -> None:
        """The user may write to shards on the host now: copies out of them have to be done."""
        if self.host_read is not None:
            self.host_read.synchronize()
            self.host_read = None

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Some stage's backward starts: have the end of this backward pass call back, once."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._end_backward)
            self._take_back_unreduced()
            if self._gathers_wait:
                self.let_gathers_wait()

    def _end_backward(self) -> None:
        self._callback_queued = False
        self.forward_root = None
        for stage in self.stages:
            stage.finish_backward()
        self.reducer.finish()
        self.await_host_read()
        if self.is_last_backward:
            self._gathers_wait = True  # the optimizer comes, perhaps before another pass over the same graph
            self.handover.trim()
            self.schedule.end_backward()
            self.limiter.end_iteration()
            if self.order_check is not None:
                self.order_check.end_iteration()
            if self.rank_check is not None:
                self.rank_check.end_iteration()
            for stage in self.stages:
                stage.forward_positions.clear()
                stage.drop_unused_gather()

    @torch.no_grad()
    def show_unreduced(self, unit: Unit) -> None:
        """Backward ended: let ``unit`` show the gradients that it keeps for a later one."""
        unreduced = unit.presentation.unreduced
        assert unreduced is not None
        unreduced.show(unit)
        if unreduced.shown:
            self._unreduced.append(unit)

    @torch.no_grad()
    def _take_back_unreduced(self) -> None:
        for unit in self._unreduced:
            unreduced = unit.presentation.unreduced
            assert unreduced is not None
            unreduced.take_back(unit)
        self._unreduced.clear()

    # -- errors ----------------------------------------------------------------------------------------------

    def drop_failed_iteration(self, stage: Stage) -> None:
        """A forward of ``stage`` starts, outside of backward: if an earlier iteration never ended, drop it.

        A backward that ran calls back at its end, and a root's forward that returned is over; where neither
        happened there was an exception. Training goes on with sharded parameters as if that iteration had not
        been. What was accumulated without communication before it stays.

        Raises:
            RuntimeError: the failed backward was adding to such gradients, so that nobody can tell any more
                what they were; they are dropped.
        """
        if self._callback_queued or (self.forward_root is stage and len(stage.modules) == 1):
            _log.warning("the iteration before did not finish (was there an exception?): FSDP drops it")
            spoilt = self._spoilt_units()
            self.reset()
            if spoilt:
                raise RuntimeError(
                    "the backward before failed while it added to gradients that were accumulated without "
                    f"communication (unit '{spoilt[0]}'): they are dropped. Zero the gradients and "
                    "accumulate anew; reset_iter_state() after the exception says that you do"
                )

    def _spoilt_units(self) -> list[str]:
        """Units whose accumulated gradients hold a part of what a failed backward computed."""
        return [
            unit.name
            for stage in self.stages
            if stage.in_backward
            for unit in stage.units
            if unit.gradients.held_back
        ]

    def disband(self) -> None:
        """Set all stages free: one was unsharded by hand before the first forward told what the tree is."""
        self.reset()
        for stage in self.stages:
            stage.leave()

    def reset(self) -> None:
        """After an exception inside an iteration: wait for what runs, forget it, show sharded parameters
        again.

        Gradients that passes before it left unreduced stay; if some of them were added to, none do.
        """
        keep, failed_backward = not self._spoilt_units(), self._callback_queued
        self._callback_queued = False
        self.forward_root = None
        self.reducer.discard()
        for stage in self.stages:
            stage.reset(keep=keep)
            for unit in stage.units if failed_backward else ():
                if unit.gradients.held_back and unit.presentation.unreduced is not None:
                    self.show_unreduced(unit)
        self.await_host_read()
        self.handover.trim()
        self.schedule.reset()


def build_runtime(root: Stage, settings: ScheduleSettings) -> Runtime:
    """Find the stages below ``root``'s module, name their units, and join them in one runtime.

    Raises:
        RuntimeError: a stage inside already ran as a root of its own.
        ValueError: units on different devices.
    """
    from .stage import stage_of

    stages: list[Stage] = []
    names: dict[Stage, list[str]] = {}
    for module_name, module in root.root_module.named_modules():
        stage = stage_of(module)
        if stage is None:
            continue
        name = clean_name(module_name) or "root"
        if stage not in names:
            if stage.has_runtime and not stage.runtime.ran:
                stage.runtime.disband()
            if stage.has_runtime:
                raise stage.error_of_second_root(
                    f"module '{name}' already ran forward as a root of its own; run the outermost module's "
                    "forward first, so that its parts belong to one tree"
                )
            if stage.device != root.device:
                raise ValueError(
                    f"unit '{name}' is on {stage.device} but the root's device is {root.device}; "
                    "all units of a tree share one device"
                )
            stages.append(stage)
        names.setdefault(stage, []).append(name)
    runtime = Runtime(root, stages, settings)
    try:
        for stage in stages:
            stage.join(runtime, ", ".join(names[stage]))
    except BaseException:
        for stage in stages:
            stage.leave()  # none of them is half in a tree: the user may mend what was wrong
        raise
    return runtime


def in_backward() -> bool:
    """Whether this code runs inside a backward pass (as a recomputed forward does)."""
    return torch._C._current_graph_task_id() != -1
