"""The default FSDP1 presentation: one flat, 1-D parameter for all parameters of a unit.

The wrapped module registers the ``FlatParameter``. The modules inside have their parameters as plain
attributes, which ``parameters()`` does not list. ``original_params.py`` has the other mode,
``use_orig_params``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from ..runtime.buffer import HostOffload, new_shard
from ..runtime.gradient_state import gradients_arrived
from ..runtime.presentation import (
    CHECKPOINTED,
    FLAT_NAME,
    Assignments,
    ModulePlace,
    Presentation,
    UnitParameter,
    assignments,
    follow_requires_grad,
    is_shown,
    mark_replaced,
    show,
)
from ..runtime.reduce_ways import fill_missing
from ..shared import error_text
from ..shared.layout import Segment, UnitLayout, copy_in
from ..shared.torch_internals import ActivationWrapper, current_graph_task_id
from .unreduced import UnreducedFlat

# A unit's parameters are registered, and so listed in state dicts, in the same order as in torch.
#
# torch removes all parameters of a unit from their modules and registers them again: each at its first name,
# then the other names of tied ones in the order of the traversal. So a tied weight comes after the other
# parameters of a module::
#
#     head.weight (tied to embed.weight), head.bias    ->    head.bias, head.weight


def without_activation_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper for activation checkpointing or offloading, or ``module`` itself."""
    return cast(nn.Module, module._modules[CHECKPOINTED]) if isinstance(module, ActivationWrapper) else module


# (parameter index, place), in order of registration.
Registration = Sequence[tuple[int, ModulePlace]]


def registration_order(root: nn.Module, parameters: Sequence[UnitParameter]) -> Registration:
    """Return the registration order of a unit's parameters, which are still registered below ``root``."""
    places = {
        (place.module, place.name): (index, place)
        for index, parameter in enumerate(parameters)
        for place in parameter.places
    }
    if len(places) == len(parameters):
        return list(places.values())
    first = {(parameter.places[0].module, parameter.places[0].name) for parameter in parameters}
    order = {key: place for key, place in places.items() if key in first}
    for module in _visits(root, frozenset()):
        for name in module._parameters:
            key = (module, name)
            if key in first:
                first.remove(key)  # if visited again, it counts as another name
            elif key in places:
                order.pop(key, None)
                order[key] = places[key]
    return list(order.values())


