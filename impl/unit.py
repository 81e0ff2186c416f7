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

Three ways to get from the shard to the parameters, by layout (``layout.py``):

* one rank, no cast: the parameters are views of the shard; nothing ever happens;
* one rank and a cast, or a flat layout: the parameters are views of what is cast or gathered;
* a chunked layout: the gather buffer is temporary and one fused copy fills the parameters.

Why views stay valid for autograd: everything that writes parameter memory goes through the buffer's own
tensor, while each parameter was made from ``.data`` and so has a version counter of its own. Autograd's check
of saved tensors therefore sees no change, and there is none: each gather writes what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from . import comm
from .annotations import UnitLabels, span
from .api import MemoryHandover, UnitPrecision
from .buffer import FlatBuffer
from .layout import UnitLayout
from .post_forward import SmallerGroup
from .streams import Lane, Mark

if TYPE_CHECKING:
    from .runtime import Runtime


class UnitState(Enum):
    """Where a unit's parameters are; the module's head shows the transitions."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


@dataclass(frozen=True)
class ModulePlace:
    """Where a parameter is registered; a parameter tied inside its unit has several places."""

    module: nn.Module
    name: str


@dataclass
class UnitParameter:
    """A parameter of a unit: its name in the root, its places and whether it is trained."""

    fqn: str
    places: tuple[ModulePlace, ...]
    requires_grad: bool


class Presentation(Protocol):
    """What a front end decides: how a unit's parameters and gradients look from outside."""

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters."""

    def show_unsharded(self) -> None:
        """Let the modules show the unsharded parameters."""

    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that an optimizer sees: those that hold this rank's part."""

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        """Learn the unsharded parameters; called once, when they first exist."""

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        """Add the parts of a reduced flat gradient to the sharded parameters' ``grad``.

        Args:
            gradient: 1-D, the reduced local shard in the delivered dtype.
            which: indices of the parameters that take part, in order.
            offsets: start of each one's part in ``gradient``.
        """

    def readopt(self) -> torch.Tensor | None:
        """Take up what the modules show now, after they were moved, materialised or loaded into.

        Returns a new flat shard if the parameters left the old one, else ``None``.
        """

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        """World size 1: the unsharded gradients of parameters ``which`` are the result."""


@dataclass
class GradientState:
    """What a unit keeps of its gradients between backward passes, and how it is told to reduce them."""

    synchronize: bool = True
    """Reduce at all; off while accumulating without communication."""
    all_reduce: bool = True
    """Sum over replicas; off while accumulating with reduce-scatter only."""
    unused_as_zero: bool = False
    """Reduce zeros for parameters without a gradient, so that ranks may use different ones."""
    divide_factor: float | None = None
    force_sum: bool = False
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    """Unsharded gradients in the reduce dtype, kept where autograd's own accumulation would be in a lower
    one.
    """
    partial: torch.Tensor | None = None
    """A reduce-scattered gradient that awaits its all-reduce."""


