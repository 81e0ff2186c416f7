"""The FSDP1 way to show a unit: one flat, 1-D parameter for all of its parameters together.

Two modes:

* flat: the wrapper registers the ``FlatParameter``; the modules inside show their parameters as plain
  attributes, which
  ``parameters()`` does not see;
* original parameters: the modules keep their own ``nn.Parameter`` objects, each with the part of it that lies
  in this
  rank's shard as 1-D data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .layout import UnitLayout
from .offload import HostOffload, new_shard
from .presentation import ModulePlace, UnitParameter


class FlatParameter(nn.Parameter):
    """All parameters of a unit in one, 1-D: this rank's shard of it.

    ``_fqns``, ``_param_infos``, ``_shapes``, ``_numels`` describe the originals, ``_shard_ranges`` the
    ``[start, end)`` of each that lies in this shard, ``_shared_param_infos`` further places of tied ones.
    Sizes, in elements: ``_unpadded_unsharded_size``, with padding ``_padded_unsharded_size``, and
    ``_sharded_size``.
    """

    _fqns: tuple[str, ...]
    _param_infos: tuple[ModulePlace, ...]
    _shared_param_infos: tuple[tuple[ModulePlace, ...], ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    _shard_ranges: tuple[tuple[int, int], ...]
    _unpadded_unsharded_size: torch.Size
    _padded_unsharded_size: torch.Size
    _sharded_size: torch.Size


def _flatten(
    layout: UnitLayout, originals: Sequence[nn.Parameter], offload: HostOffload | None
) -> torch.Tensor:
    like = originals[0]
    shard = new_shard(layout.shard_numel, like.dtype, like.device, offload)
    for segment, original in zip(layout.segments, originals, strict=True):
        start, end = segment.shard_range
        if end > start:
            part = original.detach().reshape(-1)[start:end]
            shard[segment.shard_offset : segment.shard_offset + end - start].copy_(part)
    return shard


class FlatPresentation:
    """Shows one ``FlatParameter``; the modules' parameters become plain attributes of theirs."""

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
        offload: HostOffload | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self.shows_full = False
        """Whether whole parameters are shown, outside of forward and backward."""
        self.shard = _flatten(layout, originals, offload)
        self.flat_param = FlatParameter(self.shard.data, requires_grad=originals[0].requires_grad)
        self.flat_param._fqns = tuple(p.fqn for p in parameters)
        self.flat_param._param_infos = tuple(p.places[0] for p in parameters)
        self.flat_param._shared_param_infos = tuple(p.places[1:] for p in parameters)
        self.flat_param._shapes = tuple(torch.Size(s.shape) for s in layout.segments)
        self.flat_param._numels = tuple(s.numel for s in layout.segments)
        self.flat_param._shard_ranges = tuple(s.shard_range for s in layout.segments)
        self.flat_param._unpadded_unsharded_size = torch.Size((layout.parameter_numel,))
        self.flat_param._padded_unsharded_size = torch.Size((layout.gathered_numel,))
        self.flat_param._sharded_size = self.shard.size()
        self._attributes = [
            self.shard[s.shard_offset : s.shard_offset + s.shard_numel] for s in layout.segments
        ]
        """What the modules show as attributes: parts of the shard until the unit was first gathered."""
        self._show_attributes()

    def show_sharded(self) -> None:
        """Nothing to do: what the modules show stays, only its memory goes."""

    def show_unsharded(self) -> None:
        """Nothing to do, see ``show_sharded``."""

    def trained(self) -> Sequence[nn.Parameter]:
        return [self.flat_param]

    def _show_attributes(self) -> None:
        for described, value in zip(self._parameters, self._attributes, strict=True):
            for place in described.places:
                place.module._parameters.pop(place.name, None)
                place.module.__dict__[place.name] = value

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._attributes = list(parameters)
        self._show_attributes()

    def flat_gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient, 1-D, ``None`` if there is none."""
        return self.flat_param.grad

    def show_full(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register whole values as parameters of their modules; returns them."""
        self.shows_full = True
        shown: list[nn.Parameter] = []
        for index, described in enumerate(self._parameters):
            parameter = nn.Parameter(values[index], requires_grad=described.requires_grad)
            if gradients is not None:
                parameter.grad = gradients[index]
            shown.append(parameter)
            for place in described.places:
                del place.module.__dict__[place.name]
                place.module._parameters[place.name] = parameter
        return shown

    def hide_full(self) -> None:
        """Undo ``show_full``."""
        self.shows_full = False
        self._show_attributes()

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        if self.flat_param.grad is None:
            self.flat_param.grad = gradient
        else:
            self.flat_param.grad.add_(gradient)
        _run_hooks(self.flat_param)

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        segments = self._layout.segments
        like = gradients[0]
        flat = torch.empty(self._layout.shard_numel, dtype=like.dtype, device=like.device)
        given = dict(zip(which, gradients, strict=True))
        pieces = [
            given[i] if i in given else torch.zeros(segment.shape, dtype=like.dtype, device=like.device)
            for i, segment in enumerate(segments)
        ]
        torch._chunk_cat([p if p.dim() else p.view(1) for p in pieces], 0, 1, out=flat.view(1, -1))
        self.deliver(flat, which, ())

    def readopt(self) -> torch.Tensor | None:
        """Take up the flat parameter's memory after the module was moved; the new shard if there is one."""
        for described in self._parameters:
            for place in described.places:
                _check_place(described, place, place.module.__dict__.get(place.name))
        data = self.flat_param.data
        if data.untyped_storage()._cdata == self.shard.untyped_storage()._cdata:
            return None
        self.shard = data
        if not isinstance(self._attributes[0], nn.Parameter):
            self._attributes = [
                data[s.shard_offset : s.shard_offset + s.shard_numel] for s in self._layout.segments
            ]
            self._show_attributes()
        return data


