"""Parameters that go between host and device: FSDP1's, when it offloads or saves them.

torch lets `parameter.data = tensor` change the device for devices that it knows. For others the whole
implementation behind the Python object has to be swapped. Autograd's graph, its accumulators and hooks belong
to the implementation, so that each side is kept and comes back when its device does:

    Python object ──> [device side: accumulator, hooks]        parameter.data = host tensor
                      [host side                      ]  ───>  swaps the two; the data is set on the new side

A gradient stays with the Python object, as it does for torch's own devices, also while it is on the other
side (FSDP1 reshards a parameter to the host before it reduces the gradient on the device).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.fsdp import FlatParameter

from fsdpbench.sim.torch_device.tensors import is_on_device
from fsdpbench.torch_internals import replace, swap_tensor_impl

_OTHER_SIDE = "_sim_other_side"
_GRAD_ELSEWHERE = "_sim_grad_elsewhere"


def install_two_sided_parameters() -> None:
    """Let `Tensor.data` be assigned across host and device."""
    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_on_device(self) != is_on_device(value):
            _change_side(self, value, data, grad)
        else:
            data.__set__(self, value)

    replace(torch.Tensor, data=property(data.__get__, assign))


def _change_side(tensor: torch.Tensor, value: torch.Tensor, data: Any, grad: Any) -> None:
    kept = vars(tensor)
    is_flat = isinstance(tensor, FlatParameter)  # an `nn.Parameter` with a mark on it
    if is_flat:
        _keep_gradients()
        gradient = grad.__get__(tensor)
        if gradient is not None:
            grad.__set__(tensor, None)
            kept[_GRAD_ELSEWHERE] = gradient
    other = kept.get(_OTHER_SIDE)
    if other is None or is_on_device(other) != is_on_device(value):
        other = value.detach()
    else:
        data.__set__(other, value)
    other.requires_grad_(tensor.requires_grad)
    swap_tensor_impl(tensor, other)
    if is_flat:
        kept[_OTHER_SIDE] = other


@functools.cache
def _keep_gradients() -> None:
    """Let parameters show a gradient of the other side. From the first time on that one changes sides: all
    accesses to gradients become slower by it."""
    grad: Any = torch.Tensor.grad

    def read(self: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = grad.__get__(self)
        return vars(self).get(_GRAD_ELSEWHERE) if found is None else found

    def write(self: torch.Tensor, value: torch.Tensor | None) -> None:
        vars(self).pop(_GRAD_ELSEWHERE, None)
        if value is not None and is_on_device(value) != is_on_device(self):
            grad.__set__(self, None)
            vars(self)[_GRAD_ELSEWHERE] = value
        else:
            grad.__set__(self, value)

    replace(torch.nn.Parameter, grad=property(read, write))