class Unit:
    """See the head of this file.

    Args:
        layout: where everything lies.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        reshard_after_forward: whether forward frees the parameters; ``None`` means yes, unless it is the
            root.
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
    ) -> None:
        self.parameters = list(parameters)
        self.layout = layout
        self.shard = shard
        self.groups = groups
        self.device = device
        self.gathers = groups.shard is not None
        """Whether unsharding needs a collective."""
        self._use_precision(precision)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.presentation = presentation
        self.smaller = smaller
        self.gradients = GradientState()
        self.state = UnitState.SHARDED
        self.unsharded: list[nn.Parameter] = []
        self.name = name
        self.labels = UnitLabels(name)
        self._runtime: Runtime | None = None
        self._gathered: FlatBuffer | None = None
        self._full: FlatBuffer | None = None
        self._work: Any = None
        self._mark: Mark | None = None
        self._copy_out: list[torch.Tensor] = []
        self._cast_target: torch.Tensor | None = None
        self._low: FlatBuffer | None = None
        self._from_smaller: FlatBuffer | None = None

    def _use_precision(self, precision: UnitPrecision) -> None:
        self.precision = precision
        self.casts = precision.compute != precision.original
        """Whether the parameters are computed with in another dtype than they are stored in."""
        self.owns_memory = self.gathers or self.casts
        """Whether the unsharded parameters have memory besides the shard's."""

    # -- set up ----------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """The runtime of the tree this unit belongs to."""
        if self._runtime is None:
            raise RuntimeError(
                f"unit '{self.name}' has not run yet: call the root module's forward (or unshard()) first"
            )
        return self._runtime

    def join(self, runtime: Runtime, name: str) -> None:
        """Become part of a tree of units; ``name`` is the unit's module in its root."""
        self._runtime = runtime
        self.name = name
        self.labels = UnitLabels(name)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that unsharding this unit takes and resharding frees."""
        return self.layout.full_numel * self.precision.compute.itemsize if self.owns_memory else 0

    def readopt(self) -> None:
        """Take up the sharded parameters as the modules hold them now; a new shard means new buffers."""
        shard = self.presentation.readopt()
        if shard is None:
            return
        if self.state is not UnitState.SHARDED:
            raise RuntimeError(
                f"unit '{self.name}' is {self.state.name}: reshard it before its parameters are replaced"
            )
        self.shard = shard
        self.device = shard.device
        if shard.dtype != self.precision.original:
            self._use_precision(self.precision.for_original(shard.dtype))
        if self.smaller is not None:
            self.smaller.forget()
        self.unsharded = []
        self._gathered = self._full = self._low = self._cast_target = None
        self._copy_out = []

    def _move(self, state: UnitState) -> None:
        """Change state; identity comparisons, as this runs six times a step and hashing an enum is slow."""
        if self.state is UnitState.SHARDED:
            allowed = state is UnitState.GATHERING
        elif self.state is UnitState.GATHERING:
            allowed = state is not UnitState.GATHERING
        else:
            allowed = state is UnitState.SHARDED
        if not allowed:
            raise RuntimeError(f"unit '{self.name}' cannot go from {self.state.name} to {state.name}")
        self.state = state

    # -- unshard ---------------------------------------------------------------------------------------------

    def all_gather(self) -> None:
        """Issue the all-gather; a no-op unless sharded. Nothing waits for it yet."""
        if self.state is not UnitState.SHARDED:
            return
        if self.gathers:
            with span(self.labels.all_gather):
                if self.smaller is not None and self.smaller.holds:
                    self._issue_smaller(self.smaller)
                else:
                    self._issue_all_gather()
        self._move(UnitState.GATHERING)

    def _issue_all_gather(self) -> None:
        lanes = self.runtime.lanes
        group = self.groups.shard
        assert group is not None
        source = self._cast_shard() if self.casts else self.shard
        owner = lanes.cast if self._cast_in_place else lanes.gather
        with lanes.gather:
            if owner is lanes.gather:
                self._take_gathered(owner)
            assert self._gathered is not None
            self._work = comm.all_gather(self._gathered.tensor, source, group, not lanes.has_streams)
            self._mark = lanes.gather.record()
        if self._low is not None and lanes.has_streams:
            lanes.gather.keep(source)
            self._low.free()

    def _issue_smaller(self, smaller: SmallerGroup) -> None:
        lanes = self.runtime.lanes
        lanes.gather.wait(smaller.mark)
        with lanes.gather:
            gathered = smaller.take_gathered(lanes.gather)
            self._work = comm.all_gather(gathered.tensor, smaller.shard, smaller.group, not lanes.has_streams)
            self._mark = lanes.gather.record()
        self._from_smaller = gathered

    @property
    def _cast_in_place(self) -> bool:
        """Whether this rank's part is cast to where the all-gather wants it, so that it needs no memory of
        its own.

        The gather buffer is then allocated on the cast lane. With ``record_stream`` a buffer that two lanes
        use comes back later than one that only computation uses, so there the cast has a small buffer
        instead.
        """
        return self.casts and self.runtime.handover.mode is MemoryHandover.EVENTS

    def _cast_shard(self) -> torch.Tensor:
        lanes = self.runtime.lanes
        with lanes.cast:
            if self._cast_in_place:
                gathered = self._take_gathered(lanes.cast)
                if self._cast_target is None:
                    start = self.layout.rank * self.layout.shard_numel
                    self._cast_target = gathered.tensor[start : start + self.layout.shard_numel]
            elif self._low is None:
                self._low = FlatBuffer(
                    self.layout.shard_numel, self.precision.compute, self.device, lanes.cast
                )
                self._cast_target = self._low.tensor
            else:
                self._low.take()
            assert self._cast_target is not None
            self._cast_target.copy_(self.shard)
        lanes.gather.follow(lanes.cast)
        return self._cast_target

    def _take_gathered(self, owner: Lane) -> FlatBuffer:
        if self._gathered is None:
            self._gathered = FlatBuffer(
                self.layout.gathered_numel, self.precision.compute, self.device, owner
            )
        else:
            self.runtime.handover.reclaim(self._gathered)
            self._gathered.take()
        return self._gathered

    def wait_all_gather(self, hold: int = 0) -> None:
        """Make computation wait for the parameters and show them; a no-op unless gathering.

        Args:
            hold: how many gather buffers may stay until the next one is waited for, so that the next
                all-gather need not wait for this unit's copy.
        """
        if self.state is not UnitState.GATHERING:
            return
        with span(self.labels.wait_all_gather):
            if self.gathers:
                self._finish_collective()
            if self._from_smaller is not None:
                self._copy_out_smaller(self._from_smaller)
            elif self.layout.rank_major:
                self._copy_out_parameters(hold)
            elif self.casts and not self.gathers:
                self._take_full().tensor.copy_(self.shard)
            if not self.unsharded:
                self._make_parameters()
            self.presentation.show_unsharded()
        self._move(UnitState.UNSHARDED)

    def _finish_collective(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._low is not None:
                self._low.free()
        self.runtime.lanes.compute.wait(self._mark)
        self._mark = None

    def _take_full(self) -> FlatBuffer:
        if self._full is None:
            self._full = FlatBuffer(
                self.layout.full_numel, self.precision.compute, self.device, self.runtime.lanes.compute
            )
        else:
            self._full.take()
        return self._full

    def _copy_out_parameters(self, hold: int) -> None:
        layout, runtime, gathered = self.layout, self.runtime, self._gathered
        assert gathered is not None
        if hold:
            runtime.handover.trim()
        full = self._take_full()
        if not self._copy_out:
            self._copy_out = [
                full.tensor[s.full_offset : s.full_offset + s.full_padded_numel].view(layout.world_size, -1)
                for s in layout.segments
            ]
        torch.split_with_sizes_copy(
            gathered.tensor.view(layout.world_size, -1), layout.split_sizes, dim=1, out=self._copy_out
        )
        runtime.handover.release(gathered, runtime.lanes.compute, hold)

    def _copy_out_smaller(self, gathered: FlatBuffer) -> None:
        assert self.smaller is not None
        self._take_full()
        self.smaller.copy_out(gathered.tensor)
        self._release_smaller(gathered)

    def _release_smaller(self, gathered: FlatBuffer) -> None:
        assert self.smaller is not None
        self.runtime.handover.release(gathered, self.runtime.lanes.compute)
        self.smaller.drop()
        self._from_smaller = None

    @torch.inference_mode(False)
    def _make_parameters(self) -> None:
        storage = self._parameter_memory()
        at_shard = not self.owns_memory
        for segment, parameter in zip(self.layout.segments, self.parameters, strict=True):
            start = segment.shard_offset if at_shard else segment.full_offset
            # `.data` of each slice: a version counter for each parameter (see the head of this file).
            view = storage[start : start + segment.numel].view(segment.shape).data
            self.unsharded.append(nn.Parameter(view, requires_grad=parameter.requires_grad))
        self.presentation.adopt_unsharded(self.unsharded)

    def _parameter_memory(self) -> torch.Tensor:
        if not self.owns_memory:
            return self.shard
        buffer = self._full if self._full is not None else self._gathered
        assert buffer is not None
        return buffer.tensor

    # -- reshard ---------------------------------------------------------------------------------------------

    def reshard(self, hold: int = 0) -> None:
        """Free the unsharded parameters and show the sharded ones; a no-op if sharded.

        Args:
            hold: how many freed buffers may stay allocated for one more turn (``buffer.py``).
        """
        if self.state is UnitState.SHARDED:
            if self.smaller is not None:
                self.smaller.drop()
            return
        with span(self.labels.reshard):
            if self.state is UnitState.GATHERING:
                self._abandon()
            else:
                self._free_parameters(hold)
                self.presentation.show_sharded()
        self._move(UnitState.SHARDED)

    def reshard_in_forward(self, hold: int) -> None:
        """Free the parameters between forward and backward, if this unit does so."""
        if not self.reshard_after_forward:
            return
        if self.smaller is not None and self.state is UnitState.UNSHARDED:
            assert self._full is not None
            self.smaller.keep(self._full.tensor, self.runtime.lanes.compute)
        self.reshard(hold)

    def _abandon(self) -> None:
        """A gather that nobody waited for: let it finish, keep nothing."""
        if self.gathers:
            self._finish_collective()
            if self._from_smaller is not None:
                self._release_smaller(self._from_smaller)
                return
            assert self._gathered is not None
            self.runtime.handover.release(self._gathered, self.runtime.lanes.compute)

    def _free_parameters(self, hold: int) -> None:
        if not self.owns_memory:
            return
        runtime = self.runtime
        if self._full is not None:
            self._full.free()
        else:
            assert self._gathered is not None
            runtime.handover.release(self._gathered, runtime.lanes.compute, hold)
        if self.gathers:
            runtime.limiter.freed(runtime.lanes.compute)
