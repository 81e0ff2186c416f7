"""What a system under test is: how it wraps a model, and which settings it has.

A setting that a system does not have at all is in `absent`; a value that it cannot do is refused by
`refuses`. Both are *not applicable*: never a point of a sweep, said once, never silently ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fsdpbench.config import Config
from workloads import Workload

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BuildContext:
    """What a system needs to build its model: the configuration, the workload and this rank's device."""

    config: Config
    workload: Workload
    device: torch.device
    deferred: bool
    """Build on the meta device and materialise after sharding (a model that one rank cannot hold)."""

    def build_model(self) -> nn.Module:
        """The plain model with seeded weights, on the meta device if deferred."""
        settings = self.config.settings
        torch.manual_seed(settings.seed)
        with torch.device("meta" if self.deferred else self.device):
            return self.workload.build(
                activation_checkpointing=settings.activation_checkpointing,
                seq=settings.seq,
            )

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the model."""
        return shard_size_of(self.config)


class System(ABC):
    """One system under test; its instances hold no state, one serves all configurations."""

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu", "sim"})
    shards: ClassVar[bool] = True
    absent: ClassVar[Mapping[str, str]] = {}

    def absent_settings(self, config: Config) -> Mapping[str, str]:
        """Settings that this system does not have in this configuration: name -> reason."""
        return self.absent

    def refuses(self, config: Config) -> dict[str, str]:
        """Values that this system cannot do: setting -> reason. Empty: it can run `config`."""
        return {}

    @abstractmethod
    def wrap(self, context: BuildContext) -> nn.Module:
        """Build the model and wrap it. The result is called as `model(*batch) -> loss`."""

    def forward_context(self, config: Config, device: torch.device) -> AbstractContextManager[object]:
        """Entered around each forward."""
        return nullcontext()

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Entered around one microbatch; with `sync` False its gradients stay local."""
        return nullcontext()


def shard_size_of(config: Config) -> int:
    """Ranks over which one copy is sharded under the strategy of `config`."""
    settings = config.settings
    if settings.strategy == "NO_SHARD":
        return 1
    if "HYBRID" in settings.strategy:
        return settings.shard_size or min(config.gpus, config.gpus_per_node)
    return config.gpus


def refuse_common(config: Config) -> dict[str, str]:
    """What no sharding system can do: sizes that do not divide, settings without meaning together."""
    settings, refused = config.settings, {}
    size = shard_size_of(config)
    if config.gpus % size:
        refused["shard_size"] = f"{config.gpus} ranks cannot be divided into copies of {size}"
    if settings.shard_size is not None and "HYBRID" not in settings.strategy:
        refused["shard_size"] = f"it belongs to the hybrid strategies, not to {settings.strategy}"
    if settings.compile and config.device == "sim":
        refused["compile"] = "a simulated GPU runs operators one by one, not compiled graphs"
    return refused


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a sharded meta-device model its memory and its initial weights (a simulated tensor holds none)."""
    model.to_empty(device=device)
    if device.type == "sim":
        return
    for module in model.modules():
        init_module(module)


@torch.no_grad()
def init_module(module: nn.Module) -> None:
    """Run a module's own `reset_parameters`, as torch's layers and the workloads define it."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
