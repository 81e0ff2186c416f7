"""Python's access to host memory without torch's operators: pinning, reading, and the data of parameters.

The sanitizer follows such reads, because they may come before a copy from the device has ended.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from fsdpbench.base.torch_internals import patch, replace, replaced, swap_tensor_impl, tree_leaves
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.operators.host_memory import HostShapes, local_tensor
from fsdpbench.sim.torch_device.operators.known_values import unmark_placeholders
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.strict.words import legacy_type
from fsdpbench.sim.torch_device.tensors import has_no_values, is_on_device, pinned_copy
from fsdpbench.sim.torch_device.tensors import is_pinned as lies_in_pinned_memory


def install_host_access(accelerator: Accelerator) -> None:
    """Patch `Tensor.pin_memory`, `is_pinned`, `tolist`, `numpy`, `torch.save`, and reads by C++ code."""
    _patch_pinning(accelerator)
    _patch_models_on_host(accelerator)
    _patch_reads(accelerator)
    healthy = functools.partial(_of_healthy_windows, accelerator)
    replace(torch, istft=passing_to(healthy)(torch.istft), ctc_loss=passing_to(_by_lengths)(torch.ctc_loss))


def _of_healthy_windows(accelerator: Accelerator, istft: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `istft`, accepting its check on the device that windows overlap enough."""
    with replaced(accelerator, trusts_windows=True):
        return istft(*args, **kwargs)


def _by_lengths(
    ctc_loss: Callable[..., torch.Tensor], scores: Any, targets: Any, *given: Any, **kwargs: Any
) -> torch.Tensor:
    """Call `ctc_loss` with lengths as lists: under a dispatch mode, kernels would get host tensors."""
    lists = [each.tolist() if isinstance(each, torch.Tensor) else each for each in given]
    return ctc_loss(scores, targets, *lists, **kwargs)


def _patch_pinning(accelerator: Accelerator) -> None:
    tensor_type = torch.Tensor
    original_pin, original_is_pinned = tensor_type.pin_memory, tensor_type.is_pinned

    def pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.device.type == "cpu" and accelerator.started:
            return pinned_copy(self)
        if is_on_device(self):
            raise RuntimeError(f"cannot pin '{legacy_type(self)}' only dense CPU tensors can be pinned")
        return original_pin(self, *args)

    def is_pinned(self: torch.Tensor, *args: Any) -> bool:
        return lies_in_pinned_memory(self) if accelerator.started else original_is_pinned(self, *args)

    replace(tensor_type, pin_memory=pin_memory, is_pinned=is_pinned)


