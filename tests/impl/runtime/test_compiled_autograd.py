"""Compiled autograd is refused: it reads what autograd saved before any hook gathers parameters.

torch's FSDPs run there and train wrongly, or fail in the second step.
"""

from __future__ import annotations

import pytest
import torch
from host_cases import fake_group
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpbench import impl

BATCH = torch.ones(2, 4)


def wrapped(kind: str, mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "fully_shard":
        for module in (*model, model):
            impl.fully_shard(module, mesh=mesh)
        return model
    if kind == "root":
        return impl.fully_shard(model, mesh=mesh)
    policy = impl.ModuleWrapPolicy({nn.Linear})
    return impl.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=kind == "original"
    )


def case_refused(rank: int) -> None:
    def compiled() -> object:
        return compiled_autograd._enable(torch.compile(backend="eager"))

    with fake_group():
        mesh = init_device_mesh("cpu", (2,))
        for kind in ("fully_shard", "root", "flat", "original"):
            model = wrapped(kind, mesh)
            for _ in range(2):
                with compiled(), pytest.raises(RuntimeError, match=r"compiled_autograd = False"):
                    model(BATCH).sum().backward()
            model(BATCH).sum().backward()
            assert model[0].weight.grad is not None or kind == "flat"
        model = wrapped("root", mesh)
        loss = model(BATCH).sum()
        with compiled(), pytest.raises(RuntimeError, match="compiled autograd"):
            loss.backward()
        with torch._dynamo.config.patch(compiled_autograd=True):  # which is on in what is compiled alone
            torch.compile(model, backend="eager")(BATCH).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_refused(lone_process) -> None:
    lone_process.run(case_refused)
