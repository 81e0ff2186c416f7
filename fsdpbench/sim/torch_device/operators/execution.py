"""Carrying out a plan: memory for its outputs, its kernel in the queue of the current stream."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.sim.model.timeline import Work
from fsdpbench.sim.model.trace_records import KernelRecord
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.plans import ARGUMENT, NEW, VIEW, Plan
from fsdpbench.sim.torch_device.storage import allocate, attach, record_of, resize
from fsdpbench.sim.torch_device.tensors import new_tensor, new_view, set_geometry
from fsdpbench.torch_internals import current_graph_task_id

_COMPUTE = Work.COMPUTE
_Tensor = torch.Tensor
_graph_task = current_graph_task_id


def carry_out(plan: Plan, tensors: list[_Tensor], inputs: str = "") -> Any:
    """Allocate, launch, and return what the plan says; `inputs`: what a trace says of them."""
    accelerator = ACCELERATOR
    timeline = accelerator.timeline
    start = timeline.cpu
    timeline.cpu = start + plan.cpu_ns
    result: Any
    if plan.container is False:
        output = plan.outputs[0]
        origin = output[0]
        if origin == NEW:  # as `_make_output` does it, without another call
            result = new_tensor(output[1], output[2], output[3], output[4])
        elif origin == ARGUMENT:
            result = tensors[output[1]]
        elif origin == VIEW:
            result = new_view(tensors[output[1]], output[2], output[3], output[4], output[5])
        else:
            result = output[1]
    elif plan.container is None:
        result = None
    else:
        result = plan.container([_make_output(output, tensors) for output in plan.outputs])
    if plan.reshaped:
        _reshape(plan, tensors)
    if plan.duration_ns:
        if accelerator.sanitizer is not None:
            fresh = _new_outputs(plan, result)
            accelerator.sanitizer.kernel(accelerator.stream, plan.name, plan.uses, tensors, fresh)
        _launch(plan)
    if accelerator.trace is not None:
        accelerator.trace.cpu_op(plan.name, start, timeline.cpu, inputs)
    return result


def _make_output(output: tuple[Any, ...], tensors: list[_Tensor]) -> Any:
    """One output as its plan says."""
    origin = output[0]
    if origin == NEW:
        return new_tensor(output[1], output[2], output[3], output[4])
    if origin == ARGUMENT:
        return tensors[output[1]]
    if origin == VIEW:
        return new_view(tensors[output[1]], output[2], output[3], output[4], output[5])
    return output[1]


def _new_outputs(plan: Plan, result: Any) -> list[_Tensor]:
    """What the call has made, which its kernel writes."""
    results = [result] if plan.container is False else result or ()
    return [made for made, output in zip(results, plan.outputs, strict=True) if output[0] == NEW]


def _launch(plan: Plan) -> None:
    """Queue the plan's kernel on the current stream."""
    accelerator = ACCELERATOR
    timeline = accelerator.timeline
    if _graph_task() != -1:
        timeline.cpu += accelerator.cpu_costs.autograd_node_ns
    blocks = [allocate(nbytes) for nbytes in plan.cost.workspace_bytes]
    if blocks and accelerator.sanitizer is not None:
        accelerator.sanitizer.workspaces(accelerator.stream, blocks)
    launch_start = timeline.cpu
    timeline.cpu = launch_start + accelerator.cpu_costs.launch_ns
    payload = None
    if accelerator.trace is not None:
        payload = KernelRecord(plan.cost.kernel, launch_start, timeline.cpu)
        accelerator.bytes_traced += plan.cost.nbytes
    timeline.launch(accelerator.stream, _COMPUTE, plan.duration_ns, payload)
    accelerator.operators_launched += 1
    if plan.flops is not None and accelerator.flops is not None:
        accelerator.flops.add(*plan.flops)
    for block in blocks:
        accelerator.allocator.free(block)
    if plan.cost.unknown:
        counts = accelerator.unknown_operators
        counts[plan.name] = counts.get(plan.name, 0) + 1


def _reshape(plan: Plan, tensors: list[_Tensor]) -> None:
    """Give arguments the geometry that the operator leaves them with, growing their storages where needed."""
    for index, shape, strides, nbytes in plan.reshaped:
        tensor = tensors[index]
        storage = tensor.untyped_storage()
        record = record_of(storage)
        if record is None:
            attach(storage, nbytes)
        elif record.nbytes < nbytes:
            resize(record, nbytes)
        set_geometry(tensor, storage, int(tensor.storage_offset()), shape, strides)
