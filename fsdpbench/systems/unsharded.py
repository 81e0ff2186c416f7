"""Systems that keep the whole model on every rank: PyTorch's DDP, and a single GPU."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.systems.base import ABSENT, BuildContext, System, refuse_lora, refuse_optimizer
from fsdpbench.systems.narrow import refuse_narrow

if TYPE_CHECKING:
    import torch
    from torch import nn

NO_SHARDING = ABSENT["unsharded"]
"""Settings that a system without sharding lacks, with reasons."""


class _UnshardedSystem(System):
    """The common part of systems without sharding. Mixed precision is autocast: weights stay fp32."""

    shards = False
    absent = NO_SHARDING

    def refuses(self, config: Config) -> dict[str, str]:
        return refuse_lora(config) | refuse_narrow(config) | refuse_optimizer(config)

    def forward_context(self, config: Config, device: "torch.device") -> AbstractContextManager[object]:
        import torch

        from fsdpbench.workloads.layers import DTYPES

        dtype = DTYPES[config.settings.param_dtype]
        return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)

    def _plain(self, context: BuildContext) -> "nn.Module":
        model = context.build_model()
        if context.config.settings.compile:
            model.compile()
        return model


class TorchDdp(_UnshardedSystem):
    """Replicas with gradients averaged by DDP."""

    name = "torch-ddp"
    summary = "PyTorch's DistributedDataParallel"

    def wrap(self, context: BuildContext) -> "nn.Module":
        from torch import nn

        return nn.parallel.DistributedDataParallel(self._plain(context), gradient_as_bucket_view=True)

    def microbatch(self, model: Any, *, sync: bool) -> AbstractContextManager[object]:
        return nullcontext() if sync else model.no_sync()


class Single(_UnshardedSystem):
    """The unwrapped model, as a reference."""

    name = "single"
    summary = "one GPU alone, no communication"

    def refuses(self, config: Config) -> dict[str, str]:
        refused = {"gpus": "it runs on one GPU"} if config.gpus != 1 else {}
        return refused | super().refuses(config)

    def wrap(self, context: BuildContext) -> "nn.Module":
        return self._plain(context)
