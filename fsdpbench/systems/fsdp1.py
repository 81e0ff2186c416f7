"""`FullyShardedDataParallel` (one flat parameter per unit), ours and PyTorch's."""

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import is_mixed
from fsdpbench.systems import base
from fsdpbench.systems.narrow import software_of

if TYPE_CHECKING:
    from torch import nn


class _FlatParameterSystem(base.System):
    """The common part of both FSDP1s, which have torch's constructor arguments; `_extras` adds others."""

    @abstractmethod
    def _module(self) -> Any:
        """Return a namespace of FSDP1's classes and enums, with torch's names."""

    @abstractmethod
    def _extras(self, config: Config) -> dict[str, object]:
        """Return the constructor arguments that only this FSDP1 has."""

    def wrap(self, context: base.BuildContext) -> "nn.Module":
        from torch.distributed.device_mesh import init_device_mesh

        from fsdpbench.systems import training, wrapping

        config, settings, fsdp = context.config, context.config.settings, self._module()
        model = context.build_model()
        units = wrapping.select_units(model, context.workload, settings.wrap)
        training.offload_if_asked(units, config)
        # Arguments of each unit; True: the same as for all.
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
            arguments["param_init_fn"] = wrapping.materialiser(context.device)
        arguments |= self._extras(config)
        wrapped = fsdp.FullyShardedDataParallel(model, **arguments)
        training.compile_as_asked(wrapped, units, settings)
        return wrapped

    def microbatch(self, model: Any, *, sync: bool) -> AbstractContextManager[object]:
        return nullcontext() if sync else model.no_sync()

    def clip(self, model: Any, largest: float) -> None:
        model.clip_grad_norm_(largest)


def _refuse(config: Config) -> dict[str, str]:
    """Refuse settings that flat parameters do not support, in torch's FSDP1 or ours: setting -> reason."""
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
    absent = base.ABSENT["impl-fsdp1"]

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
            "forward_prefetch_depth": settings.forward_prefetch or None,  # 0: no explicit prefetch
        }
        if settings.memory_handover is not None:
            extras["memory_handover"] = settings.memory_handover
        return extras


class TorchFsdp1(_FlatParameterSystem):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    name = "torch-fsdp1"
    summary = "PyTorch's FullyShardedDataParallel"
    absent = base.ABSENT["torch-fsdp1"]

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
    from fsdpbench.workloads.layers import DTYPES

    settings = config.settings
    buffer = DTYPES.get(settings.buffer_dtype or "")
    if settings.param_dtype == "fp32" and settings.reduce_dtype in ("fp32", None) and buffer is None:
        return None
    return fsdp.MixedPrecision(
        param_dtype=DTYPES[settings.param_dtype],
        reduce_dtype=DTYPES[settings.reduce_dtype or settings.param_dtype],
        buffer_dtype=buffer,
    )
