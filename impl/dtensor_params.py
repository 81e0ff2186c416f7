"""The fully_shard way to show a unit: each parameter stays in its module, as a ``DTensor`` of its rows while
sharded.

The local tensors of all of a unit's ``DTensor`` parameters are views of the unit's one flat shard, and those
of their gradients are views of what the reduce-scatter returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .layout import Segment, UnitLayout
from .unit import UnitParameter

_new_dtensor: Callable[..., DTensor] = partial(DTensor.__new__, DTensor)
"""Wrap a local tensor by its spec, without ``DTensor.__init__``, which does nothing but ask the compiler."""


def shard_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Shard on dim 0 over the last dimension of the mesh, replicas over the one before it."""
    return (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))


class DTensorPresentation:
    """Shows ``DTensor`` parameters when sharded and plain ones when not.

    Args:
        originals: the parameters as they were, in the order of the layout; their values are copied into the
            shard.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
    ) -> None:
        self._mesh = mesh
        self._layout = layout
        self._parameters = parameters
        self.shard = self._cut(originals)
        self.sharded = [
            self._make_sharded(segment, original)
            for segment, original in zip(layout.segments, originals, strict=True)
        ]
        self._specs: list[Any] = [_spec_of(parameter) for parameter in self.sharded]
        self._show_sharded = self._assignments(self.sharded)
        self._show_unsharded: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._unsharded: list[nn.Parameter] = []
        self.show_sharded()

    def _cut(self, originals: Sequence[nn.Parameter]) -> torch.Tensor:
        like = originals[0]
        shard = torch.zeros(self._layout.shard_numel, dtype=like.dtype, device=like.device)
        for segment, original in zip(self._layout.segments, originals, strict=True):
            start, end = segment.shard_range
            if end > start:
                self._part(shard, segment).copy_(
                    original.detach().reshape(-1)[start:end].view(segment.shard_shape)
                )
        return shard

    @staticmethod
    def _part(shard: torch.Tensor, segment: Segment) -> torch.Tensor:
        offset = segment.shard_offset
        return shard[offset : offset + segment.shard_numel].view(segment.shard_shape)

    def _make_sharded(self, segment: Segment, original: nn.Parameter) -> nn.Parameter:
        local = self._part(self.shard, segment).data
        tensor = DTensor.from_local(
            local,
            self._mesh,
            shard_placements(self._mesh),
            run_check=False,
            shape=torch.Size(segment.shape),
            stride=_contiguous_strides(segment.shape),
        )
        return nn.Parameter(tensor, requires_grad=original.requires_grad)

    def _assignments(self, values: Sequence[nn.Parameter]) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        return [
            (place.module._parameters, place.name, value)
            for parameter, value in zip(self._parameters, values, strict=True)
            for place in parameter.places
        ]

    # -- Presentation ----------------------------------------------------------------------------------------

    def show_sharded(self) -> None:
        for registry, name, parameter in self._show_sharded:
            registry[name] = parameter

    def show_unsharded(self) -> None:
        for registry, name, parameter in self._show_unsharded:
            registry[name] = parameter

    def trained(self) -> Sequence[nn.Parameter]:
        return self.sharded

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._unsharded = list(parameters)
        self._show_unsharded = self._assignments(parameters)

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        segments, sharded = self._layout.segments, self.sharded
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for index, offset in zip(which, offsets, strict=True):
            segment, parameter = segments[index], sharded[index]
            part = gradient[offset : offset + segment.shard_numel].view(segment.shard_shape)
            grad: Any = parameter.grad
            if grad is None:
                parameter.grad = _new_dtensor(part, self._specs[index], requires_grad=False)
            else:
                old.append(grad._local_tensor)
                new.append(part)
        if old:
            torch._foreach_add_(old, new)
        self._run_hooks(which)

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for index, gradient in zip(which, gradients, strict=True):
            parameter = self.sharded[index]
            grad: Any = parameter.grad
            if grad is None:
                parameter.grad = _new_dtensor(gradient, self._specs[index], requires_grad=False)
            else:
                old.append(grad._local_tensor)
                new.append(gradient)
        if old:
            torch._foreach_add_(old, new)
        self._run_hooks(which)

    def _run_hooks(self, which: Sequence[int]) -> None:
        """Gradients do not reach the sharded parameters through autograd, so its hooks are called here."""
        for index in which:
            sharded = self.sharded[index]
            hooks = sharded._post_accumulate_grad_hooks
            if hooks:
                for hook in list(hooks.values()):
                    hook(sharded)

    # -- changes from outside --------------------------------------------------------------------------------

    def readopt(self) -> torch.Tensor | None:
        """Take up what the modules now show: after ``to_empty``, ``.to`` or ``load_state_dict(assign=True)``.

        Returns a new flat shard if any parameter's memory is no longer a view of the old one, ``None``
        otherwise.

        Raises:
            ValueError: a parameter was replaced by something that is not a ``DTensor`` of the same layout.
        """
        current = [p.places[0].module._parameters.get(p.places[0].name) for p in self._parameters]
        changed = False
        for index, (parameter, now) in enumerate(zip(self._parameters, current, strict=True)):
            segment = self._layout.segments[index]
            if not isinstance(now, DTensor) or not isinstance(now, nn.Parameter):
                raise ValueError(
                    f"parameter '{parameter.fqn}' was replaced by a {type(now).__name__} after fully_shard; "
                    "expected its sharded DTensor. "
                    "Change parameters before wrapping, or load them by state dict"
                )
            if tuple(now._local_tensor.shape) != segment.shard_shape:
                raise ValueError(
                    f"parameter '{parameter.fqn}' now has a local shape of {tuple(now._local_tensor.shape)}, "
                    f"its unit was laid out for {segment.shard_shape}"
                )
            self.sharded[index] = now
            changed |= not self._is_view_of_shard(now._local_tensor, segment)
        self._specs = [_spec_of(parameter) for parameter in self.sharded]
        if not changed:
            self._show_sharded = self._assignments(self.sharded)
            return None
        with torch.no_grad():
            like = self.sharded[0]._local_tensor  # type: ignore[attr-defined]
            self.shard = torch.zeros(self._layout.shard_numel, dtype=like.dtype, device=like.device)
            for segment, sharded in zip(self._layout.segments, self.sharded, strict=True):
                part = self._part(self.shard, segment)
                part.copy_(sharded._local_tensor)  # type: ignore[attr-defined]
                sharded._local_tensor = part.data  # type: ignore[attr-defined]
        self._show_sharded = self._assignments(self.sharded)
        return self.shard

    def _is_view_of_shard(self, local: torch.Tensor, segment: Segment) -> bool:
        if local.numel() == 0:
            return local.dtype == self.shard.dtype and local.device == self.shard.device
        return (
            local.untyped_storage()._cdata == self.shard.untyped_storage()._cdata
            and local.storage_offset() == segment.shard_offset
            and local.dtype == self.shard.dtype
        )


def _spec_of(parameter: Any) -> Any:
    return parameter._spec


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
