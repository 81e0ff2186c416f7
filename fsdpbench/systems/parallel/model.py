"""A built model made parallel, before FSDP shards it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.degrees import Degrees
from fsdpbench.systems.parallel.experts import Meshes, share_experts
from fsdpbench.systems.parallel.tensor import cut
from fsdpbench.workloads import Workload
from fsdpbench.workloads.tensor_plan import HasTensorPlan


def parallelise(model: nn.Module, workload: Workload, meshes: Meshes) -> None:
    """Cut `model` as `meshes` have it, in place; nothing where they are of data parallelism alone."""
    if meshes.experts is not None:
        share_experts(model, meshes.experts)
    if meshes.tensor is not None:
        assert isinstance(workload, HasTensorPlan), "refused before"
        cut(model, workload.tensor_plan(), workload.block_classes, meshes.tensor)


def context_of(config: Config) -> AbstractContextManager[object]:
    """What forward and backward run in: with tensor parallelism the loss of a cut vocabulary."""
    return loss_parallel() if Degrees.of(config).tp > 1 else nullcontext()
