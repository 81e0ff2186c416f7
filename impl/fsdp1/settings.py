"""The settings of ``FullyShardedDataParallel``: torch's enums, and dataclasses that validate their values.

Names and fields that also exist in torch have the same meaning as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictType

from ..shared import error_text
from ..shared.settings import Kind, check_floating, own
from ..shared.torch_internals import BatchNorm


def by_name(kind: type[Kind], value: Any) -> Kind:
    """Return ``value``, a member of the enum ``kind``. Raises ``ValueError`` for anything else."""
    if not isinstance(value, kind):
        known = ", ".join(kind.__members__)
        raise ValueError(f"{value!r} is not a {kind.__name__}; one of {known} is")
    return value


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of the ``FullyShardedDataParallel`` front end.

    Attributes:
        param_dtype: dtype of all-gather and computation; ``None`` keeps the parameters' dtype.
        reduce_dtype: dtype of gradient reduction; ``None`` means the dtype of computation.
        buffer_dtype: dtype of floating point buffers; ``None`` does not cast them.
        keep_low_precision_grads: keep reduced gradients in ``param_dtype`` (without sharding, in
            ``reduce_dtype``), for optimizers that accept this.
        cast_forward_inputs: every wrapped module casts its floating point inputs to ``param_dtype``.
        cast_root_forward_inputs: the outermost wrapped module casts its inputs in this way.
        _module_classes_to_ignore: classes of modules that stay in full precision: with an
            ``auto_wrap_policy``, each module is wrapped separately without mixed precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)

    def __post_init__(self) -> None:
        check_floating(self, "param_dtype", "reduce_dtype", "buffer_dtype")


# -- the kinds of state dicts and their settings -------------------------------------------------------------


@dataclass(frozen=True)
class StateDictConfig:
    """Settings shared by all kinds of model state dicts.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """The settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: only rank 0 of the wrapper's ``process_group`` (hybrid: of each shard group) gets the
            values; on other ranks the dict has none of them.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """The settings of ``LOCAL_STATE_DICT``."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """The settings of ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: values are ``DTensor`` instead of ``ShardedTensor``. Set automatically if the model was
            wrapped with a ``device_mesh``.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Settings shared by all kinds of optimizer state dicts.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: only rank 0 gets a dict when saving, and only rank 0 has one when loading.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The settings of ``LOCAL_STATE_DICT``. As in torch, optimizer state has sharded values then."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The settings of ``SHARDED_STATE_DICT``; ``_use_dtensor`` as in ``ShardedStateDictConfig``."""

    _use_dtensor: bool = False


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """A kind of state dict with its model and optimizer configs."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    @classmethod
    def decide(cls, kind: Any, config: Any = None, optim_config: Any = None) -> "StateDictSettings":
        """Return the settings of ``kind``; a config of ``None`` means the defaults of that kind.

        Raises:
            RuntimeError: a config belongs to another kind.
            ValueError: ``kind`` is not a ``StateDictType``.
        """
        found = by_name(StateDictType, kind)
        model_kind, optim_kind = _CONFIGS[found]
        return cls(
            found,
            _own_config(model_kind, config, "state_dict_config", found),
            _own_config(optim_kind, optim_config, "optim_state_dict_config", found),
        )

    def with_mesh(self, has_mesh: bool) -> "StateDictSettings":
        """Return the settings adapted to a wrapper with or without a ``device_mesh``.

        Raises:
            RuntimeError: ``DTensor`` values without a mesh, or local shards with one.
        """
        if has_mesh and self.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise RuntimeError(error_text("settings.with_mesh"))
        config, optim_config = self.state_dict_config, self.optim_state_dict_config
        for given in (config, optim_config):
            if getattr(given, "_use_dtensor", False) and not has_mesh:
                raise RuntimeError(error_text("settings.needs_mesh", type(given).__name__))
        if has_mesh and isinstance(config, ShardedStateDictConfig):
            config = replace(config, _use_dtensor=True)
        if has_mesh and isinstance(optim_config, ShardedOptimStateDictConfig):
            optim_config = replace(optim_config, _use_dtensor=True)
        return StateDictSettings(self.state_dict_type, config, optim_config)


def _own_config(expected: Any, given: Any, argument: str, kind: StateDictType) -> Any:
    if given is None:
        return expected()
    if type(given).__name__ != expected.__name__:
        wanted, found = expected.__name__, type(given).__name__
        raise RuntimeError(error_text("fsdp1_settings.config", argument, kind.name, wanted, found))
    return own(expected, given, argument)
