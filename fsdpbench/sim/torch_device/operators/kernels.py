"""Kernels in Python for all operators of torch on the simulated device.

Only operators that torch does not compose of others need one. Autograd, views, autocast and decompositions
stay torch's own, and so does the resulting order of allocations and launches.

Launches of kernels that torch does not know, e.g. Triton's, become one operator, `fsdpbench::launch`. Its
effect is unknown: it may write all of its tensors.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fsdpbench.base.torch_internals import dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.known_values import follow, forget
from fsdpbench.sim.torch_device.operators.plans import (
    Plan,
    call_text,
    carry_out,
    inputs_text,
    make_plan,
    numbers_in,
    sparse_refused,
)
from fsdpbench.sim.torch_device.operators.special_operators import SPECIAL_OPERATORS
from fsdpbench.sim.torch_device.prices.families import has_own_price, price_of_kernel
from fsdpbench.sim.torch_device.strict.words import error_text
from fsdpbench.sim.torch_device.tensors import is_on_device, meta_twin, record_of

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
# For these, torch's own kernels are right on any device (`nn.Parameter` needs them).
_LEFT_TO_TORCH = {"detach", "alias", "lift_fresh", "lift", "_pack_padded_sequence"}
# Composed of other operators on most devices, but one kernel on CUDA.
ONE_KERNEL = {"_fused_rms_norm", "silu_backward", "mish_backward", "native_channel_shuffle"}
# For other devices and storage formats; never called with a dense tensor of this device.
_FOREIGN = ("quantize", "sparse", "mkldnn", "cudnn", "miopen", "nested", "jagged")


def register_kernels() -> list[torch.library.Library]:
    """Register all kernels. The caller must keep the returned libraries: destroying them unregisters."""
    aten = torch.library.Library("aten", "IMPL")
    has_kernel = dispatch_has_kernel_for_dispatch_key
    for qualified in dispatch_get_all_op_names():
        if not qualified.startswith("aten::"):
            continue
        name = qualified.removeprefix("aten::")
        packet, _, overload = name.partition(".")
        if packet in _LEFT_TO_TORCH or any(word in packet for word in _FOREIGN):
            continue
        if has_kernel(qualified, "PrivateUse1"):
            continue
        if has_kernel(qualified, "CompositeImplicitAutograd") and packet not in ONE_KERNEL:
            continue
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None:
            continue
        kernel = make_kernel(operator)
        if packet in SPECIAL_OPERATORS:
            kernel = functools.partial(SPECIAL_OPERATORS[packet], operator, kernel)
        aten.impl(name, kernel, "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(_run_foreign_operator, "PrivateUse1")
    others.fallback(_refuse_sparse, "SparsePrivateUse1")
    others.fallback(_refuse_sparse, "SparseCsrPrivateUse1")
    return [aten, others]


def _refuse_sparse(operator: Any, *args: Any, **kwargs: Any) -> Any:
    raise sparse_refused(operator._schema.name)


_FOREIGN_KERNELS: dict[Any, Callable[..., Any]] = {}
# The plans of all kernels, so that they can be cleared together.
_PLANS: list[dict[tuple[Any, ...], Plan]] = []


def _run_foreign_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of another library, with shapes from its meta kernel and costs by bytes."""
    if operator is torch.ops.aten._nested_tensor_from_mask_left_aligned.default:
        ACCELERATOR.guess("torch.nn.TransformerEncoder", "no nested tensors: padding is computed too")
        return False
    if operator.namespace == "aten" and "sparse" in operator._schema.name:
        raise sparse_refused(operator._schema.name)
    if operator.namespace == "symm_mem":
        raise NotImplementedError(error_text("kernels.other_ranks", operator))
    kernel = _FOREIGN_KERNELS.get(operator)
    if kernel is None:
        kernel = _FOREIGN_KERNELS[operator] = make_kernel(operator)
    return kernel(*args, **kwargs)


