"""Shortcuts for DTensor's sharding propagation in optimizers and its random state, and for FSDP2's chunks.

DTensor determines the sharding of an operator's outputs by comparing strategies for each input, on fake
tensors. A fused optimizer over all parameters of a model has thousands of inputs, which takes longer than
the whole step (0.4 s for a GPT of 2.8 B, 3 s for one of 175 B). The result is known: if an operator is
element-wise, returns nothing, and its lists agree in placements, it runs on local shards unchanged.

DTensor finds the geometry of an output by a run on fake tensors, which takes a millisecond per parameter
shape. Results of `detach`, and of `empty_like` of a dense tensor, have the geometry of the argument.

All other operators run torch's code. The shortcuts only save time; nothing simulated depends on them.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.distributed.tensor import Partial

from fsdpbench.base.torch_internals import (
    DTensorSpec,
    OffsetBasedRNGTracker,
    OutputSharding,
    expect,
    op_dispatcher,
    patch,
    replace,
)
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.tensors import contiguous_strides, is_simulated

_ALIKE = ("aten::detach", "aten::empty_like", "aten::zeros_like", "aten::ones_like")
_ELEMENTWISE = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_foreach_")


def install_sharding_shortcut() -> None:
    """Add the shortcut to this process's propagator, in its cached and its uncached form."""
    propagator = expect(op_dispatcher, "sharding_propagator")
    for name in ("propagate_op_sharding", "propagate_op_sharding_non_cached"):
        replace(propagator, **{name: _with_shortcut(expect(propagator, name))})
    name = "_propagate_tensor_meta_non_cached"
    replace(propagator, **{name: passing_to(_with_known_geometry)(expect(propagator, name))})
    patch("propagate_use_strided_shard_flag", passing_to(_on_more_dimensions))


def _with_shortcut(original: Any) -> Callable[[Any], Any]:
    def propagate(op_schema: Any) -> Any:
        if runs_on_local_shards(op_schema):
            return OutputSharding(None)
        return original(op_schema)

    for name in ("cache_info", "cache_clear"):
        if hasattr(original, name):
            setattr(propagate, name, getattr(original, name))
    return propagate


def _with_known_geometry(original: Callable[..., Any], op_schema: Any) -> Any:
    known = geometry_of_output(op_schema)
    return original(op_schema) if known is None else known


def geometry_of_output(op_schema: Any) -> Any:
    """Return shape, strides and dtype of an operator's result if no run on fake tensors is needed."""
    name = op_schema.op._schema.name
    arguments = op_schema.args_schema
    if name not in _ALIKE or len(arguments) != 1 or not isinstance(arguments[0], DTensorSpec):
        return None
    given, options = arguments[0].tensor_meta, op_schema.kwargs_schema
    if given is None or not all(type(size) is int for size in given.shape):
        return None
    if name == "aten::detach":
        return None if options else given
    strides = contiguous_strides(given.shape)
    if tuple(given.stride) != strides or options.get("memory_format") not in (None, torch.preserve_format):
        return None
    return given._replace(stride=strides, dtype=options.get("dtype") or given.dtype)


def _on_more_dimensions(original: Callable[..., Any], op_strategy: Any, op_schema: Any) -> None:
    """Call DTensor's propagation of a flag that one-dimensional meshes never have."""
    if op_strategy.mesh.ndim > 1:
        original(op_strategy, op_schema)


def runs_on_local_shards(op_schema: Any) -> bool:
    """Return whether an operator on DTensors needs no communication and returns nothing."""
    operator: Any = op_schema.op
    if operator._schema.returns or not operator._schema.name.startswith(_ELEMENTWISE):
        return False
    given = [argument for argument in op_schema.args_schema if isinstance(argument, (list, tuple))]
    lists = [[item for item in argument if isinstance(item, DTensorSpec)] for argument in given]
    lists = [specs for specs in lists if specs]
    if not lists or any(len(specs) != len(lists[0]) for specs in lists):
        return False
    return all(_agree(specs) for specs in zip(*lists, strict=True))


def _agree(specs: tuple[DTensorSpec, ...]) -> bool:
    """Return whether meshes and placements are equal and not partial; numbers (step counts) always agree."""
    sharded = [spec for spec in specs if spec.ndim > 0]
    if not sharded:
        return True
    first = sharded[0]
    if any(isinstance(placement, Partial) for placement in first.placements):
        return False
    return all(spec.mesh is first.mesh and spec.placements == first.placements for spec in sharded)


def install_random_state() -> None:
    """Keep DTensor's random state on the host for the simulated device, without comparing ranks' states.

    torch copies the state to the device to broadcast it from rank 0, and back before each random operator.
    Simulated tensors would lose the values, and torch's decision would be reported as the script's.
    All simulated ranks are one, so their states agree.
    """
    copied = expect(OffsetBasedRNGTracker, "_get_device_state")
    replace(
        OffsetBasedRNGTracker,
        __init__=passing_to(_without_comparing)(expect(OffsetBasedRNGTracker, "__init__")),
        _get_device_state=passing_to(_on_the_host)(copied),
    )


def _without_comparing(
    original: Callable[..., Any], self: Any, device_mesh: Any, run_state_sync: bool = True
) -> None:
    original(self, device_mesh, run_state_sync=False)
    if run_state_sync and not is_simulated(self._device):
        original(self, device_mesh)


def _on_the_host(original: Callable[..., Any], self: Any) -> torch.Tensor:
    copied = original(self)
    if not is_simulated(self._device):
        return copied
    on_host: torch.Tensor = self._device_handle.get_rng_state()
    return on_host


class Chunks(Sequence[torch.Tensor]):
    """Chunks like those of `torch.chunk`, padded with empty tensors to `count`; created on access.

    FSDP2 cuts every parameter into one shard per rank and keeps its own; on 512 ranks, the other shards
    took a sixth of a run's time. Only for meta parameters: elsewhere each cut is an operator with a price.
    """

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._length = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"chunk {index} of {self._count}")
        start = index % self._count * self._length
        left = self._tensor.size(self._dim) - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, left))


def cut_when_asked(original: Callable[..., Any], tensor: torch.Tensor, num_chunks: int, dim: int) -> Any:
    """Replace FSDP2's `_chunk_with_empty`: cut meta tensors along `dim` into `num_chunks` lazily."""
    if tensor.is_meta and tensor.size(dim) > 0:
        return Chunks(tensor, num_chunks, dim)
    return original(tensor, num_chunks, dim)
