"""Plans: the outputs and cost of an operator call, computed once and then reused.

The first call of an operator with given shapes runs on meta tensors, which determines the geometry of its
outputs. Each output is *new*, *the same* as an argument, or a *view* of one. With the call's cost this is a
`Plan`. Later calls with the same key only carry out the plan: after its first step, a training loop has no
cache misses.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import current_graph_task_id
from fsdpbench.sim.model.timeline import Work
from fsdpbench.sim.model.trace_recorder import KernelRecord
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.sim.torch_device.followed import Use
from fsdpbench.sim.torch_device.prices import FREE, OperatorCost, price
from fsdpbench.sim.torch_device.strict import refuse_what_cuda_refuses
from fsdpbench.sim.torch_device.strict.words import bind, cpp_type, error_text
from fsdpbench.sim.torch_device.tensors import (
    allocate,
    attach,
    contiguous_strides,
    meta_twin,
    new_tensor,
    new_view,
    record_of,
    resize,
    set_geometry,
    tensors_in,
)

NEW, ARGUMENT, VIEW, CONSTANT = range(4)


class Plan:
    """Instructions for carrying out one call.

    `outputs`: `(NEW, shape, strides or None, dtype, bytes)`, `(ARGUMENT, index)`, `(VIEW, index, shape,
    strides, offset, dtype)` or `(CONSTANT, value)`, where `index` counts the call's tensors. `container`:
    None (returns nothing), False (a single value), list or tuple. `flops`: compute type and FLOPs of a matrix
    product, if counted. `reshaped`: `(index, shape, strides, bytes)` of arguments whose geometry the operator
    changes. `uses`: reads and writes, if the sanitizer runs. `inputs`: text of the call's inputs for traces,
    by the call's numbers (`call_text`).
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


