"""Collectives, memory and hooks of the user's own are called as torch calls them, to the same effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Model, assert_close, full_dtensors, loss_of, shard_model, tokens_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_version import BEFORE_2_12

from fsdpbench import impl
from fsdpbench.impl.collectives import comm


class Gather:
    """Logs each use; communicates as usual."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name
        self.made: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.log.append(("allocate", self.name, tuple(size), dtype))
        self.made.append(torch.empty(*size, dtype=dtype, device=device))
        return self.made[-1]

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.log.append(("gather", self.name, output_tensor.numel(), input_tensor.numel()))
        own = output_tensor.chunk(group.size())[group.rank()]
        assert own.data_ptr() == input_tensor.data_ptr()  # in place
        assert output_tensor.data_ptr() == self.made[-1].data_ptr()
        return comm.all_gather(output_tensor, input_tensor, group, async_op)


class Reduce(Gather):
    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.log.append(("reduce", self.name, output_tensor.numel(), input_tensor.numel()))
        pointers = {made.data_ptr() for made in self.made[-2:]}
        assert pointers == {output_tensor.data_ptr(), input_tensor.data_ptr()}
        return comm.reduce_scatter(output_tensor, input_tensor, group, op, async_op)


def step(kind: str, rank: int, prepare: Any, mesh: tuple[int, ...], **arguments: Any) -> dict[str, Any]:
    """Two steps' gradients, whole; ``prepare(module, name)`` is called for each wrapped module."""
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model: Any = shard_model(kind, Model(blocks=2), mesh=device_mesh, **arguments)
    for name, module in (("root", model), *((str(i), b) for i, b in enumerate(model.blocks))):
        prepare(module, name)
    for index in range(2):
        loss_of(model, tokens_of(rank, index)).backward()
    return full_dtensors(model, gradients=True)


def case_custom(rank: int, *, policy: Any, mesh: tuple[int, ...], reshard: Any) -> None:
    logs: dict[str, list[Any]] = {"torch": [], "impl": []}
    gradients = {}
    for kind, log in logs.items():

        def prepare(module: Any, name: str, log: list[Any] = log) -> None:
            module.set_custom_all_gather(Gather(log, name))
            module.set_custom_reduce_scatter(Reduce(log, name))

        arguments = {"policy": policy, "reshard_after_forward": reshard}
        gradients[kind] = step(kind, rank, prepare, mesh, **arguments)
    plain = step("impl", rank, lambda *_: None, mesh, policy=policy, reshard_after_forward=reshard)
    assert_close(gradients["impl"], gradients["torch"], 1e-6)
    assert_close(gradients["impl"], plain, 1e-6)
    for what in ("gather", "reduce"):
        ours, theirs = ([e for e in logs[kind] if e[0] == what] for kind in ("impl", "torch"))
        assert len(ours) == (10 if what == "gather" else 6)
        assert ours == theirs
    ours, theirs = (sorted(map(str, logs[kind])) for kind in ("impl", "torch"))
    assert ours == theirs  # as many allocations, of the same sizes and dtypes


@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_custom_collectives_are_used_as_torch_uses_them(two_ranks, policy: Any) -> None:
    two_ranks.run(case_custom, policy=policy, mesh=(2,), reshard=None)


def case_hook(rank: int, *, mesh: tuple[int, ...], policy: Any, force_sum: bool) -> None:
    """The hook sees what torch's sees, in its order, and what it makes of it arrives."""
    logs: dict[str, list[Any]] = {"torch": [], "impl": []}
    gradients = {}
    for kind, log in logs.items():

        def prepare(module: Any, name: str, log: list[Any] = log) -> None:
            def hook(shard: torch.Tensor) -> None:
                log.append((name, shard.dtype, shard.shape, shard.double().abs().sum().item()))
                shard.mul_(3)

            module.set_all_reduce_hook(hook)
            module.set_force_sum_reduction_for_comms(force_sum)

        gradients[kind] = step(kind, rank, prepare, mesh, policy=policy)
    assert_close(gradients["impl"], gradients["torch"], 1e-6)
    assert len(logs["impl"]) == len(logs["torch"]) == 6
    for ours, theirs in zip(logs["impl"], logs["torch"], strict=True):
        assert ours[:-1] == theirs[:-1]
        assert ours[-1] == pytest.approx(theirs[-1], rel=1e-5)
    plain = step("impl", rank, lambda *_: None, mesh, policy=policy)
    assert_close({k: v * 3 for k, v in plain.items()}, gradients["impl"], 1e-5)