class OriginalPresentation:
    """Shows the original parameter objects: 1-D parts of the shard when sharded, whole ones when not."""

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
        offload: HostOffload | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self.shows_full = False
        """Whether whole parameters are shown, outside of forward and backward."""
        self.shard = _flatten(layout, originals, offload)
        # The same objects as before, so that an optimizer made earlier still holds what is trained.
        self.sharded = list(originals)
        self._kept_gradients: list[torch.Tensor | None] = []
        self._point_at_shard()
        self._show_sharded = self._assignments(self.sharded)
        self._show_unsharded: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self.show_sharded()

    def _point_at_shard(self) -> None:
        for segment, parameter in zip(self._layout.segments, self.sharded, strict=True):
            start = segment.shard_offset
            parameter.data = self.shard[start : start + segment.shard_numel]

    def _assignments(self, values: Sequence[nn.Parameter]) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        return [
            (place.module._parameters, place.name, value)
            for parameter, value in zip(self._parameters, values, strict=True)
            for place in parameter.places
        ]

    def show_sharded(self) -> None:
        for registry, name, parameter in self._show_sharded:
            registry[name] = parameter

    def show_unsharded(self) -> None:
        for registry, name, parameter in self._show_unsharded:
            registry[name] = parameter

    def trained(self) -> Sequence[nn.Parameter]:
        return self.sharded

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._show_unsharded = self._assignments(parameters)

    def flat_gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient, 1-D with zeros where there is none.

        Never ``None``: another rank may hold gradients of parameters that have nothing here.
        """
        flat = torch.zeros_like(self.shard)
        for segment, parameter in zip(self._layout.segments, self.sharded, strict=True):
            if parameter.grad is not None:
                start = segment.shard_offset
                flat[start : start + segment.shard_numel].copy_(parameter.grad)
        return flat

    def show_full(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Let the parameters hold whole values; returns them."""
        self.shows_full = True
        self._kept_gradients = [parameter.grad for parameter in self.sharded]
        for index, parameter in enumerate(self.sharded):
            parameter.grad = None
            parameter.data = values[index]
            if gradients is not None:
                parameter.grad = gradients[index]
        return self.sharded

    def hide_full(self) -> None:
        """Undo ``show_full``."""
        self.shows_full = False
        for parameter in self.sharded:
            parameter.grad = None
        self._point_at_shard()
        for parameter, gradient in zip(self.sharded, self._kept_gradients, strict=True):
            parameter.grad = gradient
        self._kept_gradients = []

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        parts: list[torch.Tensor] = []
        for index, offset in zip(which, offsets, strict=True):
            parts.append(gradient[offset : offset + self._layout.segments[index].shard_numel])
        self._add(parts, which)

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        self._add([gradient.reshape(-1) for gradient in gradients], which)

    def _add(self, parts: list[torch.Tensor], which: Sequence[int]) -> None:
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for index, part in zip(which, parts, strict=True):
            sharded = self.sharded[index]
            if part.numel() == 0:
                continue  # nothing of it on this rank: as torch, no gradient rather than an empty one
            if sharded.grad is None:
                sharded.grad = part
            else:
                old.append(sharded.grad)
                new.append(part)
        if old:
            torch._foreach_add_(old, new)
        for index in which:
            sharded = self.sharded[index]
            if sharded._post_accumulate_grad_hooks:
                _run_hooks(sharded)

    def readopt(self) -> torch.Tensor | None:
        """Take up the parameters' memory after the module was moved; the new shard if there is one."""
        for index, described in enumerate(self._parameters):
            for place in described.places:
                _check_place(described, place, place.module._parameters.get(place.name))
            place = described.places[0]
            now = place.module._parameters[place.name]
            assert now is not None
            if now.shape != self.sharded[index].shape:
                raise ValueError(
                    f"parameter '{described.fqn}' was replaced by one of shape {tuple(now.shape)} after "
                    "wrapping, where it is this rank's part: replace it before"
                )
            self.sharded[index] = now
        self._show_sharded = self._assignments(self.sharded)
        ours = self.shard.untyped_storage()._cdata
        if all(p.numel() == 0 or p.untyped_storage()._cdata == ours for p in self.sharded):
            return None
        with torch.no_grad():
            like = self.sharded[0]
            self.shard = torch.zeros(self._layout.shard_numel, dtype=like.dtype, device=like.device)
            for segment, parameter in zip(self._layout.segments, self.sharded, strict=True):
                start = segment.shard_offset
                self.shard[start : start + segment.shard_numel].copy_(parameter)
        self._point_at_shard()
        return self.shard


def _check_place(parameter: UnitParameter, place: ModulePlace, found: object) -> None:
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            f"parameter '{parameter.fqn}' is no longer '{place.name}' of its {type(place.module).__name__}: "
            "parameters cannot be renamed or removed after wrapping; do it before"
        )


def _run_hooks(parameter: nn.Parameter) -> None:
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        for hook in list(hooks.values()):
            hook(parameter)
