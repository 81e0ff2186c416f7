"""The FSDP1 presentation for ``use_orig_params``: modules keep their original ``nn.Parameter`` objects.

Each object holds the part that is in this rank's shard as 1-D data, or its full value in its own shape if
nothing is sharded. The objects stay the same, so optimizers, freezing, new data (``weight.data = ...``) and
new objects (``module.weight = nn.Parameter(...)``) work; each gather applies the changes.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_

import torch
from torch import nn

from ..runtime.buffer import HostOffload
from ..runtime.gradient_state import gradients_arrived
from ..runtime.presentation import TRAINS, VERSION, ShownInPlace, UnitParameter, is_shown
from ..shared import error_text
from ..shared.layout import UnitLayout
from ..shared.torch_internals import foreach_add_
from .flat_param import FlatParameter, check_place, flat_parameter, flatten, refuse_shown_full
from .unreduced import UnreducedOriginals, assign_gradient

_ADDRESS = torch.Tensor.data_ptr
_MEMORY = torch.Tensor.untyped_storage


class OriginalPresentation(ShownInPlace):
    """Shows the original parameter objects: 1-D parts of the shard if sharded, full tensors if unsharded."""

    hides = drops_without_grad = refuses_writes = True

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
        offload: HostOffload | None = None,
    ) -> None:
        super().__init__(layout, parameters)
        # Whether full parameters are shown, outside of forward and backward.
        self.shows_full = False
        # Whether gradients may have another dtype than their parameters.
        self.any_grad_dtype = False
        self.shard = flatten(layout, originals, offload)
        # The same objects as before, so that an optimizer made before wrapping still works.
        self.sharded = list(originals)
        self.unreduced: UnreducedOriginals = UnreducedOriginals(layout, self.sharded)
        self._kept_gradients: list[torch.Tensor | None] = []
        self._trained = [parameter.requires_grad for parameter in originals]
        self._addresses: list[int] = []
        self._point_at_shard()
        self._sharded_changed()
        self.show_sharded()

    def _point_at_shard(self) -> None:
        for index, parameter in enumerate(self.sharded):
            parameter.data = self._part(index)
        self._addresses = list(map(_ADDRESS, self.sharded))

    def _part(self, index: int) -> torch.Tensor:
        """Return one parameter as a view of the shard; in its own shape if nothing is sharded."""
        segment = self._layout.segments[index]
        part = segment.in_shard(self.shard)
        return part.view(segment.shape) if self._layout.world_size == 1 else part

    # -- changes by the user ---------------------------------------------------------------------------------

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        if self.shows_full:
            refuse_shown_full()
        if not is_shown(self._show_sharded):
            self._take_up_replaced()
        wrote = self._moved()
        if wrote:
            self._write_back(before_write)
        if list(map(TRAINS, self.sharded)) != self._trained:
            self.follow_freezing()
        versions = list(map(VERSION, self.sharded))
        self.writes += wrote or versions != self._versions
        self._versions = versions
        return wrote

    def changed(self) -> bool:
        written = self._versions != list(map(VERSION, self.sharded))
        written |= self._addresses != list(map(_ADDRESS, self.sharded))
        return written or not (is_shown(self._show_sharded) or is_shown(self._show_unsharded))

    def replaced(self) -> bool:
        """Return whether the user replaced parameters in the modules, or their data."""
        return not is_shown(self._show_sharded) or self._moved()

    def _moved(self) -> bool:
        """Return whether parameters have new data. Includes empty ones, so that all ranks agree."""
        own = repeat(self.shard.untyped_storage())
        moved = list(map(_ADDRESS, self.sharded)) != self._addresses
        return moved or not all(map(is_, map(_MEMORY, self.sharded), own))

    @torch.no_grad()
    def _take_up_replaced(self) -> None:
        """Adopt the parameter objects that the modules hold now instead of the old ones."""
        for index, described in enumerate(self._parameters):
            places = [place for place in described.places if place.name in place.module._parameters]
            now = [place.module._parameters[place.name] for place in places]
            if any(each is not now[0] for each in now):
                raise NotImplementedError(_tied(described))
            if not now or now[0] is self.sharded[index]:
                continue  # removed by the user; the next gather registers it again
            found = check_place(described, places[0], now[0])
            self._check_shape(index, found)
            # Clone the old data before it is overwritten: torch.func.functional_call restores the object.
            self.sharded[index].data = self.sharded[index].detach().clone()
            found.__dict__.update(self.sharded[index].__dict__)
            if self.any_grad_dtype:
                found.grad_dtype = None
            self.sharded[index] = found
        self._sharded_changed()

    def _check_shape(self, index: int, found: torch.Tensor) -> None:
        segment = self._layout.segments[index]
        whole = self._layout.world_size == 1
        if found.numel() != segment.shard_numel if whole else found.shape != segment.shard_shape:
            raise RuntimeError(
                error_text(
                    "original_params.check_shape",
                    self._parameters[index].fqn,
                    tuple(found.shape),
                    tuple(self._part(index).shape),
                )
            )

    @torch.no_grad()
    def _write_back(self, before_write: Callable[[], None]) -> None:
        """Copy newly assigned data of parameters into the shard, and make them views of it again."""
        for index, parameter in enumerate(self.sharded):
            if parameter.data_ptr() != self._addresses[index]:
                self._check_shape(index, parameter)
        before_write()
        for index, parameter in enumerate(self.sharded):
            if parameter.data_ptr() != self._addresses[index]:
                part = self._part(index)
                part.copy_(parameter.view(part.shape))
        self._point_at_shard()

    def flat(self) -> FlatParameter:
        """Return a flat parameter of this rank's shard, with a copy of its gradient."""
        flat = flat_parameter(self._layout, self._parameters, self.shard, any(self._trained))
        if not self.unreduced.shown and not self.shows_full and any(self.which_gradients()):
            flat.grad_dtype = None
            flat.grad = self.flat_gradient()
        return flat

    def flat_gradient(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient, 1-D, with zeros for missing gradients.

        Never ``None``, because another rank may hold gradients of parameters without elements here.
        """
        self.unreduced.check_hidden()
        dtypes = {parameter.grad.dtype for parameter in self.sharded if parameter.grad is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.shard.dtype
        flat = torch.zeros_like(self.shard, dtype=dtype)
        for segment, parameter in zip(self._layout.segments, self.sharded, strict=True):
            if parameter.grad is not None:
                segment.in_shard(flat).copy_(parameter.grad.view(-1))
        return flat

    def which_gradients(self) -> list[bool]:
        """Return for each original parameter whether it has a gradient on this rank."""
        return [parameter.grad is not None for parameter in self.sharded]

    def keep_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store this rank's part of full ``gradients``, which the user may have changed."""
        for segment, kept, value in zip(self._layout.segments, self._kept_gradients, gradients, strict=True):
            if kept is not None and value is not None:
                kept.view(-1).copy_(segment.own_part(value))

    def show_full(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Set the data of the parameters to full ``values`` and return the parameters."""
        self.shows_full = True
        self._kept_gradients = [] if gradients is None else [parameter.grad for parameter in self.sharded]
        for index, parameter in enumerate(self.sharded):
            if gradients is not None:
                parameter.grad = None
            parameter.data = values[index]
            if gradients is not None:
                assign_gradient(parameter, gradients[index])
        return self.sharded

    def hide_full(self) -> None:
        """Undo ``show_full``."""
        self.shows_full = False
        self._point_at_shard()
        if self._kept_gradients:
            for parameter, gradient in zip(self.sharded, self._kept_gradients, strict=True):
                assign_gradient(parameter, gradient)
        self._kept_gradients = []

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        whole = self._layout.world_size == 1
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for index, part in zip(which, gradients, strict=True):
            sharded = self.sharded[index]
            if not sharded.requires_grad:
                sharded.grad = None  # frozen since forward
                continue
            if part.numel() == 0:
                continue  # no elements on this rank: as in torch, no gradient instead of an empty one
            if whole:
                part = part.view(sharded.shape)
            gradient = sharded.grad
            if gradient is None:
                sharded.grad = part
            else:
                old.append(gradient)
                new.append(part)
        if old:
            foreach_add_(old, new)
        # Ranks without elements of these parameters count the step too, because it decides about gathers.
        self.steps += gradients_arrived(self.sharded, which)

    def readopt(self) -> torch.Tensor | None:
        """Adopt the parameters' memory after the module was moved; return the new shard, if any."""
        if self.shows_full:
            refuse_shown_full()
        for index, described in enumerate(self._parameters):
            now = [check_place(described, p, p.module._parameters.get(p.name)) for p in described.places]
            self._check_shape(index, now[0])
            self.sharded[index] = now[0]
        self._sharded_changed()
        ours = self.shard.untyped_storage()._cdata
        if all(p.numel() == 0 or p.untyped_storage()._cdata == ours for p in self.sharded):
            return None
        with torch.no_grad():
            kinds = {(parameter.dtype, parameter.device) for parameter in self.sharded}
            # With mixed dtypes or devices, some parameters were replaced: they are copied into the old kind.
            like = self.sharded[0] if len(kinds) == 1 else self.shard
            self.shard = torch.zeros(self._layout.shard_numel, dtype=like.dtype, device=like.device)
            for segment, parameter in zip(self._layout.segments, self.sharded, strict=True):
                segment.in_shard(self.shard).copy_(parameter.view(-1))
        self._point_at_shard()
        return self.shard


def _tied(described: UnitParameter) -> str:
    return f"parameter '{described.fqn}' is tied and was replaced in some places: do it before wrapping"