@pytest.mark.parametrize(
    ("policy", "force_sum"),
    [(None, False), (None, True), ((torch.bfloat16, torch.float32), False)],
    ids=["average", "sum", "bf16"],
)
def test_hook_after_the_reduction(two_ranks, policy: Any, force_sum: bool) -> None:
    two_ranks.run(case_hook, mesh=(2,), policy=policy, force_sum=force_sum)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)], ids=["hybrid", "replicated"])
def test_hook_after_the_sum_over_replicas(four_ranks, mesh: tuple[int, ...]) -> None:
    four_ranks.run(case_hook, mesh=mesh, policy=None, force_sum=False)


def case_one_rank(rank: int) -> None:
    """Nothing is reduced, and the hook is called all the same."""
    seen: list[float] = []
    model: Any = impl.fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (1,)))
    model.set_all_reduce_hook(lambda shard: seen.append(shard.mul_(2).sum().item()))
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [2 * (2 * 12 + 2 * 3)]
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 4), 4.0))


def test_hook_on_one_rank(one_rank) -> None:
    one_rank.run(case_one_rank)


def case_refusals(rank: int) -> None:
    """What torch refuses is refused, with the same kind of error."""
    from torch.distributed import fsdp as torch_fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class Theirs(Gather, AllGather):
        pass

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for api in (torch_fsdp, impl):
        model: Any = api.fully_shard(nn.Linear(4, 4), mesh=hybrid)
        # A CUDA build of torch refuses on the CPU only when it communicates.
        if hasattr(model, "set_symm_mem_for_comm") and (api is impl or not torch.backends.cuda.is_built()):
            with pytest.raises((RuntimeError, AssertionError)):
                model.set_symm_mem_for_comm()
        for sizes in ((4, 1), (1, 4), (2, 2)):  # also where one of the two groups is of this rank alone
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
            model = api.fully_shard(nn.Linear(4, 4), mesh=mesh)
            with pytest.raises(ValueError, match="stream cannot be set"):
                model.set_all_reduce_hook(print, stream=object())
        model.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no allocator: as before
        model(torch.ones(2, 4)).sum().backward()
        model.set_allocate_memory_from_process_group_for_comm(False)
        model.set_custom_all_gather(Theirs([], ""))
        with pytest.raises(AssertionError, match="custom"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        if hasattr(model, "set_reduce_scatter_max_input_buffers"):
            for wrong, error in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
                with pytest.raises(error, match="max_input_buffers"):
                    model.set_reduce_scatter_max_input_buffers(wrong)
    dist.barrier()


def test_what_torch_refuses(four_ranks) -> None:
    four_ranks.run(case_refusals)


def case_several_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Any:
        if parameter.dim() == 1:
            return ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["b"], shard_mesh_dim=0))
        return None

    model: Any = impl.fully_shard(nn.Linear(4, 4), mesh=mesh["a"], shard_placement_fn=place)
    with pytest.raises(ValueError, match=r"set_all_reduce_hook is not supported .* several meshes"):
        model.set_all_reduce_hook(print)


@pytest.mark.skipif(BEFORE_2_12, reason="torch 2.11 has one mesh for all parameters")
def test_one_hook_for_several_meshes_is_refused(four_ranks) -> None:
    four_ranks.run(case_several_meshes)