def _visits(module: nn.Module, above: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules, once for each of their names; skip cycles."""
    if module in above:
        return
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _visits(child, above | {module})


def register_in_order(order: Registration) -> None:
    """Register the shown parameters again in ``order``, so that modules list them in this order."""
    for _, place in order:
        registry = place.module._parameters
        registry[place.name] = registry.pop(place.name)


def flat_range(begin: int, shard_numel: int, numel: int) -> tuple[int, int]:
    """Return the part ``[start, end)`` of a parameter in a shard that starts at its element ``begin``."""
    start = min(max(begin, 0), numel)
    return start, max(min(begin + shard_numel, numel), start)


def flat_layout(shapes: Sequence[Sequence[int]], world_size: int, rank: int) -> UnitLayout:
    """Return the FSDP1 layout: concatenated parameters, padded at the end to a multiple of ranks."""
    total = sum(math.prod(shape) for shape in shapes)
    shard_numel = -(-total // world_size)
    begin = rank * shard_numel
    segments: list[Segment] = []
    offset = 0
    for shape in shapes:
        numel = math.prod(shape)
        start, end = flat_range(begin - offset, shard_numel, numel)
        segments.append(
            Segment(
                shape=tuple(shape),
                numel=numel,
                shard_offset=offset + start - begin if end > start else 0,
                shard_shape=(end - start,),
                shard_range=(start, end),
                shard_numel=end - start,
                shard_padded_numel=end - start,
                full_offset=offset,
                full_padded_numel=numel,
            )
        )
        offset += numel
    return UnitLayout(
        world_size, rank, tuple(segments), shard_numel, world_size * shard_numel, rank_major=False, whole=True
    )


class FlatParameter(nn.Parameter):
    """One 1-D parameter for all parameters of a unit. Its data is this rank's shard.

    ``_fqns``, ``_param_infos``, ``_shapes`` and ``_numels`` describe the original parameters.
    ``_shard_ranges`` has the ``[start, end)`` of each that is in this shard, ``_shared_param_infos`` the
    other places of tied ones. The sizes count elements; ``_padded_unsharded_size`` and ``_sharded_size``
    include padding.
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


def flatten(
    layout: UnitLayout, originals: Sequence[nn.Parameter], offload: HostOffload | None
) -> torch.Tensor:
    """Return this rank's 1-D shard of a unit, filled from its original parameters."""
    like = originals[0]
    shard = new_shard(layout.shard_numel, like.dtype, like.device, offload)
    layout.store(originals, shard)
    return shard


def flat_parameter(
    layout: UnitLayout, parameters: Sequence[UnitParameter], shard: torch.Tensor, requires_grad: bool
) -> FlatParameter:
    """Return the ``FlatParameter`` of a unit over this rank's ``shard``."""
    flat = FlatParameter(shard.data, requires_grad=requires_grad)
    flat._fqns = tuple(p.fqn for p in parameters)
    flat._param_infos = tuple(p.places[0] for p in parameters)
    flat._shared_param_infos = tuple(p.places[1:] for p in parameters)
    flat._shapes = tuple(torch.Size(s.shape) for s in layout.segments)
    flat._numels = tuple(s.numel for s in layout.segments)
    flat._shard_ranges = tuple(s.shard_range for s in layout.segments)
    flat._unpadded_unsharded_size = torch.Size((layout.parameter_numel,))
    flat._padded_unsharded_size = torch.Size((layout.gathered_numel,))
    flat._sharded_size = shard.size()
    return flat


class FlatPresentation(Presentation):
    """Shows one ``FlatParameter``; the original parameters become plain attributes of their modules.

    Args:
        home: the module that registers the flat parameter.
        order: the order in which full parameters are registered while they are shown.
    """

    drops_without_grad = refuses_writes = True
    flat_param: FlatParameter

    def __init__(
        self,
        home: nn.Module,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        originals: Sequence[nn.Parameter],
        offload: HostOffload | None,
        order: Registration,
    ) -> None:
        self._home = home
        self._layout = layout
        self._parameters = parameters
        self._order = order
        # Whether full parameters are shown, outside of forward and backward.
        self.shows_full = False
        self._full: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self.shard = flatten(layout, originals, offload)
        self.flat_param = flat_parameter(layout, parameters, self.shard, originals[0].requires_grad)
        # The attributes of the modules; they have no valid values before the first gather.
        self._attributes: list[torch.Tensor] = []
        self.unreduced: UnreducedFlat = UnreducedFlat(layout, self.flat_param)
        self._version = self.flat_param._version
        self._trains = self.flat_param.requires_grad
        self._shown: Assignments = []
        self._show_parts()

    def show_unsharded(self) -> None:
        """Apply freezing since a prefetched gather; the attributes of the modules do not change."""
        if self.flat_param.requires_grad is not self._trains and current_graph_task_id() == -1:
            self.follow_freezing()

    def trained(self) -> Sequence[nn.Parameter]:
        return [self.flat_param]

    def _show_parts(self) -> None:
        """Show attributes over the shard's memory in the original shapes. No optimizer may hold them."""
        shard = self.shard if self._layout.parameter_numel else self.shard.new_empty(1)
        self._attributes = [shard[0].expand(segment.shape) for segment in self._layout.segments]
        mark_replaced(self._attributes, type(self._home).__name__)
        self._show_attributes()

    def _show_attributes(self) -> None:
        for described in self._parameters:
            for place in described.places:
                place.module._parameters.pop(place.name, None)
        self._shown = assignments(self._parameters, self._attributes, vars)
        self._shown.append((self._home._parameters, {FLAT_NAME: self.flat_param}))
        show(self._shown)

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._unsharded = list(parameters)
        for parameter in cast(Sequence[Any], parameters):  # as in torch, `parameters()` must not list them
            if hasattr(parameter, "_is_param"):
                parameter._is_param = False
            else:
                parameter.__class__ = torch.Tensor
        self._attributes = list(parameters)
        mark_replaced(parameters, type(self._home).__name__)
        self._show_attributes()

    # -- changes by the user ---------------------------------------------------------------------------------

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        if self.shows_full:
            refuse_shown_full()
        flat = self.flat_param
        if not is_shown(self._shown):
            self._refuse_replaced()
        if flat.requires_grad is not self._trains:  # checked here to save a call on each gather
            self.follow_freezing()
        if "_in_backward_optimizers" in flat.__dict__:
            raise RuntimeError(error_text("flat_param.take_up_changes"))
        wrote = self.replaced()
        if wrote:
            _check_elements(self.flat_param.numel(), self._layout.shard_numel)
            before_write()
            with torch.no_grad():
                self.shard.copy_(flat.view(-1))
            flat.data = self.shard.data
        self.writes += wrote or flat._version != self._version
        self._version = flat._version
        return wrote

    def _refuse_replaced(self) -> NoReturn:
        replaced = (
            described.fqn
            for described, value in zip(self._parameters, self._attributes, strict=True)
            if any(place.module.__dict__.get(place.name) is not value for place in described.places)
        )
        raise ValueError(error_text("flat_param.refuse_replaced", next(replaced, FLAT_NAME)))

    def changed(self) -> bool:
        flat = self.flat_param
        return flat._version != self._version or self.replaced() or not is_shown(self._shown)

    def follow_freezing(self) -> None:
        trains = self.flat_param.requires_grad
        if trains is not self._trains:
            self._trains = trains
            follow_requires_grad(self._parameters, self._unsharded, [trains] * len(self._parameters))

    def replaced(self) -> bool:
        """Return whether the user assigned new data to the flat parameter."""
        return self.flat_param.data_ptr() != self.shard.data_ptr()

    def flat(self) -> FlatParameter:
        """Return the flat parameter."""
        return self.flat_param

    def flat_gradient(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient, 1-D, or ``None`` without a gradient."""
        self.unreduced.check_hidden()
        return self.flat_param.grad

    def which_gradients(self) -> list[bool]:
        """Return for each original parameter whether it has a gradient on this rank."""
        return [self.flat_param.grad is not None] * len(self._parameters)

    def keep_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store this rank's part of full ``gradients``, which the user may have changed."""
        if self.flat_param.grad is not None:
            for segment, gradient in zip(self._layout.segments, gradients, strict=True):
                if gradient is not None:
                    segment.store(gradient, self.flat_param.grad)

    def show_full(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full ``values`` as parameters of their modules and return the parameters."""
        self.shows_full = True
        self._home._parameters.pop(FLAT_NAME, None)
        shown: list[nn.Parameter] = []
        for index, described in enumerate(self._parameters):
            parameter = nn.Parameter(values[index], requires_grad=described.requires_grad)
            if gradients is not None:
                parameter.grad = gradients[index]
            shown.append(parameter)
        for index, place in self._order:
            del place.module.__dict__[place.name]
            place.module._parameters[place.name] = shown[index]
        self._full = shown
        return shown

    def hide_full(self) -> None:
        """Undo ``show_full``."""
        self.shows_full = False
        mark_replaced(self._full, type(self._home).__name__)
        self._full = []
        self._show_attributes()

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        if not self.flat_param.requires_grad:
            return  # frozen since forward
        before = self.flat_param.grad
        if before is None:
            self.flat_param.grad = gradient
        else:
            before.add_(gradient)
        gradients_arrived([self.flat_param], (0,))

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        like = gradients[0]
        flat = torch.empty(self._layout.shard_numel, dtype=like.dtype, device=like.device)
        pieces = [piece for piece in fill_missing(self._layout, which, gradients) if piece.numel()]
        if pieces:
            copy_in([p if p.dim() else p.view(1) for p in pieces], flat.view(1, -1))
        self.deliver(flat, which, ())

    def readopt(self) -> torch.Tensor | None:
        """Adopt the flat parameter's memory after the module was moved; return the new shard, if any."""
        if self.shows_full:
            refuse_shown_full()
        for described in self._parameters:
            for place in described.places:
                check_place(described, place, place.module.__dict__.get(place.name))
        data = self.flat_param.data
        if data.untyped_storage()._cdata == self.shard.untyped_storage()._cdata:
            return None
        _check_elements(self.flat_param.numel(), self._layout.shard_numel)
        self.shard = data
        if not self._unsharded:
            self._show_parts()
        return data


def refuse_shown_full() -> NoReturn:
    """Raise AssertionError: sharded parameters are required, but full ones are shown."""
    raise AssertionError(error_text("flat_param.shown_full"))


def check_place(parameter: UnitParameter, place: ModulePlace, found: Any) -> Any:
    """Return ``found``, the value at a place of ``parameter``. Raises ``ValueError`` unless a tensor."""
    if not isinstance(found, torch.Tensor):
        kind = type(place.module).__name__
        raise ValueError(error_text("flat_param.check_place", parameter.fqn, place.name, kind))
    return found


def _check_elements(given: int, expected: int) -> None:
    """Raise AssertionError unless new data of a flat parameter has as many elements as the shard."""
    if given != expected:
        raise AssertionError(error_text("flat_param.check_elements", given, expected))