def make_plan(accelerator: Accelerator, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    """Run `func` on meta tensors and return its plan.

    Raises `NotImplementedError` with the operator's name if its output shape depends on data or if torch has
    no rule for it, and CUDA's errors for calls that CUDA refuses.
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
            depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
            raise (data_dependent if depends else _without_shapes)(func) from error
        out = None  # it only writes into its arguments (fused SGD has no meta kernel)
    except AssertionError as error:  # torch's Python rules assert what kernels check
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
    """Return how an output relates to the arguments."""
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
    """Return the error for an operator on sparse tensors, or one that creates such a tensor."""
    return NotImplementedError(error_text("plans.sparse", what))


def _without_shapes(func: Any) -> NotImplementedError:
    return NotImplementedError(error_text("plans.no_shapes", func._schema.name))


def data_dependent(func: Any) -> NotImplementedError:
    """Return the error for an operator whose result has no shape without data."""
    form = {
        "aten::bincount": "minlength=",
        "aten::repeat_interleave": "output_size=",
        "aten::nonzero": error_text("plans.nonzero"),
    }.get(func._schema.name, "masks, torch.where")
    return NotImplementedError(error_text("plans.data_dependent", func._schema.name, form))


_TABLE = table_beside(__file__, "names.toml")["plans"]
_MOST_SCALARS = 30
"""Kineto omits longer lists of numbers."""
_NUMBERS = {getattr(torch, name): number for name, number in _TABLE["numbers"].items()}
"""C++ enum values of dtypes, layouts and memory formats."""
_WRAPPED = {int: "long int", float: "double", bool: "bool", complex: "c10::complex<double>"}
_SCALARS = tuple(_WRAPPED)
_MEMBERS = ("Concrete Inputs", "Input type", "Input Strides", "Input Dims")
_Input = tuple[str, str, Any, Any]
"""Value, type, strides, sizes."""
_OTHER: _Input = ("", "", [], [])


def call_text(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an operator call's inputs as JSON members, like Kineto's `record_shapes=True`, with defaults.

        aten::mul(float32 [4, 8], 2)   "Concrete Inputs":["","2"],"Input type":["float","Scalar"],
                                       "Input Strides":[[8,1],[]],"Input Dims":[[4,8],[]]
    Computed once per plan, and per set of numbers on which the plan does not depend.
    """
    bound = bind(operator, args, dict(kwargs))
    types = [str(argument.type) for argument in operator._schema.arguments]
    return _text(map(_input, bound.values(), types))


def inputs_text(values: Iterable[Any]) -> str:
    """Return `call_text` for values without a schema, as of a kernel or collective."""
    return _text(_input(value, "") for value in values)


def numbers_in(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the plain numbers of a call, on which plans of pointwise operators do not depend."""
    lists = [tuple(each) for each in values if isinstance(each, (list, tuple)) and each]
    numbers = [each for each in values if type(each) in _SCALARS]
    return (*numbers, *(each for each in lists if type(each[0]) in _SCALARS))


def _text(inputs: Iterable[_Input]) -> str:
    columns = [list(column) for column in zip(*inputs, strict=True)] or [[]] * len(_MEMBERS)
    return msgspec.json.encode(dict(zip(_MEMBERS, columns, strict=True)))[1:-1].decode()


def _input(value: Any, declared: str) -> _Input:
    if isinstance(value, torch.Tensor):
        return "", cpp_type(value), value.stride(), tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return _list(value, declared)
    if isinstance(value, _SCALARS) or value in _NUMBERS:
        if "Tensor" in declared:  # torch passes Python kernels the number, not its wrapper tensor
            return "", _WRAPPED[type(value)], [], []
        return _number(value), "Scalar", [], []
    return _OTHER


def _list(values: Sequence[Any], declared: str) -> _Input:
    if declared == "List[Tensor]" or (values and all(isinstance(value, torch.Tensor) for value in values)):
        if "Optional" in declared:
            return _OTHER
        return "", "TensorList", [v.stride() for v in values], [tuple(v.shape) for v in values]
    if (
        "Tensor" in declared
        or len(values) > _MOST_SCALARS
        or not all(isinstance(v, _SCALARS) for v in values)
    ):
        return _OTHER
    return f"[{', '.join(map(_number, values))}]", "ScalarList", [], []


def _number(value: Any) -> str:
    """Format a number like C++: `2`, `2.`, `0.10000000000000001`, `True`."""
    if isinstance(value, complex):
        return f"{_number(value.real)}+{_number(value.imag)}j"
    if not isinstance(value, float):
        return str(_NUMBERS.get(value, value) if not isinstance(value, (int, bool)) else value)
    text = f"{value:.17g}"
    return text if set(text) & set(".en") else text + "."


_COMPUTE = Work.COMPUTE
_graph_task = current_graph_task_id


def carry_out(accelerator: Accelerator, plan: Plan, tensors: list[torch.Tensor], inputs: str = "") -> Any:
    """Allocate and launch; return the plan's outputs. `inputs`: the call's inputs for traces."""
    timeline = accelerator.timeline
    start = timeline.cpu
    timeline.cpu = start + plan.cpu_ns
    result: Any
    if plan.container is False:
        result = _make_output(plan.outputs[0], tensors)
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
        _launch(accelerator, plan)
    if accelerator.trace is not None:
        accelerator.trace.cpu_op(plan.name, start, timeline.cpu, inputs)
    return result


def _make_output(output: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
    """Return one output of a plan."""
    origin = output[0]
    if origin == NEW:
        return new_tensor(*output[1:])
    if origin == VIEW:
        return new_view(tensors[output[1]], *output[2:])
    return tensors[output[1]] if origin == ARGUMENT else output[1]


def _new_outputs(plan: Plan, result: Any) -> list[torch.Tensor]:
    """Return the call's new tensors, which its kernel writes."""
    results = [result] if plan.container is False else result or ()
    return [made for made, output in zip(results, plan.outputs, strict=True) if output[0] == NEW]


def _launch(accelerator: Accelerator, plan: Plan) -> None:
    """Queue the plan's kernel on the current stream."""
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
        times = accelerator.unknown_ns
        times[plan.name] = times.get(plan.name, 0) + plan.duration_ns


def _reshape(plan: Plan, tensors: list[torch.Tensor]) -> None:
    """Set the geometry that the operator gives its arguments; grow their storages if needed."""
    for index, shape, strides, nbytes in plan.reshaped:
        tensor = tensors[index]
        storage = tensor.untyped_storage()
        record = record_of(storage)
        if record is None:
            attach(storage, nbytes)
        elif record.nbytes < nbytes:
            resize(record, nbytes)
        set_geometry(tensor, storage, int(tensor.storage_offset()), shape, strides)
