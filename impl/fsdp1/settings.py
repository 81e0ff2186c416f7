"""The settings of ``FullyShardedDataParallel``: torch's, and frozen dataclasses that refuse wrong values.

Names and fields that torch has too mean what torch means by them.
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
        param_dtype: dtype of all-gather and computation; ``None`` keeps the parameters' own.
        reduce_dtype: dtype of gradient reduction; ``None`` takes the dtype of computation.
        buffer_dtype: floating point buffers are held in it; ``None`` leaves them.
        keep_low_precision_grads: leave reduced gradients in ``param_dtype`` (replicas: in
            ``reduce_dtype``), for optimizers that take them so.
        cast_forward_inputs: every wrapped module casts its floating point inputs to ``param_dtype``.
        cast_root_forward_inputs: the outermost one does.
        _module_classes_to_ignore: with an ``auto_wrap_policy``, modules that stay in full precision: each is
            wrapped by itself without mixed precision.
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


# -- Which kind of state dict a ``FullyShardedDataParallel`` saves and loads, and how.


@dataclass(frozen=True)
class StateDictConfig:
    """The settings of any kind of a model's state dict.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """The settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: only rank 0 of the wrapper's ``process_group`` (hybrid: of each shard group) gets the
            values; the others' dict has none of them.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """The settings of ``LOCAL_STATE_DICT``."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """The settings of ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: values are ``DTensor`` instead of ``ShardedTensor``; follows from wrapping with a
            ``device_mesh`` and need not be given.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """The settings of any kind of an optimizer's state dict.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: saving, only rank 0 gets a dict; loading, only rank 0 has one.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The settings of ``LOCAL_STATE_DICT``; as in torch the optimizer's values are then sharded ones."""

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
    """A kind with its two configs."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    @classmethod
    def decide(cls, kind: Any, config: Any = None, optim_config: Any = None) -> "StateDictSettings":
        """Return the settings of a kind; a config that is ``None`` gets the defaults of the kind.

        Raises:
            RuntimeError: a config of another kind.
            ValueError: no kind at all.
        """
        found = by_name(StateDictType, kind)
        model_kind, optim_kind = _CONFIGS[found]
        return cls(
            found,
            _own_config(model_kind, config, "state_dict_config", found),
            _own_config(optim_kind, optim_config, "optim_state_dict_config", found),
        )

    def with_mesh(self, has_mesh: bool) -> "StateDictSettings":
        """Return the settings as they hold for a wrapper with or without a ``device_mesh``.

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
