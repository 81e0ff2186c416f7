"""One FSDP unit: parameters that are gathered and freed together, as a state machine.

::

              all_gather()            wait_all_gather()             hide()
    SHARDED ---------------> GATHERING ---------------> UNSHARDED ---------> HIDDEN
      ^  ^                       |   ^                    |   ^                | |
      |  +-----------------------+   |  all_gather()      |   +----------------+ |
      |            reshard()       KEPT <-----------------+    wait_all_gather() |
      +------------------------------+  reshard_in_forward()                     |
      +--------------------------------------------------------------------------+

The sharded parameters are views of the flat local ``shard``, so gathering needs no copy-in. The unsharded
parameters are leaf ``nn.Parameter`` objects over a buffer whose storage is freed and allocated again. Both
sets are created once; switching between them is a few dictionary assignments. The unit's ``gather``
(``gather.py``) fills one from the other, and its ``presentation`` decides how both look.

All writes to parameter memory go through the buffer's own tensor. So for autograd, which compares versions of
saved tensors, gathering the same values again changes nothing. The unit itself changes its parameters'
versions: from reshard until it has waited for the next gather, so that backward refuses to read in between,
and permanently if the shard was written to since the last gather.
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

# Appended to errors: autograd reaches each unit through its pre-backward hook.
OUTPUTS_NEEDED = (
    "The hook is on what forward returns: return every tensor that the loss needs, store none aside"
)


class UnitState(Enum):
    """The state of a unit's parameters; the module docstring shows the transitions."""

    SHARDED = auto()
    # Sharded, and a larger shard is kept for backward (``smaller_group.py``).
    KEPT = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    # Unsharded, while the modules show the sharded parameters.
    HIDDEN = auto()


# States in which the parameters must be gathered before use.
RESHARDED = (UnitState.SHARDED, UnitState.KEPT)
# States in which the unsharded parameters are available.
GATHERED = (UnitState.UNSHARDED, UnitState.HIDDEN)


class Unit:
    """A state machine around one gather and one presentation.

    Args:
        name: the name in messages, until the unit's place in the tree is known.
        layout: the layout of the parameters in the buffers.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        device: the device of computation, and of the shard unless it is offloaded.
        reshard_after_forward: whether forward frees the parameters; ``None`` means yes, unless it is the
            root.
        offload: the CPU offload of the shard, ``None`` without.
        make_gather: makes the gather, and makes it again when one of its inputs (``Sharded``) changes.
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
        # ``presentation.writes`` and ``presentation.steps`` at the last gather of the shard.
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
        """Join a tree of units; ``name`` is the FQN of the unit's module in the root."""
        self._context = context
        self.name = name
        self.labels = UnitLabels(name)

    @torch.inference_mode(False)  # the first forward may be in it, and the shard is trained later
    def readopt(self) -> None:
        """Adopt the sharded parameters that the modules hold now. A new shard needs new buffers."""
        shard = self.presentation.readopt()
        if shard is None:
            return
        self._check_sharded("its parameters are replaced")
        device = self.device if self.offload is not None else shard.device
        precision = self.precision.for_original(shard.dtype)
        self._use(replace(self.gather.sharded, shard=shard, device=device, precision=precision))
        self._forget_parameters()

    def leave(self) -> None:
        """Leave a tree that never ran, to join another one, and drop buffers, which its streams own."""
        self.reshard()
        self._use(self.gather.sharded)
        self._forget_parameters()
        self._context = None

    def _forget_parameters(self) -> None:
        self.unsharded = []
        self._versions = []

    def use_all_gather(self, custom: comm.AllGather | None) -> None:
        """Gather with ``custom`` from now on, or by default if ``None``. Raises RuntimeError if unsharded."""
        if self.state is UnitState.KEPT:
            self.reshard()  # the kept shard belongs to the old gather
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
        """Issue the all-gather without waiting for it; a no-op unless sharded.

        Raises RuntimeError if it is ``for_backward`` and the shard was written to since forward's all-gather.
        """
        if self.state not in RESHARDED:
            return
        if self.state is UnitState.SHARDED:
            self.take_up_changes()
        # Read after ``take_up_changes``, because the changes themselves count as writes.
        writes = self.presentation.writes
        self.gathered_steps = self.presentation.steps
        if writes != self.gathered_writes and self.state is UnitState.SHARDED:
            # Invariant: backward uses the same values as its forward (tests/impl/values).
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
        """Apply the user's assignments to sharded parameters, and freezing, since the last gather."""
        if self.presentation.take_up_changes(self._await_reads) and self._context is not None:
            self._context.let_gathers_wait()

    def _await_reads(self) -> None:
        """Wait for copies from a shard on the host that is about to be written to."""
        if self._context is not None:
            self._context.await_host_read()

    def wait_all_gather(self, hold: int = 0) -> None:
        """Make the compute stream wait for the parameters and show them; a no-op unless gathering or hidden.

        Args:
            hold: how many gather buffers may stay allocated until the next wait, so that the next all-gather
                need not wait for this unit's copy-out.
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
                # Invariant: backward can read parameters only after the wait for their gather, because
                # `reshard` changed the versions (tests/impl/values, mutant "no wait in backward").
                set_versions(self.unsharded, self._versions)
            self.presentation.show_unsharded()
        self.state = UnitState.UNSHARDED  # Invariant: only after the wait above, if anything was gathered

    def is_stale(self) -> bool:
        """Return whether the gathered parameters may be older than a shard, on this rank or another."""
        shown = self.presentation
        return shown.writes != self.gathered_writes or shown.steps != self.gathered_steps

    def check_writes(self) -> None:
        """Raise RuntimeError if a forward with grad wrote to parameters and resharding would lose this."""
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
            hold: how many released buffers may stay allocated for one more unit (``buffer.py``).
        """
        if self.state is UnitState.SHARDED:
            return
        gather = self.gather
        with span(self.labels.reshard):
            # Other states already show the sharded parameters, which the user may have replaced since.
            shows_sharded = self.state is not UnitState.UNSHARDED and not gather.holds
            if self.state is UnitState.KEPT:
                gather.drop()
            elif self.state is UnitState.GATHERING:
                if gather.fetches:
                    gather.abandon(self._context or self._not_run())
            elif gather.owns_memory:
                gather.free(self._context or self._not_run(), hold)
                if self._versions:
                    # Invariant: backward through a graph that saved these parameters raises while they are
                    # freed (tests/impl/values, mutant "resharded before backward").
                    increment_version(self.unsharded)
            if not shows_sharded:
                self.presentation.show_sharded()
        self.state = UnitState.SHARDED  # Invariant: all parameter memory that the gather owns is freed

    def hide(self) -> None:
        """Show the sharded parameters and keep the unsharded ones for backward, if the front end does so."""
        if self.presentation.hides and self.state is UnitState.UNSHARDED:
            self.state = UnitState.HIDDEN
            self.presentation.show_sharded()

    def reshard_by_hand(self) -> None:
        """Reshard on the user's request. The user may write to the shard next."""
        self.reshard()
        if self._context is not None:
            self._context.shards_may_change()

    def reshard_in_forward(self, hold: int) -> None:
        """Free the parameters between forward and backward, if ``reshard_after_forward``."""
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
