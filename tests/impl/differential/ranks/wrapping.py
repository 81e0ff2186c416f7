"""Wraps a model as a program says, with torch's FSDP or with ours; runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from differential.ranks.models import Inner, Model
from differential.specs import Flat, Program, Sharded
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy as TorchCustomPolicy
from torch.distributed.tensor import Shard

from fsdpbench import impl

SIDES = ("torch", "impl")
CPU = torch.device("cpu")


def api_of(side: str) -> Any:
    return torch_fsdp if side == "torch" else impl


class Meshes:
    """The meshes of this process, made once: each has threads for good."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], DeviceMesh] = {}

    def get(self, shape: tuple[int, ...]) -> DeviceMesh:
        if shape not in self._made:
            self._made[shape] = init_device_mesh(
                "cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
            )
        return self._made[shape]

    def forget(self) -> None:
        """Their groups were destroyed."""
        self._made.clear()


MESHES = Meshes()


def dtype_of(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def build(side: str, program: Program) -> nn.Module:
    """The program's model, wrapped."""
    torch.manual_seed(7)
    model = Model(program.model)
    if isinstance(program.wrap, Flat):
        return flat(api_of(side), side, model, program.wrap)
    return sharded(api_of(side), model, program.wrap)


def units_of(model: Model) -> list[nn.Module]:
    """What is wrapped besides the root, inner ones first."""
    found: list[nn.Module] = []
    for index, block in enumerate(model.spec.blocks):
        outer = model.blocks[index]
        if block.inner == "wrapped":
            found += [module for module in outer.modules() if isinstance(module, Inner)]
        if block.wrapped:
            found.append(outer)
    return found


def flat(api: Any, side: str, model: Model, wrap: Flat) -> nn.Module:
    chosen = set(units_of(model))
    policy: Any = TorchCustomPolicy if side == "torch" else impl.CustomPolicy
    arguments: dict[str, Any] = {}
    if wrap.precision:
        dtypes = [dtype_of(name) for name in wrap.precision]
        arguments["mixed_precision"] = api.MixedPrecision(
            *dtypes, keep_low_precision_grads=wrap.keep_low, cast_root_forward_inputs=wrap.cast_root
        )
    if wrap.mesh:
        arguments["device_mesh"] = MESHES.get(wrap.mesh)
    if wrap.ignored is not None:
        arguments["ignored_modules"] = [model.blocks[wrap.ignored]]
        chosen.discard(model.blocks[wrap.ignored])
    if wrap.offload:
        arguments["cpu_offload"] = api.CPUOffload(offload_params=True)
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy(lambda module: module in chosen),
        sharding_strategy=api.ShardingStrategy[wrap.strategy],
        backward_prefetch=api.BackwardPrefetch[wrap.backward_prefetch] if wrap.backward_prefetch else None,
        forward_prefetch=wrap.forward_prefetch,
        limit_all_gathers=wrap.limit,
        use_orig_params=wrap.originals,
        sync_module_states=wrap.sync,
        device_id=CPU,
        **arguments,
    )


def _columns(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim > 1 else 0)


def sharded(api: Any, model: Model, wrap: Sharded) -> nn.Module:
    arguments: dict[str, Any] = {"reshard_after_forward": wrap.reshard}
    if wrap.mesh:
        arguments["mesh"] = MESHES.get(wrap.mesh)
    if wrap.precision:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(*map(dtype_of, wrap.precision))
    if wrap.offload:
        arguments["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    if wrap.columns:
        arguments["shard_placement_fn"] = _columns
    if wrap.ignored is not None:
        arguments["ignored_params"] = set(model.blocks[wrap.ignored].parameters())
    grouped = [model.blocks[index] for index in wrap.grouped]
    units: list[Any] = []
    for module in units_of(model):
        if module in grouped:
            if module is grouped[-1]:
                units += api.fully_shard(grouped, **arguments)
        else:
            units.append(api.fully_shard(module, **arguments))
    for index, unit in enumerate(units):
        if wrap.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + wrap.forward_prefetch])
        if wrap.backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[max(0, index - wrap.backward_prefetch) : index][::-1])
    return api.fully_shard(model, **arguments) if wrap.root else model
