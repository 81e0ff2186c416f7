"""Plans: what a call of an operator does, found out once and then repeated.

The first time an operator is called with certain shapes it runs on meta tensors, which tells the geometry of
its outputs. Each output is then known to be *new*, *the same* as one of the arguments, or a *view* of one;
together with its cost that is a `Plan`. Every later call with the same key only carries the plan out: a
training loop has no misses after its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.configuration.compute_type import compute_type
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.followed import Use
from fsdpbench.sim.torch_device.prices import FREE, OperatorCost, price
from fsdpbench.sim.torch_device.strict import refuse_what_cuda_refuses
from fsdpbench.sim.torch_device.tensors import contiguous_strides, meta_twin, tensors_in

NEW, ARGUMENT, VIEW, CONSTANT = range(4)


class Plan:
    """How to carry out one call.

    ``outputs``: ``(NEW, shape, strides or None, dtype, bytes)``, ``(ARGUMENT, index)``,
    ``(VIEW, index, shape, strides, offset, dtype)`` or ``(CONSTANT, value)``; indices of the call's tensors.
    ``container``: None (returns nothing), False (a single value), list or tuple.
    ``flops``: compute type and FLOPs of a matrix product, where they are counted.
    ``reshaped``: ``(index, shape, strides, bytes)`` of arguments whose geometry the operator changes.
    ``uses``: what it reads and writes, where the sanitizer runs.
    ``inputs``: what traces say of its inputs, by the numbers of the call (`inputs.py`).
    """

    __slots__ = (
        *("container", "cost", "cpu_ns", "duration_ns", "flops", "inputs", "name", "outputs", "reshaped"),
        "uses",
    )

    def __init__(self, name: str, outputs: list[tuple[Any, ...]], container: Any, cost: OperatorCost) -> None:
        self.name = name
        self.outputs = outputs
        self.container = container
        self.cost = cost
        self.duration_ns = cost.duration_ns
        self.cpu_ns = 0
        self.flops: tuple[str, int] | None = None
        self.reshaped: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
        self.uses: tuple[Use, ...] = ()
        self.inputs: dict[tuple[Any, ...], str] = {}


def make_plan(accelerator: Accelerator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """Run the operator on meta tensors and note what it does.

    Raises NotImplementedError, naming the operator, if its output depends on data that does not exist, or if
    torch cannot tell its shape without computing it; and what CUDA raises for what it refuses.
    """
    refuse_what_cuda_refuses(func, args, kwargs)
    meta_args, meta_kwargs = meta_twin(args), {name: meta_twin(value) for name, value in kwargs.items()}
    meta_tensors = tensors_in(meta_args, meta_kwargs)
    shapes = [(tensor.shape, tensor.stride()) for tensor in meta_tensors]
    try:
        with torch.no_grad():
            out = func(*meta_args, **meta_kwargs)
    except NotImplementedError as error:
        if func._schema.returns:
            raise (data_dependent if _depends_on_data(func) else _without_shapes)(func) from error
        out = None  # it only writes into its arguments (fused SGD has no meta kernel)
    except AssertionError as error:  # torch's rules in Python assert what its kernels check
        raise RuntimeError(str(error)) from error
    container = type(out) if isinstance(out, (list, tuple)) else (None if out is None else False)
    flat = list(out) if container in (list, tuple) else ([] if out is None else [out])
    outputs = [_describe(item, meta_tensors) for item in flat]
    cost = price(func, meta_args, meta_kwargs, out, accelerator.kernel_costs)
    if outputs and not any(output[0] in (NEW, ARGUMENT) for output in outputs):
        cost = FREE
    plan = Plan(func._schema.name, outputs, container, cost)
    if accelerator.sanitizer is not None and plan.duration_ns:
        plan.uses = accelerator.sanitizer.uses_of(func, args, kwargs)
    costs = accelerator.cpu_costs
    plan.cpu_ns = costs.view_ns if cost is FREE else costs.operator_ns
    if accelerator.flops is not None and meta_tensors:
        arithmetic = compute_type(meta_tensors[0].dtype, convolution="convolution" in func._schema.name)
        plan.flops = accelerator.flops.of_call(func, meta_args, meta_kwargs, out, arithmetic)
    for index, (tensor, before) in enumerate(zip(meta_tensors, shapes, strict=True)):
        if (tensor.shape, tensor.stride()) != before:
            nbytes = tensor.untyped_storage().nbytes()
            plan.reshaped.append((index, tuple(tensor.shape), tensor.stride(), nbytes))
    return plan


def _describe(item: Any, arguments: list[torch.Tensor]) -> tuple[Any, ...]:
    """Where an output comes from."""
    if not isinstance(item, torch.Tensor):
        return (CONSTANT, item)
    for index, argument in enumerate(arguments):
        if item is argument:
            return (ARGUMENT, index)
    if item.layout is not torch.strided:
        raise sparse_refused(f"a {item.layout} tensor of {list(item.shape)}")
    storage = item.untyped_storage()
    shape, strides = tuple(item.shape), item.stride()
    for index, argument in enumerate(arguments):
        if argument.device.type == "meta" and argument.untyped_storage()._cdata == storage._cdata:
            return (VIEW, index, shape, strides, item.storage_offset(), item.dtype)
    nbytes = storage.nbytes() if item.device.type == "meta" else item.numel() * item.element_size()
    return (NEW, shape, None if strides == contiguous_strides(shape) else strides, item.dtype, nbytes)


def sparse_refused(what: str) -> NotImplementedError:
    """The error of an operator of sparse tensors, or of one that makes such a tensor."""
    return NotImplementedError(
        f"{what}: sparse tensors are not simulated; use dense ones (for embeddings sparse=False)"
    )


def _depends_on_data(func: Any) -> bool:
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def _without_shapes(func: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func._schema.name} is not simulated: torch has no rule for the shapes of its results (no kernel "
        "for the meta device); use other operators, or give it one (torch.library.impl for 'Meta')"
    )


def data_dependent(func: Any) -> NotImplementedError:
    """The error of an operator whose result has no shape without data."""
    form = {
        "aten::bincount": "minlength=",
        "aten::nonzero": "masks, torch.where of three arguments; for a mixture's router: masks of topk's "
        "indices (== expert, one_hot), or rows sorted by expert and counted by torch.bincount(minlength=), "
        "docs/parallel.md",
    }.get(func._schema.name, "masks, torch.where")
    return NotImplementedError(
        f"{func._schema.name}: the shape of its result depends on data, which simulated tensors do not have; "
        f"use a form with a fixed shape ({form}), or compute it on the CPU"
    )
