"""Every private name of torch that this FSDP uses: what for, and the public name that it waits for.

A name is looked up when it is first imported from here, and once, so that a call costs what it cost::

    from ..shared.torch_internals import chunk_cat        # torch._chunk_cat

In a torch that does not have it, that import raises `TorchInternalError`; `missing` looks for all of them.
The bench has such a module too, and neither can import the other's.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # what is used as a type
    from torch.distributed._composable.contract import RegistryItem as RegistryItem
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        ActivationWrapper as ActivationWrapper,
    )
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # noqa: F401
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class TorchInternalError(ImportError):
    """The installed torch lacks a private name that something cannot do without."""


class Internal(NamedTuple):
    """A private name: where it is (module:attribute), what cannot run without it, and what it waits for."""

    path: str
    needed_for: str
    public: str = "none"
    # Its value changes: what is imported is a function that reads it.
    changes: bool = False


_SAVED = "state dicts of ShardedTensor (StateDictType.SHARDED_STATE_DICT without a mesh)"
_DTENSOR = "torch.distributed.tensor.DTensor.from_local, which asks the other ranks"
_COMMUNICATION = "gradients in and out of a unit's buffers in one kernel"
_SHARDED = "torch.distributed._shard.sharded_tensor"
_CONTRACT, _BESIDE = "torch.distributed._composable.contract", "fully_shard beside torch's replicate"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_TRANSFORMS = "units under torch.func's transforms"
_DEFERRED = "deferred_init"
_MUON = "Muon for sharded parameters"

INTERNALS = {
    "ActivationWrapper": Internal(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper",
        "names of parameters below checkpointed modules",
    ),
    "AsyncCollectiveTensor": Internal(
        "torch.distributed._functional_collectives:AsyncCollectiveTensor",
        "gradients of tensor parallelism that are still being communicated",
    ),
    "BatchNorm": Internal(
        "torch.nn.modules.batchnorm:_BatchNorm", "MixedPrecision, which leaves batch norm in full precision"
    ),
    "DTensorSpec": Internal(f"{_SPEC}:DTensorSpec", "sharded parameters", _DTENSOR),
    "DisableFuncTorch": Internal("torch._C:_DisableFuncTorch", _TRANSFORMS),
    "DisableTorchFunction": Internal("torch._C:DisableTorchFunctionSubclass", "fast attributes of DTensors"),
    "RegistryItem": Internal(f"{_CONTRACT}:RegistryItem", _BESIDE),
    "REGISTRY_KEY": Internal(f"{_CONTRACT}:REGISTRY_KEY", _BESIDE),
    "ShardMetadata": Internal("torch.distributed._shard.sharding_spec:ShardMetadata", _SAVED),
    "ShardedTensor": Internal(f"{_SHARDED}:ShardedTensor", _SAVED),
    "ShardedTensorMetadata": Internal(f"{_SHARDED}:ShardedTensorMetadata", _SAVED),
    "ShardedTensorShard": Internal(f"{_SHARDED}:Shard", _SAVED),
    "StridedShard": Internal(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "parameters that tensor parallelism shards in the same dimension",
    ),
    "TensorBase": Internal("torch._C:TensorBase", _DEFERRED, "torch.Tensor, where scripts may change it"),
    "TensorMeta": Internal(f"{_SPEC}:TensorMeta", "sharded parameters", _DTENSOR),
    "TensorProperties": Internal(f"{_SHARDED}.metadata:TensorProperties", _SAVED),
    "TorchDispatchMode": Internal("torch.utils._python_dispatch:TorchDispatchMode", _DEFERRED),
    "are_functorch_transforms_active": Internal("torch._C:_are_functorch_transforms_active", _TRANSFORMS),
    "chunk_cat": Internal("torch:_chunk_cat", _COMMUNICATION),
    "concatenate_meshes": Internal(
        "torch.distributed.device_mesh:DeviceMesh._concatenate",
        "FSDP with tensor parallelism: one mesh of both",
    ),
    "current_graph_task_id": Internal(
        "torch._C:_current_graph_task_id", "forwards that checkpointing repeats"
    ),
    "default_hooks": Internal(
        "torch.distributed.algorithms._comm_hooks.default_hooks", "torch's own communication hooks"
    ),
    "foreach_add_": Internal("torch:_foreach_add_", "adding up gradients in one kernel"),
    "foreach_copy_": Internal("torch:_foreach_copy_", "copies of parameters in one kernel"),
    "get_default_store": Internal(
        "torch.distributed.distributed_c10d:_get_default_store",
        "the check that all ranks do the same",
        "init_process_group(store=), where the caller made one",
    ),
    "has_storage": Internal("torch._C:_has_storage", _DEFERRED),
    "increment_version": Internal("torch._C:_increment_version", "parameters that backward must not read"),
    "is_profiler_enabled": Internal(
        "torch.autograd.profiler:_is_profiler_enabled", "labels in traces", changes=True
    ),
    "is_traceable_wrapper_subclass": Internal(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "tensors of several tensors"
    ),
    "make_subclass": Internal(
        "torch:Tensor._make_subclass", _DEFERRED, "torch.Tensor.as_subclass, which keeps no requires_grad"
    ),
    "muon_adjust_lr": Internal("torch.optim._muon:_adjust_lr", _MUON, "torch.optim.Muon on sharded matrices"),
    "muon_orthogonalise": Internal(
        "torch.optim._muon:_zeropower_via_newtonschulz", _MUON, "torch.optim.Muon on sharded matrices"
    ),
    "preserve_versions": Internal(
        "torch.autograd:_unsafe_preserve_version_counter", "inputs changed in place"
    ),
    "queue_callback": Internal(
        "torch.autograd:Variable._execution_engine.queue_callback",
        "what is to be done at the end of backward",
    ),
    "set_versions": Internal("torch._C:_autograd._unsafe_set_version_counter", "parameters that come and go"),
    "sharded_tensor_from_shards": Internal(
        f"{_SHARDED}:ShardedTensor._init_from_local_shards_and_global_metadata", _SAVED
    ),
    "symmetric_memory": Internal("torch.distributed._symmetric_memory", "set_symm_mem_for_comm"),
    "tree_leaves": Internal("torch.utils._pytree:tree_leaves", _DEFERRED),
    "tree_map": Internal("torch.utils._pytree:tree_map", _DEFERRED),
}


def missing() -> list[str]:
    """Return a sentence for every name that the installed torch lacks; imports all modules that have one."""
    found = []
    for internal in INTERNALS.values():
        try:
            _find(internal)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def _find(internal: Internal) -> Any:
    """Return what torch has under a name now."""
    module, _, attributes = internal.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            owner, found = found, getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch"):
            raise  # something that torch itself needs
        raise _gone(internal) from error
    return partial(getattr, owner, name) if internal.changes else found


def _gone(internal: Internal) -> TorchInternalError:
    name = internal.path.replace(":", ".")
    return TorchInternalError(
        f"torch {torch.__version__} has no {name}, needed for {internal.needed_for}: "
        "install a version of torch that has it"
    )


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _find(INTERNALS[name])
    return found
