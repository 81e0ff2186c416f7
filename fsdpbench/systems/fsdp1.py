"""`FullyShardedDataParallel` (one flat parameter a unit), ours and PyTorch's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import is_mixed
from fsdpbench.systems import base
from fsdpbench.systems.narrow import TORCH_DTYPES, software_of
from fsdpbench.systems.wrapping import select_units


class _FlatParameterSystem(base.System):
    """The common part of both FSDP1s: torch's constructor. `_extras` adds arguments that only one has."""

    @abstractmethod
    def _module(self) -> Any:
        """Return the namespace of the classes and enums of FSDP1, by torch's names."""

    @abstractmethod
    def _extras(self, config: Config) -> dict[str, object]:
        """Return the constructor arguments beyond those that both have."""

    def wrap(self, context: base.BuildContext) -> nn.Module:
        config, settings, fsdp = context.config, context.config.settings, self._module()
        model = context.build_model()
        units = select_units(model, context.workload, settings.wrap)
        base.offload_if_asked(units, config)
        # Arguments of single units, by their modules; True: none of its own.
        special: dict[nn.Module, Any] = dict.fromkeys(units, True)
        if settings.keep_last_unsharded:
            kept = "SHARD_GRAD_OP" if settings.strategy == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"
            special[units[0]] = {"sharding_strategy": fsdp.ShardingStrategy[kept]}
        prefetch = fsdp.BackwardPrefetch
        prefetches = {"pre": prefetch.BACKWARD_PRE, "post": prefetch.BACKWARD_POST}
        arguments = {
            "sharding_strategy": fsdp.ShardingStrategy[settings.strategy],
            "auto_wrap_policy": fsdp.CustomPolicy(lambda module: special.get(module, False)),
            "backward_prefetch": prefetches.get(settings.backward_prefetch or "none"),
            "mixed_precision": _mixed_precision(fsdp, config),
            "device_id": context.device,
            "use_orig_params": True,
            "cpu_offload": fsdp.CPUOffload(offload_params=True) if settings.cpu_offload else None,
        }
        if "HYBRID" in settings.strategy:
            arguments["device_mesh"] = init_device_mesh(
                context.device.type,
                (config.gpus // context.shard_size, context.shard_size),
                mesh_dim_names=("replicate", "shard"),
            )
        if context.deferred:
            arguments["param_init_fn"] = _materialiser(context.device)
        arguments |= self._extras(config)
        wrapped = fsdp.FullyShardedDataParallel(model, **arguments)
        base.compile_as_asked(wrapped, units, settings)
        return wrapped

    def microbatch(self, model: Any, *, sync: bool) -> AbstractContextManager[object]:
        return nullcontext() if sync else model.no_sync()

    def clip(self, model: Any, largest: float) -> None:
        model.clip_grad_norm_(largest)


_ABSENT = {
    "layout": "a flat parameter is gathered in one piece, without copies",
    "symmetric_memory": "FSDP1 has no set_symm_mem_for_comm: use FSDP2",
    "reshard_after_forward": "FSDP1 says it by its strategy",
}


def _refuse(config: Config) -> dict[str, str]:
    """Refuse settings that flat parameters do not have, torch's or ours: setting -> reason."""
    refused = base.refuse_common(config) | base.refuse_lora_in_flat_parameters(config)
    if config.settings.optimizer == "muon":
        refused["optimizer"] = "Muon needs matrices, FSDP1 shows each rank flattened pieces: use FSDP2"
    ahead = ("forward_prefetch", "backward_prefetch_depth")
    mixed = [name for name in ahead if is_mixed(getattr(config.settings, name))]
    return refused | dict.fromkeys(mixed, "FSDP1 has one distance for all units: one number, or use FSDP2")


class ImplFsdp1(_FlatParameterSystem):
    """`fsdpbench.impl.FullyShardedDataParallel`."""

    name = "impl-fsdp1"
    summary = "this project's FullyShardedDataParallel"
    absent = _ABSENT

    def refuses(self, config: Config) -> dict[str, str]:
        return _refuse(config)

    def _module(self) -> Any:
        from fsdpbench import impl

        return impl

    def _extras(self, config: Config) -> dict[str, object]:
        settings = config.settings
        extras: dict[str, object] = {
            "limit_all_gathers": False if settings.limit_all_gathers == "off" else settings.limit_all_gathers,
            "backward_prefetch_depth": settings.backward_prefetch_depth,
            "forward_prefetch_depth": settings.forward_prefetch or None,  # 0: not explicitly
        }
        if settings.memory_handover is not None:
            extras["memory_handover"] = settings.memory_handover
        return extras


class TorchFsdp1(_FlatParameterSystem):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    name = "torch-fsdp1"
    summary = "PyTorch's FullyShardedDataParallel"
    absent = {  # noqa: RUF012
        **_ABSENT,
        "memory_handover": "PyTorch's FSDP1 passes memory by record_stream only",
        "backward_prefetch_depth": "PyTorch's FSDP1 prefetches one unit in backward",
    }

    def refuses(self, config: Config) -> dict[str, str]:
        refused, settings = _refuse(config), config.settings
        if settings.limit_all_gathers not in ("off", 2, None):
            refused["limit_all_gathers"] = "PyTorch's FSDP1 keeps two in flight, or does not limit"
        if settings.forward_prefetch not in (0, 1, None):
            refused["forward_prefetch"] = "PyTorch's FSDP1 prefetches one unit in forward, or none"
        return refused

    def _module(self) -> Any:
        from torch.distributed import fsdp
        from torch.distributed.fsdp.wrap import CustomPolicy

        return SimpleNamespace(**vars(fsdp), CustomPolicy=CustomPolicy)

    def _extras(self, config: Config) -> dict[str, object]:
        settings = config.settings
        return {
            "limit_all_gathers": settings.limit_all_gathers != "off",
            "forward_prefetch": bool(settings.forward_prefetch),
            "use_orig_params": software_of(config).fsdp1.use_orig_params,
        }


def _mixed_precision(fsdp: Any, config: Config) -> Any:
    settings = config.settings
    buffer = TORCH_DTYPES.get(settings.buffer_dtype or "")
    if settings.param_dtype == "fp32" and settings.reduce_dtype in ("fp32", None) and buffer is None:
        return None
    return fsdp.MixedPrecision(
        param_dtype=TORCH_DTYPES[settings.param_dtype],
        reduce_dtype=TORCH_DTYPES[settings.reduce_dtype or settings.param_dtype],
        buffer_dtype=buffer,
    )


def _materialiser(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that gives a module its own parameters on `device`; shared ones stay shared."""
    # Weakly: once a unit is flattened, nothing may hold its whole parameters.
    made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    def materialise_own(module: nn.Module) -> None:
        deferred = dict(module.named_parameters(recurse=False))
        to_empty(module, device, recurse=False)
        for name, parameter in deferred.items():
            shared = made.setdefault(parameter, module.get_parameter(name))
            module.register_parameter(name, shared)
        if device.type != "sim":
            init_module(module)

    return materialise_own


_PLAIN = (torch.Tensor, nn.Parameter)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a sharded meta-device model its memory and its initial weights (a simulated tensor holds none).

    A parameter that several modules share stays one.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    to_empty(model, device)
    for (first, own), *others in places.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own))
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


def to_empty(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Call `module.to_empty`: give new memory on `device` to all tensors of the module.

    For a tensor of the meta device torch goes through rules in Python that cost more than all else of a
    simulated parameter; these are not asked where the answer is plain.
    """
    if device.type != "sim":
        module.to_empty(device=device, recurse=recurse)
        return
    module._apply(lambda tensor: _empty_like(tensor, device), recurse=recurse)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `torch.empty_like(tensor, device=device)`, without torch's rules for plain tensors."""
    from torch.distributed.tensor import DTensor

    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or not local.is_contiguous():
        return torch.empty_like(tensor, device=device)
    empty = torch.empty(local.shape, dtype=local.dtype, device=device)
    if local is tensor:
        return empty
    return DTensor.__new__(DTensor, empty, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
