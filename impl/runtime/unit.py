"""One FSDP unit: parameters that are gathered and freed together, and the states that it moves through.

::

              all_gather()            wait_all_gather()             hide()
    SHARDED ---------------> GATHERING ---------------> UNSHARDED ---------> HIDDEN
      ^  ^                       |   ^                    |   ^                | |
      |  +-----------------------+   |  all_gather()      |   +----------------+ |
      |            reshard()       KEPT <-----------------+    wait_all_gather() |
      +------------------------------+  reshard_in_forward()                     |
      +--------------------------------------------------------------------------+

The persistent parts are the flat local ``shard`` (the sharded parameters are views of it, so gathering needs
no copy-in) and the unsharded parameters: leaf ``nn.Parameter`` objects over a buffer whose memory comes and
goes. Both sets exist once; showing one or the other in the modules is a few dictionary assignments. How the
one comes from the other is the unit's ``gather`` (``gather.py``); how both look, its ``presentation``.

Everything that writes parameter memory goes through the buffer's own tensor, so to autograd, whose check of
saved tensors compares versions, gathering the same values again changes nothing. A unit moves its parameters'
versions on by itself: until a gather has been waited for, so that backward refuses to read before that, and
for good where the shard was written to since the gather before.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NoReturn

import torch
from torch import nn

from ..collectives import comm
from ..shared import error_text
from ..shared.layout import UnitLayout
from ..shared.settings import UnitPrecision
from ..shared.torch_internals import increment_version, set_versions
from .buffer import HostOffload
from .context import Context, UnitLabels, span
from .gather import MakeGather, Sharded, choose_gather
from .gradient_state import GradientState
from .presentation import VERSION, Presentation, UnitParameter

_NEXT = (1).__add__

# How autograd comes to each unit through its pre-backward hook.
OUTPUTS_NEEDED = (
    "The hook is on what forward returns: return every tensor that the loss needs, store none aside"
)


class UnitState(Enum):
    """Where a unit's parameters are; the module's head shows the transitions."""

    SHARDED = auto()
    # Sharded, and a larger shard is kept for backward (``smaller_group.py``).
    KEPT = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    # Gathered, while the modules show the sharded parameters.
    HIDDEN = auto()


# States in which the parameters have to be gathered before they are used.
RESHARDED = (UnitState.SHARDED, UnitState.KEPT)
# States in which they are there.
GATHERED = (UnitState.UNSHARDED, UnitState.HIDDEN)


class Unit:
    """A state machine around one gather and one presentation.

    Args:
        name: in messages, until the unit's place in the tree is known.
        layout: where everything is in the buffers.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        device: what is computed on; the shard is there too unless it is offloaded.
        reshard_after_forward: whether forward frees the parameters; ``None`` means yes, unless it is the
            root.
        offload: how the shard is kept on the host, ``None`` if it is not.
        make_gather: makes the gather, also after one of the things that it depends on changed.
    """

    def __init__(
        self,
        *,
        name: str,
        parameters: Sequence[UnitParameter],
        layout: UnitLayout,
        shard: torch.Tensor,
        groups: comm.UnitGroups,
        precision: UnitPrecision,
        device: torch.device,
        reshard_after_forward: bool | None,
        presentation: Presentation,
        offload: HostOffload | None = None,
        make_gather: MakeGather = choose_gather,
    ) -> None:
        self.name = name
        self.labels = UnitLabels(name)
        self.parameters = list(parameters)
        self.layout = layout
        self.groups = groups
        # Whether unsharding needs a collective.
        self.gathers = groups.shard is not None
        self.reshard_after_forward = reshard_after_forward
        # Whether forward may keep a larger shard (``smaller_group.py``).
        self.keeps_part = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.presentation = presentation
        self.gradients = GradientState()
        self.state = UnitState.SHARDED
        self.unsharded: list[nn.Parameter] = []
        # What ``presentation.writes`` and ``presentation.steps`` were when the shard was gathered last.
        self.gathered_writes = self.gathered_steps = 0
        self._versions: list[int] = []
        self._context: Context | None = None
        self._make_gather = make_gather
        self._use(Sharded(layout, shard, groups, precision, device, offload))
        # Whether all parameters are plain tensors while they are gathered.
        self.plain = self.gather.makes_views and all(each.whole is None for each in parameters)

    # -- set up ----------------------------------------------------------------------------------------------

    def _use(self, sharded: Sharded) -> None:
        self.gather = self._make_gather(sharded)
        self.shard, self.device = sharded.shard, sharded.device
        self.precision, self.offload = sharded.precision, sharded.offload

    def _not_run(self) -> NoReturn:
        raise RuntimeError(error_text("unit.not_run", self.name))

    def join(self, context: Context, name: str) -> None:
        """Become part of a tree of units; ``name`` is the unit's module in its root."""
        self._context = context
        self.name = name
        self.labels = UnitLabels(name)

    @torch.inference_mode(False)  # the first forward may be in it, and the shard is trained later
    def readopt(self) -> None:
        """Take up the sharded parameters as the modules hold them now; a new shard means new buffers."""
        shard = self.presentation.readopt()
        if shard is None:
            return
        self._check_sharded("its parameters are replaced")
        device = self.device if self.offload is not None else shard.device
        precision = self.precision.for_original(shard.dtype)
        self._use(replace(self.gather.sharded, shard=shard, device=device, precision=precision))
        self._forget_parameters()

    def leave(self) -> None:
        """Leave a tree that never ran, to be part of another one; buffers belong to a tree's streams."""
        self.reshard()
        self._use(self.gather.sharded)
        self._forget_parameters()
        self._context = None

    def _forget_parameters(self) -> None:
        self.unsharded = []
        self._versions = []

    def use_all_gather(self, custom: comm.AllGather | None) -> None:
        """Gather with ``custom`` from now on, or as usual again. Raises RuntimeError while unsharded."""
        if self.state is UnitState.KEPT:
            self.reshard()  # what is kept is the old gather's
        self._check_sharded("the all-gather is replaced")
        before = self.gather
        self._use(replace(before.sharded, custom=custom))
        if not self.gather.take_over(before):
            self._forget_parameters()

    def _check_sharded(self, before: str) -> None:
        if self.state is not UnitState.SHARDED:
            raise RuntimeError(f"unit '{self.name}' is {self.state.name}: reshard it before {before}")

    # -- unshard ---------------------------------------------------------------------------------------------

    def all_gather(self, *, for_backward: bool = False) -> None:
        """Issue the all-gather; a no-op unless sharded. Nothing waits for it yet.

        Raises RuntimeError if it is ``for_backward`` and the shard was written to since forward's.
        """
        if self.state not in RESHARDED:
            return
        if self.state is UnitState.SHARDED:
            self.take_up_changes()
        # Only after the changes are taken up, which count as writes themselves.
        writes = self.presentation.writes
        self.gathered_steps = self.presentation.steps
        if writes != self.gathered_writes and self.state is UnitState.SHARDED:
            # Invariant: no gradient is computed from other values than its forward's (tests/impl/values).
            if for_backward:
                raise RuntimeError(error_text("unit.all_gather", self.name))
            self.gathered_writes = writes
            self._versions = list(map(_NEXT, self._versions))
        gather = self.gather
        if gather.fetches:
            context = self._context or self._not_run()
            if context.rank_check is not None:
                context.rank_check.agree(self.groups.shard, f"all-gather of unit '{self.name}'")
            with span(self.labels.all_gather):
                gather.start(context)
        self.state = UnitState.GATHERING  # Invariant: from SHARDED or KEPT alone, as checked above

    def take_up_changes(self) -> None:
        """Take up what the user assigned to or froze of the sharded parameters since the last gather."""
        if self.presentation.take_up_changes(self._await_reads) and self._context is not None:
            self._context.let_gathers_wait()

    def _await_reads(self) -> None:
        """Wait for copies out of a shard on the host, which is about to be written to."""
        if self._context is not None:
            self._context.await_host_read()

    def wait_all_gather(self, hold: int = 0) -> None:
        """Make computation wait for the parameters and show them; a no-op unless gathering or hidden.

        Args:
            hold: how many gather buffers may stay until the next one is waited for, so that the next
                all-gather need not wait for this unit's copy.
        """
        if self.state is not UnitState.GATHERING:
            if self.state is UnitState.HIDDEN:
                self.state = UnitState.UNSHARDED
                self.presentation.show_unsharded()
            return
        gather = self.gather
        with span(self.labels.wait_all_gather):
            if gather.owns_memory:
                context = self._context or self._not_run()
                if gather.fetches:
                    gather.finish(context)
                    if gather.work is not None or gather.event is not None:
                        raise RuntimeError(f"the all-gather of unit '{self.name}' was not waited for")
                gather.fill(context, hold)
            if not self.unsharded:
                self.unsharded = gather.make_parameters(self.parameters)
                if gather.makes_views:
                    self._versions = list(map(VERSION, self.unsharded))
                self.presentation.adopt_unsharded(self.unsharded)
            elif self._versions and gather.owns_memory:
                # Invariant: backward can read parameters only after their gather was waited for; `reshard`
                # moved the versions away (tests/impl/values, mutant "no wait in backward").
                set_versions(self.unsharded, self._versions)
            self.presentation.show_unsharded()
        self.state = UnitState.UNSHARDED  # Invariant: of what was gathered, only behind the wait above

    def is_stale(self) -> bool:
        """Return whether what was gathered may be older than a shard, on this rank or on another."""
        shown = self.presentation
        return shown.writes != self.gathered_writes or shown.steps != self.gathered_steps

    def check_writes(self) -> None:
        """Raise RuntimeError if a forward that is trained wrote to parameters, where that would be lost."""
        versions = list(map(VERSION, self.unsharded))
        if versions == self._versions:
            return
        before, self._versions = self._versions, versions
        if self.gather.owns_memory and torch.is_grad_enabled():
            written = next(i for i, version in enumerate(versions) if version != before[i])
            raise RuntimeError(error_text("unit.check_writes", self.parameters[written].fqn, self.name))

    # -- reshard ---------------------------------------------------------------------------------------------

    def reshard(self, hold: int = 0) -> None:
        """Free the unsharded parameters and show the sharded ones; a no-op if sharded.

        Args:
            hold: how many freed buffers may stay allocated for one more turn (``buffer.py``).
        """
        if self.state is UnitState.SHARDED:
            return
        gather = self.gather
        with span(self.labels.reshard):
            # What is hidden may have been replaced since.
            shows_sharded = self.state is not UnitState.UNSHARDED and not gather.holds
            if self.state is UnitState.KEPT:
                gather.drop()
            elif self.state is UnitState.GATHERING:
                if gather.fetches:
                    gather.abandon(self._context or self._not_run())
            elif gather.owns_memory:
                gather.free(self._context or self._not_run(), hold)
                if self._versions:
                    # Invariant: a graph that saved these parameters is refused while they are freed
                    # (tests/impl/values, mutant "resharded before backward").
                    increment_version(self.unsharded)
            if not shows_sharded:
                self.presentation.show_sharded()
        self.state = UnitState.SHARDED  # Invariant: no parameter's memory is left that the gather owns

    def hide(self) -> None:
        """Show the sharded parameters, but keep the others for backward, where the front end does so."""
        if self.presentation.hides and self.state is UnitState.UNSHARDED:
            self.state = UnitState.HIDDEN
            self.presentation.show_sharded()

    def reshard_by_hand(self) -> None:
        """Reshard for code outside, which may write to the shard next."""
        self.reshard()
        if self._context is not None:
            self._context.shards_may_change()

    def reshard_in_forward(self, hold: int) -> None:
        """Free the parameters between forward and backward, if this unit does so."""
        if not self.reshard_after_forward:
            self.hide()
            return
        keeps = self.keeps_part and self.gather.keeps and self.state is UnitState.UNSHARDED
        if keeps:
            self.gather.keep(self._context or self._not_run())
        self.reshard(hold)
        if keeps:
            self.gather.show_kept(self.presentation.trained())
            self.state = UnitState.KEPT