def make_kernel(operator: Any) -> Callable[..., Any]:
    """Return a kernel for one operator that caches the plans of its calls."""
    plans: dict[tuple[Any, ...], Plan] = {}
    _PLANS.append(plans)
    # `by_type`: the operator's numbers (learning rates, step counts) do not affect shapes.
    name = operator._schema.name
    accelerator = ACCELERATOR
    python = accelerator.python
    by_type = torch.Tag.pointwise in operator.tags or "::_foreach_" in name or "::_fused_" in name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if python.counting:
            python.pause()
        python.before(operator)
        try:
            if accelerator.backward.is_active:
                accelerator.backward.arrive(args)
            key: list[Any] = []
            tensors: list[_Tensor] = []
            _describe(args, key, tensors, by_type)
            if kwargs:
                key += kwargs  # the names
                _describe(kwargs.values(), key, tensors, by_type)
            frozen = tuple(key)
            plan = plans.get(frozen)
            if plan is None:
                accelerator.require_started()
                plan = plans[frozen] = _plan_of(operator, frozen, args, kwargs, by_type)
            inputs = ""
            if accelerator.trace is not None:
                inputs = plan.inputs.get(()) or _inputs_of(plan, operator, args, kwargs, by_type)
            result = carry_out(accelerator, plan, tensors, inputs)
            if accelerator.known_values:
                follow(operator, args, kwargs, result)
            return result
        finally:
            if python.counting:
                python.leave()

    return kernel


def _plan_of(
    operator: Any, call: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any], by_type: bool
) -> Plan:
    """Return another process's plan for this call, or a new one."""
    shared = ACCELERATOR.shared_plans
    if shared is None or has_own_price(operator):
        return make_plan(ACCELERATOR, operator, args, kwargs)
    plan = shared.find(operator, call)
    if plan is None:
        plan = make_plan(ACCELERATOR, operator, args, kwargs)
        _inputs_of(plan, operator, args, kwargs, by_type)  # computed once per sweep
        shared.add(operator, call, plan)
    return plan


def _inputs_of(
    plan: Plan, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], by_type: bool
) -> str:
    """Return the call's inputs as text for the trace."""
    numbers = numbers_in((*args, *kwargs.values())) if by_type else ()
    found = plan.inputs.get(numbers)
    if found is None:
        found = plan.inputs[numbers] = call_text(operator, args, kwargs)
    return found


def forget_plans() -> None:
    """Clear all plans, which hold the costs of one hardware profile, for a new simulation."""
    for plans in _PLANS:
        plans.clear()


def _describe(values: Iterable[Any], key: list[Any], tensors: list[_Tensor], numbers_by_type: bool) -> None:
    """Append everything that the plan depends on to `key`, and the call's tensors to `tensors`.

    The most frequent kinds come first, because this runs for every argument of every operator.
    """
    for value in values:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter or isinstance(value, _Tensor):
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_cpu)
            tensors.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            _describe(value, key, tensors, numbers_by_type)
        elif numbers_by_type and (kind is int or kind is float):
            key.append(kind)
        elif kind is float or kind is bool:
            key += (kind, value)  # 1, 1.0 and True are equal as keys, but not as arguments
        else:
            key.append(value)


_LAUNCH = "launch(str kernel, str[] names, Tensor(a!)[] tensors, str[] numbered, Scalar[] numbers) -> ()"


def register_launches() -> torch.library.Library:
    """Define the operator `fsdpbench::launch`; the caller must keep the returned library."""
    library = torch.library.Library("fsdpbench", "FRAGMENT")
    library.define(_LAUNCH)
    library.impl("launch", _launch_kernel, "PrivateUse1")
    library.impl("launch", lambda *args: None, "Meta")
    return library


def _launch_kernel(
    kernel: str,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    numbered: Sequence[str],
    numbers: Sequence[float],
) -> None:
    """Launch `kernel` with named tensors and numbers on the current stream."""
    accelerator = ACCELERATOR
    accelerator.require_started()
    if accelerator.backward.is_active:
        accelerator.backward.arrive(tensors)
    on_device = [tensor for tensor in tensors if is_on_device(tensor)]
    arguments = dict(zip((*names, *numbered), (*map(meta_twin, tensors), *numbers), strict=True))
    plan = Plan(kernel, [], None, price_of_kernel(kernel, arguments, accelerator.kernel_costs))
    plan.cpu_ns = accelerator.cpu_costs.operator_ns
    if accelerator.sanitizer is not None:
        launch: Any = torch.ops.fsdpbench.launch.default
        plan.uses = accelerator.sanitizer.uses_of(launch, (kernel, names, tensors, numbered, numbers), {})
    if accelerator.known_values:
        for tensor in on_device:
            forget(record_of(tensor.untyped_storage()))
    carry_out(accelerator, plan, list(tensors), inputs_text(tensors) if accelerator.trace is not None else "")
