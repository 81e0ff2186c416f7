"""Which kind of state dict a ``FullyShardedDataParallel`` saves and loads, and how.

Names, fields and defaults are torch's. torch's own objects of the same name are accepted everywhere, so that
a script need change only one import.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any


class StateDictType(Enum):
    """What the values of a state dict are."""

    FULL_STATE_DICT = auto()
    """Whole tensors, as of the plain model."""
    LOCAL_STATE_DICT = auto()
    """One flat tensor a unit, of which each rank has its shard; for the same wrapping and ranks only."""
    SHARDED_STATE_DICT = auto()
    """Tensors in their own shape of which each rank has some rows, for any number of ranks."""


@dataclass(frozen=True)
class StateDictConfig:
    """What all kinds of a model's state dict have.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """Of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: only rank 0 of the wrapper's ``process_group`` (hybrid: of each shard group) gets the
            values; the others' dict has none of them.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Of ``LOCAL_STATE_DICT``."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Of ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: values are ``DTensor`` instead of ``ShardedTensor``; follows from wrapping with a
            ``device_mesh`` and need not be given.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """What all kinds of an optimizer's state dict have.

    Attributes:
        offload_to_cpu: move the values to the CPU.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: saving, only rank 0 gets a dict; loading, only rank 0 has one.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Of ``LOCAL_STATE_DICT``; as in torch the optimizer's values are then sharded ones."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Of ``SHARDED_STATE_DICT``; ``_use_dtensor`` as in ``ShardedStateDictConfig``."""

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
    def decide(cls, kind: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
        """From a kind and perhaps configs; what is ``None`` gets the defaults of the kind.

        Raises:
            RuntimeError: a config of another kind.
            ValueError: no kind at all.
        """
        name = str(getattr(kind, "name", None))
        if name not in StateDictType.__members__:
            known = ", ".join(StateDictType.__members__)
            raise ValueError(f"{kind!r} is not a StateDictType; one of {known} is")
        own = StateDictType[name]
        model_kind, optim_kind = _CONFIGS[own]
        return cls(
            own,
            _own_config(model_kind, config, "state_dict_config", own),
            _own_config(optim_kind, optim_config, "optim_state_dict_config", own),
        )

    def with_mesh(self, has_mesh: bool) -> StateDictSettings:
        """The settings as they hold for a wrapper with or without a ``device_mesh``.

        Raises:
            RuntimeError: ``DTensor`` values without a mesh, or local shards with one.
        """
        if has_mesh and self.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise RuntimeError(
                "LOCAL_STATE_DICT does not go with a device_mesh, whose values are DTensors: "
                "use SHARDED_STATE_DICT"
            )
        config, optim_config = self.state_dict_config, self.optim_state_dict_config
        for given in (config, optim_config):
            if getattr(given, "_use_dtensor", False) and not has_mesh:
                raise RuntimeError(
                    f"{type(given).__name__}(_use_dtensor=True) needs a mesh for its DTensors: "
                    "wrap with device_mesh, or leave _use_dtensor alone"
                )
        if has_mesh and isinstance(config, ShardedStateDictConfig):
            config = replace(config, _use_dtensor=True)
        if has_mesh and isinstance(optim_config, ShardedOptimStateDictConfig):
            optim_config = replace(optim_config, _use_dtensor=True)
        return StateDictSettings(self.state_dict_type, config, optim_config)


def _own_config(expected: Any, given: Any, argument: str, kind: StateDictType) -> Any:
    if given is None:
        return expected()
    if type(given).__name__ != expected.__name__:
        raise RuntimeError(
            f"{argument} of {kind.name} must be a {expected.__name__}, not a {type(given).__name__}"
        )
    return expected(**{field.name: getattr(given, field.name) for field in fields(expected)})
