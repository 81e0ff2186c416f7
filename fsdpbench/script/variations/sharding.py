"""The variations of the units: arguments of `fully_shard` and FSDP1, and other units."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdpbench.base.configuration.script_source import Variation
from fsdpbench.base.errors import PicklableError
from fsdpbench.script import interposing
from fsdpbench.script.model_blocks import blocks_of, has_units, unwrapped_root
from fsdpbench.sim.torch_device.patches.dynamo import passing_to


class Argument:
    """A variation that sets an argument of every unit that the script makes, and counts its changes."""

    def __init__(self, variation: Variation) -> None:
        self.count = 0
        self._meshes: dict[str, DeviceMesh] = {}
        self._variation = variation
        interposing.around_fully_shard(self._fully_shard)
        interposing.around_init(fsdp.FullyShardedDataParallel, self._fsdp1)
        if variation is Variation.NO_OFFLOAD:
            _make_on_the_device()

    def _set(self, kwargs: interposing.Arguments, name: str, value: Any, default: Any = None) -> None:
        if kwargs.get(name, default) != value:
            kwargs[name] = value
            self.count += 1

    def _fully_shard(self, module: Any, kwargs: interposing.Arguments) -> None:
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

    def _fsdp1(self, module: Any, kwargs: interposing.Arguments) -> None:
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
        elif variation is Variation.LIMIT:
            self._set(kwargs, "limit_all_gathers", True, True)
        elif (
            variation is Variation.HYBRID
            and strategy is ShardingStrategy.FULL_SHARD
            and kwargs.get("process_group") is None
            and _is_flat(kwargs.get("device_mesh"))
        ):
            kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            self._set(kwargs, "device_mesh", self._mesh())

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of nodes by GPUs per node."""
        if "hybrid" not in self._meshes:
            each = int(os.environ["LOCAL_WORLD_SIZE"])
            sizes = (dist.get_world_size() // each, each)
            self._meshes["hybrid"] = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard"))
        return self._meshes["hybrid"]


def _is_flat(mesh: DeviceMesh | None) -> bool:
    """Return whether a mesh has all ranks in one dimension."""
    return mesh is None or (mesh.ndim == 1 and mesh.size() == dist.get_world_size())


def _computes_in_fp32(policy: Any) -> bool:
    return policy is None or policy.param_dtype in (None, torch.float32)


def _make_on_the_device() -> None:
    """Create on the device what the script creates on the host for shards that were to stay there."""

    def to_empty(original: Callable[..., Any], module: Any, *, device: Any, **options: Any) -> Any:
        on_host = device is not None and torch.device(device).type == "cpu"
        return original(module, device="cuda" if on_host else device, **options)

    interposing.around(nn.Module, "to_empty", to_empty)


class NoEffectError(PicklableError, RuntimeError):
    """Raised if a script ran without anything that the variation could change."""

    def __init__(self, variation: Variation) -> None:
        super().__init__(f"the script has nothing that the variation {variation.value!r} could change")


class Blocks:
    """A variation whose units are the repeated blocks and the model around them, whatever the script wraps.

    Calls for parts of the model are delayed until the call for the model itself.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[Any, dict[str, Any]]] = []
        self._inside = False
        interposing.replace_fully_shard(passing_to(self._made))
        interposing.around(fsdp.FullyShardedDataParallel, "__init__", self._fsdp1)
        interposing.around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._flush())

    def _made(self, original: Callable[..., Any], module: Any, **kwargs: Any) -> Any:
        self._original = original
        blocks = None if isinstance(module, list | tuple) else blocks_of(module)
        if blocks is None:
            self._waiting.append((module, kwargs))
            return module
        of_units = self._waiting[0][1] if self._waiting else kwargs
        for block in blocks.modules:
            original(block, **of_units)
        self._waiting.clear()
        self.count += 1
        return original(module, **kwargs)

    def _flush(self) -> None:
        for module, kwargs in self._waiting:
            self._original(module, **kwargs)
        self._waiting.clear()

    def _fsdp1(
        self, original: Callable[..., Any], made: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if not self._inside and not args and not has_units(module):
            blocks = blocks_of(module)
            if blocks is not None:
                chosen = set(blocks.modules)
                kwargs["auto_wrap_policy"] = CustomPolicy(lambda each: each in chosen)
                self.count += 1
        before, self._inside = self._inside, True
        try:
            original(made, module, *args, **kwargs)
        finally:
            self._inside = before


class Root:
    """A variation that makes the module around all units a unit when the first optimizer is created
    (only `fully_shard`)."""

    def __init__(self) -> None:
        self.count = 0
        self._kwargs: Mapping[str, Any] = {}
        interposing.replace_fully_shard(passing_to(self._made))
        interposing.around_init(torch.optim.Optimizer, self._before_optimizer)

    def _made(self, original: Callable[..., Any], module: Any, **kwargs: Any) -> Any:
        self._original = original
        self._kwargs = {name: value for name, value in kwargs.items() if name != "reshard_after_forward"}
        return original(module, **kwargs)

    def _before_optimizer(self, parameters: Any, kwargs: Mapping[str, Any]) -> None:
        root = unwrapped_root()
        if self.count or root is None:
            return
        before = dict(root.named_parameters())
        self._original(root, **self._kwargs)
        after = dict(root.named_parameters())
        changed = {id(old): after[name] for name, old in before.items() if name in after}
        _exchange(parameters, changed)
        self.count += 1


def _exchange(parameters: Any, changed: dict[int, Any]) -> None:
    """Replace parameters in a list by their sharded versions; generators yield the new ones anyway."""
    if not isinstance(parameters, list):
        return
    for index, each in enumerate(parameters):
        if isinstance(each, dict):
            held = each["params"]
            held = [held] if isinstance(held, torch.Tensor) else held
            if isinstance(held, Iterable):
                each["params"] = [changed.get(id(one), one) for one in held]
        else:
            parameters[index] = changed.get(id(each), each)


class Pairs:
    """A variation that makes one unit of two blocks of one class that are wrapped one after the other
    (only `fully_shard`)."""

    def __init__(self) -> None:
        self.count = 0
        self._first: tuple[Any, dict[str, Any]] | None = None
        interposing.replace_fully_shard(passing_to(self._made))
        interposing.around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._flush())

    def _made(self, original: Callable[..., Any], module: Any, **kwargs: Any) -> Any:
        self._original = original
        if isinstance(module, list | tuple) or has_units(module):
            self._flush()
            return original(module, **kwargs)
        if self._first is None or type(self._first[0]) is not type(module):
            self._flush()
            self._first = module, kwargs
            return module
        (first, _), self._first = self._first, None
        original([first, module], **kwargs)
        self.count += 1
        return module

    def _flush(self) -> None:
        if self._first is not None:
            module, kwargs = self._first
            self._first = None
            self._original(module, **kwargs)
