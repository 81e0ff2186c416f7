"""Variations of one argument of `fully_shard` and `FullyShardedDataParallel`."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from fsdpbench.script.interposing.calls import around_fsdp1, around_fully_shard

_Arguments = dict[str, Any]


class Argument:
    """Sets an argument wherever the script makes a unit; counts the units for which that is another one."""

    def __init__(self, variation: Variation) -> None:
        self.count = 0
        self._meshes: dict[str, DeviceMesh] = {}
        self._variation = variation
        around_fully_shard(self._fully_shard)
        around_fsdp1(self._fsdp1)
        if variation is Variation.NO_OFFLOAD:
            _make_on_the_device()

    def _set(self, kwargs: _Arguments, name: str, value: Any, default: Any = None) -> None:
        if kwargs.get(name, default) != value:
            kwargs[name] = value
            self.count += 1

    def _fully_shard(self, module: Any, kwargs: _Arguments) -> None:
        variation = self._variation
        if variation is Variation.RESHARD and kwargs.get("reshard_after_forward") is False:
            self._set(kwargs, "reshard_after_forward", True)
        elif variation is Variation.KEEP:
            self._set(kwargs, "reshard_after_forward", False)
        elif variation is Variation.BF16 and _computes_in_fp32(kwargs.get("mp_policy")):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self._set(kwargs, "mp_policy", policy)
        elif variation is Variation.NO_OFFLOAD:
            if isinstance(kwargs.get("offload_policy"), fsdp.CPUOffloadPolicy):
                self._set(kwargs, "offload_policy", fsdp.OffloadPolicy())
        elif variation is Variation.HYBRID and _is_flat(kwargs.get("mesh")):
            self._set(kwargs, "mesh", self._mesh())

    def _fsdp1(self, module: Any, kwargs: _Arguments) -> None:
        variation = self._variation
        strategy = kwargs.get("sharding_strategy") or ShardingStrategy.FULL_SHARD
        if variation is Variation.RESHARD and strategy is ShardingStrategy.SHARD_GRAD_OP:
            self._set(kwargs, "sharding_strategy", ShardingStrategy.FULL_SHARD)
        elif variation is Variation.KEEP and strategy is ShardingStrategy.FULL_SHARD:
            self._set(kwargs, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP)
        elif variation is Variation.BF16 and _computes_in_fp32(kwargs.get("mixed_precision")):
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self._set(kwargs, "mixed_precision", policy)
        elif variation is Variation.NO_OFFLOAD and getattr(
            kwargs.get("cpu_offload"), "offload_params", False
        ):
            self._set(kwargs, "cpu_offload", None, kwargs["cpu_offload"])
        elif variation in (Variation.PREFETCH, Variation.BACKWARD_PREFETCH):
            early = BackwardPrefetch.BACKWARD_PRE
            self._set(kwargs, "backward_prefetch", early, early)
            if variation is Variation.PREFETCH:
                self._set(kwargs, "forward_prefetch", True, False)
        elif variation is Variation.NO_FORWARD_PREFETCH:
            self._set(kwargs, "forward_prefetch", False, False)
        elif variation in (Variation.LIMIT, Variation.NO_LIMIT):
            self._set(kwargs, "limit_all_gathers", variation is Variation.LIMIT, True)
        elif (
            variation is Variation.HYBRID
            and strategy is ShardingStrategy.FULL_SHARD
            and kwargs.get("process_group") is None
            and _is_flat(kwargs.get("device_mesh"))
        ):
            kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            self._set(kwargs, "device_mesh", self._mesh())

    def _mesh(self) -> DeviceMesh:
        """Nodes by the GPUs of one."""
        if "hybrid" not in self._meshes:
            each = int(os.environ["LOCAL_WORLD_SIZE"])
            sizes = (dist.get_world_size() // each, each)
            self._meshes["hybrid"] = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard"))
        return self._meshes["hybrid"]


def _is_flat(mesh: DeviceMesh | None) -> bool:
    """Whether a mesh is of all ranks, in one dimension."""
    return mesh is None or (mesh.ndim == 1 and mesh.size() == dist.get_world_size())


def _computes_in_fp32(policy: Any) -> bool:
    return policy is None or policy.param_dtype in (None, torch.float32)


def _make_on_the_device() -> None:
    """What the script makes on the host because its shards were to stay there is made on the device."""
    kind: Any = nn.Module
    original = kind.to_empty

    def to_empty(module: Any, *, device: Any, recurse: bool = True) -> Any:
        on_host = device is not None and torch.device(device).type == "cpu"
        return original(module, device="cuda" if on_host else device, recurse=recurse)

    kind.to_empty = to_empty


class Variation(StrEnum):
    """What is varied. Some take a number after `=` (`loader-time=0.05/4`)."""

    CHECKPOINT = "checkpoint"
    """Every wrapped unit computes its forward again in backward."""
    NO_CHECKPOINT = "no-checkpoint"
    """Nothing is computed again."""
    HALF_CHECKPOINT = "half-checkpoint"
    """Of what is checkpointed, every second one is not."""
    RESHARD = "reshard"
    """Units free their parameters after forward, whatever the script says."""
    KEEP = "keep"
    """Units keep their parameters from forward to backward."""
    HALF_BATCH = "half-batch"
    DOUBLE_BATCH = "double-batch"
    WRAP_BLOCKS = "wrap-blocks"
    """Each of the model's repeated blocks is a unit, and the model around them."""
    WRAP_ROOT = "wrap-root"
    """The module around all units is one, too."""
    WRAP_PAIRS = "wrap-pairs"
    """Two blocks in a row are one unit."""
    PREFETCH = "prefetch"
    """Forward prefetches the next unit; backward too, where that was switched off."""
    BACKWARD_PREFETCH = "backward-prefetch"
    """FSDP1: backward prefetches, as it does by default."""
    NO_FORWARD_PREFETCH = "no-forward-prefetch"
    LIMIT = "limit"
    NO_LIMIT = "no-limit"
    """FSDP1's rate limiter."""
    HYBRID = "hybrid"
    """Sharded inside a node, replicated over nodes."""
    BF16 = "bf16"
    """Parameters are gathered, and products computed, in bf16."""
    NO_OFFLOAD = "no-offload"
    """Shards stay on the GPU."""
    FUSED = "fused"
    """The optimizer's fused kernel."""
    NONE_GRADS = "none-grads"
    """`zero_grad` drops gradients."""
    COMPILE = "compile"
    """Every wrapped unit is compiled."""
    NO_WAITS = "no-waits"
    """The CPU does not wait where the script's own lines make it wait."""
    DETACH_KEPT = "detach-kept"
    """What is kept from step to step is detached from its graph."""
    HOST_KEPT = "host-kept"
    """It is moved to the host too."""
    LOADER_TIME = "loader-time"
    """A batch takes the host so many seconds: `loader-time=SECONDS/WORKERS`."""


class NoEffectError(RuntimeError):
    """A script ran, and there was nothing in it to vary."""

    def __init__(self, variation: Variation) -> None:
        super().__init__(f"the script has nothing that the variation {variation.value!r} could change")


def parse_variation(text: str) -> tuple[Variation, str]:
    """The variation that `text` names, and what follows its `=`."""
    name, _, value = text.partition("=")
    return Variation(name), value