def _patch_models_on_host(accelerator: Accelerator) -> None:
    """Let `to_empty`, initialization in pinned memory and clipping compute no values (`HostShapes`)."""

    def without_values(host: bool) -> AbstractContextManager[object]:
        return (
            HostShapes() if host and accelerator.started and accelerator.sanitizer is None else nullcontext()
        )

    def to_empty(original: Any, self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        with without_values(device is not None and torch.device(device).type == "cpu"):
            module: nn.Module = original(self, device=device, recurse=recurse)
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            unmark_placeholders(local_tensor(tensor))  # values may follow
        return module

    def initialise(original: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        with without_values(_is_offloaded(tensor)):
            result: torch.Tensor = original(tensor, *args, **options)
        return result

    def clip_grad_norm_(original: Any, parameters: Any, *args: Any, **options: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [local_tensor(each.grad) for each in parameters if each.grad is not None]
        with without_values(any(map(has_no_values, gradients))):
            norm: torch.Tensor = original(parameters, *args, **options)
        return norm

    replace(nn.Module, to_empty=passing_to(to_empty)(nn.Module.to_empty))
    fillers = {name: call for name, call in vars(nn.init).items() if name[-1] == "_" != name[0]}
    replace(nn.init, **{name: passing_to(initialise)(call) for name, call in fillers.items()})
    clip = passing_to(clip_grad_norm_)(nn.utils.clip_grad_norm_)
    replace(nn.utils, clip_grad_norm_=clip)
    replace(nn.utils.clip_grad, clip_grad_norm_=clip)


def _is_offloaded(parameter: torch.Tensor) -> bool:
    """Return whether a host tensor is pinned, or the shard of a mesh of GPUs."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != "cpu":
        return local_tensor(parameter).device.type == "cpu"
    return lies_in_pinned_memory(local_tensor(parameter))


def _patch_reads(accelerator: Accelerator) -> None:
    tensor_type = torch.Tensor
    original_tolist, original_numpy, original_save = tensor_type.tolist, tensor_type.numpy, torch.save

    def read(tensor: torch.Tensor, name: str) -> None:
        if accelerator.sanitizer is not None and not is_on_device(tensor):
            accelerator.sanitizer.host_reads(tensor, name)

    def tolist(self: torch.Tensor) -> Any:
        read(self, "Tensor.tolist")
        return original_tolist(self.cpu() if is_on_device(self) else self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read(self, "Tensor.numpy")
        return original_numpy(self, *args, **kwargs)

    @functools.wraps(original_save)
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        if accelerator.sanitizer is not None:
            for value in tree_leaves(obj):
                tensor = _saved_tensor(value)
                if tensor is not None:
                    read(tensor, "torch.save")
        original_save(obj, *args, **kwargs)

    replace(tensor_type, tolist=tolist, numpy=numpy)
    replace(torch, save=save)


def _saved_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, or a tensor over the storage that `pickle` saves; None for other values."""
    if isinstance(value, torch.storage.TypedStorage):
        value = value.untyped()
    if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
        value = torch.empty(0, dtype=torch.uint8).set_(value)
    return value if isinstance(value, torch.Tensor) else None


_OTHER_SIDE = "_sim_other_side"
_GRAD_ELSEWHERE = "_sim_grad_elsewhere"


def install_two_sided_parameters() -> None:
    """Let assignments to `Tensor.data` cross between host and device, as FSDP1 (offload, saving) and
    `Module.to` need: optimizers created earlier, and modules that share a weight, keep the parameter.

    torch allows `parameter.data = tensor` to change the device only between known devices. For others, the
    implementation behind the Python object must be swapped. Autograd's graph, accumulators and hooks belong
    to the implementation, so each side is kept and restored with its device:
        Python object ──> [device side: accumulator, hooks]        parameter.data = host tensor
                          [host side                      ]  ───>  swaps the two; data is set on the new side
    A gradient stays with the Python object even while it is on the other side (FSDP1 reshards a parameter to
    the host before it reduces the gradient on the device).
    """
    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_on_device(self) != is_on_device(value):
            _change_side(self, value, data, grad)
        else:
            data.__set__(self, value)

    replace(torch.Tensor, data=property(data.__get__, assign))
    patch("has_compatible_type", passing_to(_is_assigned))


def _is_assigned(original: Callable[..., bool], tensor: Any, moved: Any) -> bool:
    """Return whether `Module.to` assigns the moved tensor, as between CPU and CUDA."""
    crosses = isinstance(tensor, torch.nn.Parameter) and is_on_device(tensor) != is_on_device(moved)
    return original(tensor, moved) or (crosses and not (tensor.is_meta or moved.is_meta))


def _change_side(tensor: torch.Tensor, value: torch.Tensor, data: Any, grad: Any) -> None:
    kept = vars(tensor)
    is_flat = isinstance(tensor, FlatParameter)  # an `nn.Parameter` with a mark
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
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    swap_tensor_impl(tensor, other)
    if is_flat:
        kept[_OTHER_SIDE] = other
    else:
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


@functools.cache
def _keep_gradients() -> None:
    """Make parameters show gradients of the other side. Installed when needed: it slows all accesses."""
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
