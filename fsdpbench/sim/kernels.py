"""Registers one Python kernel for every operator of torch on the simulated device.

Only operators that torch does not compose of others get one: autograd, views' bookkeeping, autocast and the
decompositions stay torch's own, and so does the order of allocations and launches that follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpbench.sim.accelerator import ACCELERATOR, KernelRecord
from fsdpbench.sim.plans import ARGUMENT, NEW, VIEW, Plan, make_plan
from fsdpbench.sim.special_operators import SPECIAL_OPERATORS
from fsdpbench.sim.storage import allocate, attach, record_of, resize
from fsdpbench.sim.tensors import new_tensor, new_view, set_geometry
from fsdpbench.sim.timeline import Work

_COMPUTE = Work.COMPUTE
_Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
# torch's own kernels for these are right for any device (`nn.Parameter` needs them as they are).
_LEFT_TO_TORCH = {"detach", "alias", "lift_fresh", "lift"}
# Of other devices and storage formats; never called with a dense tensor of this one.
_FOREIGN = ("quantize", "sparse", "mkldnn", "cudnn", "miopen", "nested", "jagged")


def register_kernels() -> list[torch.library.Library]:
    """Register all kernels; the returned libraries must be kept, since their end unregisters them."""
    aten = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified in torch._C._dispatch_get_all_op_names():
        if not qualified.startswith("aten::"):
            continue
        name = qualified.removeprefix("aten::")
        packet, _, overload = name.partition(".")
        if packet in _LEFT_TO_TORCH or any(word in packet for word in _FOREIGN):
            continue
        if has_kernel(qualified, "CompositeImplicitAutograd") or has_kernel(qualified, "PrivateUse1"):
            continue
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None:
            continue
        special = SPECIAL_OPERATORS.get(packet)
        aten.impl(
            name,
            special(operator, make_kernel(operator)) if special else make_kernel(operator),
            "PrivateUse1",
        )
    others = torch.library.Library("_", "IMPL")
    others.fallback(_run_foreign_operator, "PrivateUse1")
    return [aten, others]


_FOREIGN_KERNELS: dict[Any, Callable[..., Any]] = {}
# The plans of every kernel, so that they can be forgotten together.
_PLANS: list[dict[tuple[Any, ...], Plan]] = []


def _run_foreign_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Operators of other libraries: their meta kernel says the shapes, their bytes the cost."""
    kernel = _FOREIGN_KERNELS.get(operator)
    if kernel is None:
        kernel = _FOREIGN_KERNELS[operator] = make_kernel(operator)
    return kernel(*args, **kwargs)


def make_kernel(operator: Any) -> Callable[..., Any]:
    """A kernel for one operator, with the plans of the calls that it has seen."""
    plans: dict[tuple[Any, ...], Plan] = {}
    _PLANS.append(plans)
    ignores_numbers = _ignores_numbers(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        key: list[Any] = []
        tensors: list[_Tensor] = []
        _describe(args, key, tensors, ignores_numbers)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _describe((value,), key, tensors, ignores_numbers)
        frozen = tuple(key)
        plan = plans.get(frozen)
        if plan is None:
            ACCELERATOR.require_started()
            plan = plans[frozen] = make_plan(operator, args, kwargs)
        return _carry_out(plan, tensors)

    return kernel


def forget_plans() -> None:
    """Plans carry the costs of one hardware profile; a new simulation starts without them."""
    for plans in _PLANS:
        plans.clear()


def _ignores_numbers(operator: Any) -> bool:
    """Whether numbers among the arguments have no influence on shapes (learning rates, counts of steps)."""
    name = operator._schema.name
    return torch.Tag.pointwise in operator.tags or "::_foreach_" in name or "::_fused_" in name


def _describe(values: Sequence[Any], key: list[Any], tensors: list[_Tensor], ignores_numbers: bool) -> None:
    """Append what the plan depends on to ``key``, and the tensors of the call to ``tensors``."""
    for value in values:
        if isinstance(value, _Tensor):
            key.append((value.shape, value.stride(), value.storage_offset(), value.dtype))
            tensors.append(value)
        elif type(value) in (list, tuple):
            key.append(len(value))
            _describe(value, key, tensors, ignores_numbers)
        elif ignores_numbers and type(value) in (int, float):
            key.append(type(value))
        else:
            # 1, 1.0 and True are equal as keys, but not as arguments.
            key.append(value)
            key.append(type(value))


def _carry_out(plan: Plan, tensors: list[_Tensor]) -> Any:
    """Allocate, launch, and return what the plan says."""
    accelerator = ACCELERATOR
    timeline = accelerator.timeline
    start = timeline.cpu
    timeline.cpu = start + plan.cpu_ns
    outputs: list[Any] = []
    for output in plan.outputs:
        origin = output[0]
        if origin == NEW:
            outputs.append(new_tensor(*output[1:]))
        elif origin == ARGUMENT:
            outputs.append(tensors[output[1]])
        elif origin == VIEW:
            outputs.append(new_view(tensors[output[1]], *output[2:]))
        else:
            outputs.append(output[1])
    if plan.reshaped:
        _reshape(plan, tensors)
    if plan.duration_ns:
        _launch(plan)
    if accelerator.trace is not None:
        accelerator.trace.cpu_op(plan.name, start, timeline.cpu)
    container = plan.container
    if container is False:
        return outputs[0]
    if container is None:
        return None
    return outputs if container is list else tuple(outputs)


def _launch(plan: Plan) -> None:
    """Queue the plan's kernel on the current stream."""
    accelerator = ACCELERATOR
    timeline = accelerator.timeline
    if _graph_task() != -1:
        timeline.cpu += accelerator.cpu_costs.autograd_node_ns
    blocks = [allocate(nbytes) for nbytes in plan.cost.workspace_bytes]
    launch_start = timeline.cpu
    timeline.cpu = launch_start + accelerator.cpu_costs.launch_ns
    payload = None
    if accelerator.trace is not None:
        payload = KernelRecord(plan.cost.kernel, launch_start, timeline.cpu)
    timeline.launch(accelerator.stream, _COMPUTE, plan.duration_ns, payload)
    accelerator.operators_launched += 1
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
