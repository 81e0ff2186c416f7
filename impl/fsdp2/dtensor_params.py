"""The presentation of ``fully_shard``: each parameter stays in its module, sharded as a ``DTensor``.

The local tensors of a unit's ``DTensor`` parameters are views of the unit's flat shard. The local tensors of
their gradients are views of the reduce-scatter output.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..runtime.buffer import HOST, HostOffload, new_shard
from ..runtime.gradient_state import any_gradient, gradients_arrived
from ..runtime.presentation import TRAINS, VERSION, ShownInPlace, UnitParameter, Unreduced, mark_replaced
from ..shared import error_text
from ..shared.layout import Segment, UnitLayout, chunk_rows
from ..shared.placement import ParameterPlan, local_tensor, new_dtensor
from ..shared.torch_internals import DisableTorchFunction, foreach_add_

# Methods of tensors with all-gather extensions (``extended.py``).
PRE_ALL_GATHER, POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_GRADS = repeat("grad")
_TITLE = "fully_shard"


class DTensorPresentation(ShownInPlace):
    """Shows ``DTensor`` parameters when sharded and plain ones when unsharded.

    Args:
        plans: how each parameter is sharded, in layout order.
        originals: the original parameters. Their values are copied into the shard.
    """

    def __init__(
        self,
        plans: Sequence[ParameterPlan],
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
        offload: HostOffload | None = None,
    ) -> None:
        super().__init__(layout, parameters)
        self._offload = offload
        self.shard = self._cut(originals)
        self.sharded = [
            self._make_sharded(plan, segment, original)
            for plan, segment, original in zip(plans, layout.segments, originals, strict=True)
        ]
        self._sharded_changed()
        self.show_sharded()
        mark_replaced(originals, _TITLE)

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        super().adopt_unsharded(parameters)
        mark_replaced(parameters, _TITLE)

    def _cut(self, originals: Sequence[nn.Parameter]) -> torch.Tensor:
        like = local_tensor(originals[0])
        layout = self._layout
        shard = new_shard(layout.shard_numel, like.dtype, like.device, self._offload)
        for segment, original in zip(layout.segments, originals, strict=True):
            start, end = chunk_rows(segment.shape[segment.dim], layout.world_size, layout.rank)
            if end > start:
                whole = local_tensor(original).detach()
                self._part(shard, segment).copy_(whole.narrow(segment.dim, start, end - start))
        return shard

    @staticmethod
    def _part(shard: torch.Tensor, segment: Segment) -> torch.Tensor:
        return segment.in_shard(shard).view(segment.shard_shape)

    def _make_sharded(self, plan: ParameterPlan, segment: Segment, original: nn.Parameter) -> nn.Parameter:
        tensor = new_dtensor(_of_its_own(self._part(self.shard, segment)), plan.spec)
        return nn.Parameter(tensor, requires_grad=original.requires_grad)

    def _sharded_changed(self) -> None:
        super()._sharded_changed()
        self._specs: list[Any] = [cast(Any, parameter)._spec for parameter in self.sharded]

    # -- Presentation ----------------------------------------------------------------------------------------

    unreduced: Unreduced | None = None
    # Whether the parameters have all-gather extensions (``extended.py``).
    extended = False

    # Whether only some of several modules wrapped as one have been converted (``.to``) yet.
    half_converted = False

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        """Count writes. ``show_unsharded`` handles freezing and ``readopt`` new data."""
        if self.half_converted:
            self.readopt()  # raises the error
        for registry, shown in self._show_sharded:  # ``is_shown``, inlined
            if not all(map(is_, map(registry.get, shown), shown.values())):
                known = zip(self._parameters, self._shown_now(), self.sharded, strict=True)
                _refuse_replaced(next((each.fqn for each, now, own in known if now is not own), "(tied)"))
        with DisableTorchFunction():
            versions = list(map(VERSION, self.sharded))
        if versions != self._versions:
            self._versions = versions
            self.writes += 1
        return False

    def changed(self) -> bool:
        return self._versions != list(map(VERSION, self.sharded))

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        sharded, specs = self.sharded, self._specs
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        with DisableTorchFunction():  # reads attributes of tensor subclasses
            if len(which) == len(sharded) and all(map(TRAINS, sharded)) and not any_gradient(sharded):
                any(map(setattr, sharded, _GRADS, map(new_dtensor, gradients, specs)))
                gradients = ()  # skip the loop below
            for index, gradient in zip(which, gradients, strict=False):
                parameter = sharded[index]
                grad: Any = parameter.grad
                if self._trained[index] and not parameter.requires_grad:
                    continue  # frozen since forward; if frozen before, it was unfrozen while unsharded
                if grad is None:
                    parameter.grad = new_dtensor(gradient, specs[index])
                else:
                    old.append(grad._local_tensor)
                    new.append(gradient)
        if old:
            foreach_add_(old, new)
        gradients_arrived(sharded, which)

    # -- changes by the user ---------------------------------------------------------------------------------

    def uniform(self) -> bool:
        """Return whether the parameters in the modules have the same dtype and device."""
        return len({(now.device, now.dtype) for now in self._shown_now() if now is not None}) == 1

    def _shown_now(self) -> list[nn.Parameter | None]:
        places = [parameter.places[0] for parameter in self._parameters]
        return [place.module._parameters.get(place.name) for place in places]

    def readopt(self) -> torch.Tensor | None:
        """Adopt the modules' parameters after ``to_empty``, ``.to`` or ``load_state_dict(assign=True)``.

        Return a new flat shard if a parameter is no longer a view of the old one, else ``None``.

        Raises:
            ValueError: a parameter was replaced by something that is not a ``DTensor`` of the same layout.
            AssertionError: the parameters have different dtypes now.
            NotImplementedError: a tensor got all-gather extensions after it was wrapped.
        """
        current = self._shown_now()
        for index, (parameter, now) in enumerate(zip(self._parameters, current, strict=True)):
            segment = self._layout.segments[index]
            if not isinstance(now, DTensor) or not isinstance(now, nn.Parameter):
                _refuse_replaced(parameter.fqn)
            if tuple(now._local_tensor.shape) != segment.shard_shape:
                given, wanted = tuple(now._local_tensor.shape), segment.shard_shape
                raise ValueError(error_text("dtensor_params.readopt", parameter.fqn, given, wanted))
            if is_extended(now._local_tensor, parameter.fqn) and not self.extended:
                raise NotImplementedError(error_text("dtensor_params.late_extensions", parameter.fqn))
            self.sharded[index] = now
        if len({now.dtype for now in self.sharded}) > 1:
            kinds = ", ".join(
                f"'{p.fqn}' {now.dtype}" for p, now in zip(self._parameters, self.sharded, strict=True)
            )
            raise AssertionError(error_text("dtensor_params.dtypes", kinds))
        self.half_converted = False
        shard = self._take_up()
        self._sharded_changed()
        return shard

    @torch.no_grad()
    def _take_up(self) -> torch.Tensor | None:
        """Copy the local tensors to a new shard, unless all are views of the old one."""
        locals_ = [parameter._local_tensor for parameter in self.sharded]  # type: ignore[attr-defined]
        if all(map(self._is_view_of_shard, locals_, self._layout.segments)):
            return None
        like = locals_[0]
        # Parameters materialised on the device stay there; the runtime raises an error for them.
        offload = self._offload if like.device == HOST else None
        self.shard = new_shard(self._layout.shard_numel, like.dtype, like.device, offload)
        for segment, sharded, local in zip(self._layout.segments, self.sharded, locals_, strict=True):
            part = self._part(self.shard, segment)
            part.copy_(local)
            sharded._local_tensor = _of_its_own(part)  # type: ignore[attr-defined]
        return self.shard

    def _is_view_of_shard(self, local: torch.Tensor, segment: Segment) -> bool:
        shard = self.shard
        if local.dtype != shard.dtype or local.device != shard.device:
            return False
        if local.numel() == 0:
            return True
        if local.untyped_storage()._cdata == shard.untyped_storage()._cdata:
            return local.storage_offset() == segment.shard_offset
        start = shard.data_ptr()
        return start != 0 and local.data_ptr() == start + segment.shard_offset * shard.itemsize


def _refuse_replaced(fqn: str) -> NoReturn:
    raise ValueError(error_text("dtensor_params.refuse_replaced", fqn))


def _of_its_own(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` as a tensor with its own storage object over the same memory, if the device can.

    A ``DTensor`` inherits the storage offset of its local tensor, and torch cannot pickle or copy one with an
    offset other than 0. Also, saving a tensor saves its storage, which would be the whole unit's.
    """
    if part.numel() == 0:
        return torch.empty_like(part)
    if type(part) is not torch.Tensor or part.device.type not in ("cpu", "cuda"):
        return part.data
    try:
        return torch.from_dlpack(part.detach())
    except (BufferError, RuntimeError):  # a dtype that DLPack lacks
        return part.data


def is_extended(local: torch.Tensor, fqn: str) -> bool:
    """Return whether ``local`` has all-gather extensions.

    Raises:
        AssertionError: it has only one of the two methods.
    """
    pre, post = hasattr(local, PRE_ALL_GATHER), hasattr(local, POST_ALL_GATHER)
    if pre != post:
        raise AssertionError(
            error_text(
                "dtensor_params.is_extended",
                PRE_ALL_GATHER,
                POST_ALL_GATHER,
                fqn,
                type(local).__name__,
                PRE_ALL_GATHER if pre else POST_ALL_GATHER,
            )
        )
    return pre
