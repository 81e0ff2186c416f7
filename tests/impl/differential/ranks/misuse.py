"""Operations that are refused, and wrapping and groups anew. Runs inside the ranks."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from differential import operations as ops
from differential.ranks.interpreter import Run, perform
from differential.ranks.observing import Seen
from differential.ranks.wrapping import CPU, MESHES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard


def remake_groups(rank: int, ranks: int) -> None:
    """Destroy all groups and join new ones, at a place that rank 0 names."""
    place = [tempfile.mktemp(prefix="groups-")]
    dist.broadcast_object_list(place)
    dist.destroy_process_group()
    MESHES.forget()
    dist.init_process_group(
        "gloo", init_method=f"file://{place[0]}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )


@perform.register
def _(operation: ops.RemakeGroups, run: Run) -> Seen:
    if run.first:  # both lose their groups
        remake_groups(run.rank, run.program.ranks)
    run.build()
    return {}


def _linear() -> nn.Linear:
    return nn.Linear(4, 4)


def _flat_inside(run: Run) -> Any:
    wrapper = run.api.FullyShardedDataParallel
    return nn.Sequential(wrapper(_linear(), device_id=CPU), _linear())


def _mixed_tree(run: Run, **outer: Any) -> None:
    model = run.api.FullyShardedDataParallel(_flat_inside(run), device_id=CPU, **outer)
    model(torch.ones(2, 4)).sum().backward()


FLAT_MISUSE: dict[str, Any] = {
    "wrap_again": lambda run: run.api.FullyShardedDataParallel(run.model, device_id=CPU),
    "wrap_inner_by_policy": lambda run: run.api.FullyShardedDataParallel(
        _flat_inside(run), device_id=CPU, auto_wrap_policy=run.api.wrap.ModuleWrapPolicy({nn.Linear})
        if run.side == "torch" else run.api.ModuleWrapPolicy({nn.Linear}),
    ),
    "ignored_wrapped": lambda run: run.api.FullyShardedDataParallel(
        (made := _flat_inside(run)), device_id=CPU, ignored_modules=[made[0]]
    ),
    "mixed_originals": lambda run: _mixed_tree(run, use_orig_params=True),
    "mixed_limit": lambda run: _mixed_tree(run, limit_all_gathers=False),
    "mesh_without_names": lambda run: run.api.FullyShardedDataParallel(
        _linear(), device_id=CPU, device_mesh=init_device_mesh("cpu", (run.program.ranks,))
    ),
    "hybrid_without_groups": lambda run: run.api.FullyShardedDataParallel(
        _linear(), device_id=CPU,
        device_mesh=init_device_mesh("cpu", (run.program.ranks,), mesh_dim_names=("x",)),
        sharding_strategy=run.api.ShardingStrategy.HYBRID_SHARD,
    ),
    "hook_on_inner": lambda run: _inner_wrapper(run).register_comm_hook(None, lambda *args: None),
    "no_sync_on_inner": lambda run: _inner_wrapper(run).no_sync().__enter__(),
    "clip_on_inner": lambda run: _inner_wrapper(run).clip_grad_norm_(1.0),
    "rank0_with_writeback": lambda run: run.api.FullyShardedDataParallel.summon_full_params(
        run.model, rank0_only=True, writeback=True
    ).__enter__(),
    "ignored_both": lambda run: run.api.FullyShardedDataParallel(
        (made := nn.Sequential(_linear())), device_id=CPU, ignored_modules=[made[0]], ignored_states=[made[0]]
    ),
    "ignored_no_module": lambda run: run.api.FullyShardedDataParallel(
        _linear(), device_id=CPU, ignored_modules=[1]
    ),
    "policy_no_callable": lambda run: run.api.FullyShardedDataParallel(
        _linear(), device_id=CPU, auto_wrap_policy=3
    ),
    "mixed_dtypes": lambda run: run.api.FullyShardedDataParallel(
        nn.Sequential(_linear(), _linear().double()), device_id=CPU
    ),
    "mixed_requires_grad": lambda run: run.api.FullyShardedDataParallel(
        nn.Sequential(_linear(), _linear().requires_grad_(False)), device_id=CPU
    ),
    "scalar": lambda run: run.api.FullyShardedDataParallel(
        nn.ParameterList([nn.Parameter(torch.tensor(1.0))]), device_id=CPU
    ),
}  # fmt: skip


def _inner_wrapper(run: Run) -> Any:
    wrappers = run.api.FullyShardedDataParallel.fsdp_modules(run.model)
    run.model.check_is_root()
    if len(wrappers) < 2:
        raise LookupError("no wrapper inside")
    return wrappers[-1]


def _mesh(run: Run) -> Any:
    return MESHES.get((run.program.ranks,))


SHARDED_MISUSE: dict[str, Any] = {
    "wrap_again": lambda run: run.api.fully_shard(run.model),
    "wrap_container": lambda run: run.api.fully_shard(nn.ModuleList([_linear()])),
    "wrap_dict": lambda run: run.api.fully_shard(nn.ModuleDict({"a": _linear()})),
    "invalid_dim": lambda run: run.api.fully_shard(_linear(), shard_placement_fn=lambda p: Shard(5)),
    "uneven_dim": lambda run: run.api.fully_shard(
        nn.Linear(3, 3), shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "scalar": lambda run: run.api.fully_shard(nn.ParameterList([nn.Parameter(torch.tensor(1.0))])),
    "not_a_module": lambda run: run.api.fully_shard(3),
    "empty_list": lambda run: run.api.fully_shard([]),
    "reshard_number": lambda run: run.api.fully_shard(_linear(), reshard_after_forward=3),
    "mesh_three_dims": lambda run: run.api.fully_shard(
        _linear(), mesh=init_device_mesh("cpu", (1, 1, run.program.ranks))
    ),
    "mesh_without_names": lambda run: run.api.fully_shard(
        _linear(), mesh=init_device_mesh("cpu", (1, run.program.ranks))
    ),
    "prefetch_plain": lambda run: run.model.set_modules_to_forward_prefetch([_linear()]),
    "max_buffers": lambda run: run.model.set_reduce_scatter_max_input_buffers(0),
    "reshard_text": lambda run: run.model.set_reshard_after_forward(2),
    "factor_text": lambda run: run.model.set_reshard_after_backward(False),
    "inner_reset": lambda run: run.plain.blocks[-1].reset_iter_state(),
    "custom_without_group": lambda run: run.model.set_symm_mem_for_comm(),
    "hook_text": lambda run: run.model.set_all_reduce_hook(lambda t: None, stream=3),
}


@perform.register
def _(operation: ops.Misuse, run: Run) -> Seen:
    table = FLAT_MISUSE if run.is_flat else SHARDED_MISUSE
    table[operation.what](run)
    return {}
