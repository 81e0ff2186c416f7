"""Gradients that ``no_sync()`` keeps unsharded, shown in ``.grad`` of the sharded parameters, as in torch.

Autograd accumulates them at the unsharded parameters, in the compute dtype. Between two backward passes
``.grad`` of the sharded parameters shows the same memory. So changes to ``.grad`` apply to them:
``zero_grad()`` drops them, scaling scales them. Gradients that were reduced earlier are set aside. Without
sharding they are added instead, because averaging equal gradients over ranks does not change them::

    backward            .grad: reduced
    no_sync: backward   .grad: unsharded, of this rank     aside: reduced
    backward            .grad: reduced + reduced
"""

import torch
from torch import nn

from ..runtime.presentation import HoldsGradients
from ..shared import error_text
from ..shared.layout import UnitLayout


def assign_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set ``parameter.grad``, even if ``gradient`` has another shape, dtype or device.

    torch rejects such a gradient, so it is set as new ``.data`` of a matching gradient.
    """
    parameter.grad = None
    if gradient is None or _alike(gradient, parameter):
        parameter.grad = gradient
        return
    data, gradient.data = gradient.data, torch.empty_like(parameter)
    parameter.grad = gradient
    gradient.data = data


class _Shown:
    """One sharded parameter whose ``.grad`` shows an unsharded gradient.

    Args:
        whole: nothing is sharded, so the earlier reduced gradient can be added.
    """

    def __init__(self, parameter: nn.Parameter, value: torch.Tensor, whole: bool) -> None:
        self.value = value
        self.reduced = parameter.grad
        if whole and self.reduced is not None and _alike(self.reduced, value):
            value.add_(self.reduced)
            self.reduced = None
        assign_gradient(parameter, value.detach())

    def take_back(self, parameter: nn.Parameter) -> bool:
        """Apply the user's changes and restore the reduced gradient. Return False if the user dropped it."""
        now = parameter.grad
        if now is None or now.shape != self.value.shape:
            return False  # the user dropped it, or set a gradient of the sharded shape
        if now.data_ptr() != self.value.data_ptr():
            self.value.copy_(now)
        parameter.grad = self.reduced
        return True


class _Unreduced:
    shown = False

    def check_hidden(self) -> None:
        """Raise AssertionError if ``.grad`` shows unsharded gradients, when sharded ones are needed."""
        if self.shown:
            raise AssertionError(error_text("unreduced.check_hidden"))

    def _taken_back(self, unit: HoldsGradients) -> None:
        self.shown = False
        unit.gradients.held_back = bool(_unsharded_gradients(unit))


class UnreducedOriginals(_Unreduced):
    """Unreduced gradients with original parameters: each parameter shows its own gradient.

    Args:
        sharded: the parameters. The owner of the list may change it.
    """

    def __init__(self, layout: UnitLayout, sharded: list[nn.Parameter]) -> None:
        self._whole = layout.world_size == 1
        self._sharded = sharded
        self._parts: dict[int, _Shown] = {}

    def show(self, unit: HoldsGradients) -> None:
        self._parts = {
            index: _Shown(self._sharded[index], value, self._whole)
            for index, value in _unsharded_gradients(unit).items()
        }
        self.shown = bool(self._parts)

    def take_back(self, unit: HoldsGradients) -> None:
        for index, part in self._parts.items():
            if not part.take_back(self._sharded[index]):
                _drop(unit, index)
        self._parts = {}
        self._taken_back(unit)


class UnreducedFlat(_Unreduced):
    """Unreduced gradients with a flat parameter: one flat gradient, with zeros for missing ones."""

    def __init__(self, layout: UnitLayout, flat_param: nn.Parameter) -> None:
        self._layout = layout
        self._flat_param = flat_param
        self._whole: _Shown | None = None

    def show(self, unit: HoldsGradients) -> None:
        values = _unsharded_gradients(unit)
        if not values:
            return
        like = next(iter(values.values()))
        flat = torch.zeros(self._layout.parameter_numel, dtype=like.dtype, device=like.device)
        for index, value in values.items():
            segment = self._layout.segments[index]
            part = segment.in_full(flat)
            part.copy_(value)
            unit.unsharded[index].grad = part  # autograd accumulates here from now on
        self._whole = _Shown(self._flat_param, flat, self._layout.world_size == 1)
        self.shown = True

    def take_back(self, unit: HoldsGradients) -> None:
        assert self._whole is not None
        if not self._whole.take_back(self._flat_param):
            for index in range(len(self._layout.segments)):
                _drop(unit, index)
        self._whole = None
        self._taken_back(unit)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _unsharded_gradients(unit: HoldsGradients) -> dict[int, torch.Tensor]:
    """Return unreduced gradients by parameter index; none if the unit has non-plain parameters."""
    if not unit.plain:
        return {}
    return {index: p.grad for index, p in enumerate(unit.unsharded) if p.grad is not None}


def _drop(unit: HoldsGradients, index: int) -> None:
    if unit.unsharded:
        unit.unsharded[index].grad = None
