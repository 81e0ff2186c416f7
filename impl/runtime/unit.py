"""One FSDP unit: parameters that are gathered and freed together, and the states it moves through.

::

              all_gather()            wait_all_gather()
    SHARDED ---------------> GATHERING ---------------> UNSHARDED
       ^                         |                          |
       +-------------------------+--------------------------+
                            reshard()

The persistent parts are the flat local ``shard`` (the sharded parameters are views of it, so gathering needs
no copy-in) and the unsharded parameters: leaf ``nn.Parameter`` objects over a buffer whose memory comes and
goes. Both sets exist once; showing one or the other in the modules is a few dictionary assignments.

How the one comes from the other: ``gathering.py``.

Why views stay valid for autograd: everything that writes parameter memory goes through the buffer's own
tensor, while each parameter was made from ``.data`` and so has a version counter of its own. To autograd,
whose check of saved tensors compares versions, gathering the same values again changes nothing. The counters
are moved on until a gather has been waited for, so that backward refuses to read before that, and for good
where the shard was written to since the gather before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import nn

from ..collectives import comm
from ..collectives.custom_comm import AllGather
from ..shared.annotations import UnitLabels, span
from ..shared.layout import UnitLayout
from ..shared.settings import UnitPrecision
from ..shared.torch_internals import increment_version, set_versions
from .context import Context
from .gathering import Gathering
from .gradient_state import GradientState
from .offload import HostOffload
from .post_forward import SmallerGroup
from .presentation import VERSION, Presentation, UnitParameter

_NEXT = (1).__add__

OUTPUTS_NEEDED = (
    "The hook is on what forward returns: return every tensor that the loss needs, store none aside"
)
"""How autograd comes to each unit through its pre-backward hook."""


class UnitState(Enum):
    """Where a unit's parameters are; the module's head shows the transitions."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class Unit(Gathering):
    """See the head of this file.

    Args:
        reshard_after_forward: whether forward frees the parameters; ``None`` means yes, unless it is the
            root.
        layout, shard, device, offload: as in ``Gathering``.
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
        smaller: SmallerGroup | None = None,
        offload: HostOffload | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.plain = all(parameter.whole is None for parameter in parameters)
        """Whether all parameters are plain tensors while they are gathered."""
        super().__init__(name, layout, shard, groups, precision, device, offload)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.presentation = presentation
        self.hides = False
        """Whether the sharded parameters are shown between forward and backward, though these are kept."""
        self.kept_without_grad = True
        """Whether what forward does not free stays after a forward without gradients too."""
        self.refuses_writes = False
        """Whether training refuses a forward that writes to its gathered parameters."""
        self.before_backward: Callable[[], None] | None = None
        """Raises where the sharded parameters changed since forward gathered them."""
        self._versions: list[int] = []
        self.gathered_writes = 0
        """What ``presentation.writes`` was when the shard was gathered last."""
        self._hidden = False
        self.smaller = smaller
        self.gradients = GradientState()
        self.state = UnitState.SHARDED
        self.unsharded: list[nn.Parameter] = []
        self.labels = UnitLabels(name)

    # -- set up ----------------------------------------------------------------------------------------------

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
        self.shard = shard
        if self.offload is None:
            self.device = shard.device
        self._use_precision(self.precision.for_original(shard.dtype))
        self._forget_buffers()

    def leave(self) -> None:
        """Leave a tree that never ran, to be part of another one; buffers belong to a tree's streams."""
        self.reshard()
        self._choose_copy()
        self._forget_buffers()
        self._context = None

    def _forget_buffers(self) -> None:
        if self.smaller is not None:
            self.smaller.forget()
        self.unsharded = []
        self._versions = []
        self._gathered = self._full = self._own_part = None
        self._copy_out = None

    def local_gradients(self, which: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is reduced for the gradients of the parameters ``which``, where not all are plain."""
        wholes = [self.parameters[index].whole for index in which]
        return [
            gradient if whole is None else whole.local_gradient(gradient)
            for whole, gradient in zip(wholes, gradients, strict=True)
        ]

    def use_all_gather(self, custom: AllGather | None) -> None:
        """Gather with ``custom`` from now on, or as usual again. Raises RuntimeError while unsharded."""
        self._check_sharded("the all-gather is replaced")
        self.custom_gather = custom
        self._gathered = self._own_part = None
        self._choose_copy()
        if self.smaller is not None:
            self.smaller.custom = custom
            self.smaller.forget()

    def _check_sharded(self, before: str) -> None:
        if self.state is not UnitState.SHARDED:
            raise RuntimeError(f"unit '{self.name}' is {self.state.name}: reshard it before {before}")

    # -- unshard ---------------------------------------------------------------------------------------------

    def all_gather(self, *, for_backward: bool = False) -> None:
        """Issue the all-gather; a no-op unless sharded. Nothing waits for it yet.

        Raises RuntimeError if it is ``for_backward`` and the shard was written to since forward's.
        """
        if self.state is not UnitState.SHARDED:
            return
        self.take_up_changes()
        keeps = self.smaller is not None and self.smaller.holds
        if self.presentation.writes != self.gathered_writes and not keeps:
            if for_backward:
                raise RuntimeError(
                    f"parameters of unit '{self.name}' were written to between its forward and its backward "
                    "(by an optimizer, for instance): gradients would not belong to its outputs. Call "
                    "backward() before that, or forward again after it"
                )
            self.gathered_writes = self.presentation.writes
            self._versions = list(map(_NEXT, self._versions))
        if self.fetches:
            if self._context is not None and self._context.rank_check is not None:
                self._context.rank_check.agree(self.groups.shard, f"all-gather of unit '{self.name}'")
            with span(self.labels.all_gather):
                if self.smaller is not None and self.smaller.holds:
                    self._work, self._event = self.smaller.start(self.context.streams)
                elif self.gathers:
                    self._issue_all_gather()
                else:
                    self._event = self._copy_shard(in_place=True)
        self.state = UnitState.GATHERING

    def take_up_changes(self) -> None:
        """Take up what the user assigned to or froze of the sharded parameters since the last gather."""
        if self.presentation.take_up_changes(self._await_reads) and self._context is not None:
            self._context.let_gathers_wait()

    def _await_reads(self) -> None:
        """The shard is about to be written to: copies out of it, if it is on the host, have to be done."""
        if self._context is not None:
            self._context.await_host_read()

    def wait_all_gather(self, hold: int = 0) -> None:
        """Make computation wait for the parameters and show them; a no-op unless gathering.

        Args:
            hold: how many gather buffers may stay until the next one is waited for, so that the next
                all-gather need not wait for this unit's copy.
        """
        if self.state is not UnitState.GATHERING:
            if self._hidden:
                self._hidden = False
                self.presentation.show_unsharded()
            return
        with span(self.labels.wait_all_gather):
            if self.fetches:
                self._finish_gather()
                if self._work is not None or self._event is not None:
                    raise RuntimeError(f"the all-gather of unit '{self.name}' was not waited for")
            if self.smaller is not None and self.smaller.serves:
                self._take_full()
                self.smaller.copy_out()
                self.smaller.release(self.context.handover, self.context.streams.compute)
            elif self._grouped is not None:
                self._grouped.copy_out()
            elif self._by_peers is not None:
                self._by_peers.copy_out(self._take_full().tensor)
            elif self.layout.rank_major:
                self._copy_out_parameters(hold)
            elif self.casts and not self.fetches:
                self._take_full().tensor.copy_(self.shard)
            if not self.unsharded:
                self._make_parameters()
            elif self._versions and self.owns_memory:
                set_versions(self.unsharded, self._versions)
            self.presentation.show_unsharded()
        self.state = UnitState.UNSHARDED

    @torch.inference_mode(False)
    def _make_parameters(self) -> None:
        storage = self._parameter_memory()
        at_shard = not self.owns_memory
        for segment, parameter in zip(self.layout.segments, self.parameters, strict=True):
            start = segment.shard_offset if at_shard else segment.full_offset
            # `.data` of each slice: a version counter for each parameter (see the head of this file).
            view = storage[start : start + segment.numel].view(segment.shape).data
            if parameter.whole is not None:
                view = parameter.whole.unsharded(view)
            self.unsharded.append(nn.Parameter(view, requires_grad=parameter.requires_grad))
        self._versions = list(map(VERSION, self.unsharded))
        self.presentation.adopt_unsharded(self.unsharded)

    def check_writes(self) -> None:
        """Raise RuntimeError if a forward that is trained wrote to parameters, where that would be lost."""
        versions = list(map(VERSION, self.unsharded))
        if versions == self._versions:
            return
        before, self._versions = self._versions, versions
        if self.owns_memory and torch.is_grad_enabled():
            written = next(i for i, version in enumerate(versions) if version != before[i])
            raise RuntimeError(
                f"forward wrote to parameter '{self.parameters[written].fqn}' of unit '{self.name}' (an "
                "embedding with max_norm does that), which is lost when it is sharded again. Leave such a "
                "module out with ignored_modules, or write after the step, inside of summon_full_params()"
            )

    # -- reshard ---------------------------------------------------------------------------------------------

    def reshard(self, hold: int = 0) -> None:
        """Free the unsharded parameters and show the sharded ones; a no-op if sharded.

        Args:
            hold: how many freed buffers may stay allocated for one more turn (``buffer.py``).
        """
        if self.state is UnitState.SHARDED:
            if self.smaller is not None and self.smaller.holds:
                self.smaller.drop()
                self.presentation.show_sharded()
            return
        with span(self.labels.reshard):
            if self.state is UnitState.GATHERING:
                self._abandon()
            else:
                self._free_parameters(hold)
                if self._versions and self.owns_memory:
                    increment_version(self.unsharded)
                self.presentation.show_sharded()
                self._hidden = False
        self.state = UnitState.SHARDED

    def hide(self) -> None:
        """Show the sharded parameters, but keep the others for backward."""
        if self.hides and self.state is UnitState.UNSHARDED:
            self._hidden = True
            self.presentation.show_sharded()

    @property
    def shows_unsharded(self) -> bool:
        """Whether the modules show whole parameters that can be computed with."""
        return self.state is UnitState.UNSHARDED and not self._hidden

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
        if self.smaller is None or self.state is not UnitState.UNSHARDED:
            self.reshard(hold)
            return
        assert self._full is not None
        self.smaller.keep(self._full.tensor, self.context.streams.compute)
        self.reshard(hold)
        self.smaller.show(self.presentation.trained())

    def _abandon(self) -> None:
        """A gather that was not waited for: let it finish, keep nothing."""
        if self.fetches:
            self._finish_gather()
            if self.smaller is not None and self.smaller.serves:
                self.smaller.release(self.context.handover, self.context.streams.compute)
                self.presentation.show_sharded()
                return
            if self._by_peers is not None:
                self._take_full().free()
                return
            assert self._gathered is not None
            self.context.handover.release(self._gathered, self.context.streams.compute)
