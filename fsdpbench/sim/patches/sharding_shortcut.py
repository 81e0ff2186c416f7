"""A shorter way through DTensor's sharding propagation for optimizers.

DTensor finds out how an operator shards its outputs by comparing strategies for each of its inputs, on fake
tensors. For a fused optimizer over all parameters of a model these are thousands, which takes longer than the
whole step (0.4 s for a GPT of 2.8 B, 3 s for one of 175 B). The answer is known beforehand: an operator that
is element-wise, returns nothing, and whose lists agree in their placements runs on the local shards as it is.

Anything else takes torch's own way. The result is the same, only sooner; nothing simulated depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Partial

from fsdpbench.torch_internals import DTensorSpec, OutputSharding, expect, op_dispatcher, patch, replace

_ELEMENTWISE = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_foreach_")


def install_sharding_shortcut() -> None:
    """Put the shortcut in front of this process's propagation, in both its forms."""
    propagator = expect(op_dispatcher, "sharding_propagator")
    for name in ("propagate_op_sharding", "propagate_op_sharding_non_cached"):
        replace(propagator, **{name: _with_shortcut(expect(propagator, name))})
    patch("propagate_use_strided_shard_flag", _on_more_dimensions)


def _with_shortcut(original: Any) -> Callable[[Any], Any]:
    def propagate(op_schema: Any) -> Any:
        if runs_on_local_shards(op_schema):
            return OutputSharding(None)
        return original(op_schema)

    for name in ("cache_info", "cache_clear"):
        if hasattr(original, name):
            setattr(propagate, name, getattr(original, name))
    return propagate


def _on_more_dimensions(original: Callable[..., None]) -> Callable[..., None]:
    """DTensor's propagation of a flag that meshes of one dimension never have."""

    def propagate(op_strategy: Any, op_schema: Any) -> None:
        if op_strategy.mesh.ndim > 1:
            original(op_strategy, op_schema)

    return propagate


def runs_on_local_shards(op_schema: Any) -> bool:
    """Whether an operator over DTensors needs no communication and returns nothing."""
    operator: Any = op_schema.op
    if operator._schema.returns or not operator._schema.name.startswith(_ELEMENTWISE):
        return False
    lists = [_specs(argument) for argument in op_schema.args_schema if isinstance(argument, (list, tuple))]
    lists = [specs for specs in lists if specs]
    if not lists or any(len(specs) != len(lists[0]) for specs in lists):
        return False
    return all(_agree(specs) for specs in zip(*lists, strict=True))


def _specs(argument: Sequence[Any]) -> list[DTensorSpec]:
    return [item for item in argument if isinstance(item, DTensorSpec)]


def _agree(specs: tuple[DTensorSpec, ...]) -> bool:
    """Same mesh and placements, none of them partial; numbers (counts of steps) are on every rank anyway."""
    sharded = [spec for spec in specs if spec.ndim > 0]
    if not sharded:
        return True
    first = sharded[0]
    if any(isinstance(placement, Partial) for placement in first.placements):
        return False
    return all(spec.mesh is first.mesh and spec.placements == first.placements for spec in sharded)
