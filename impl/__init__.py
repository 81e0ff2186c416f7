"""A complete FSDP: both generations of the API on one runtime. How to read it: ``README.md`` in this
folder.
"""

from .api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MemoryHandover,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from .comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from .deferred_init import materialise_deferred
from .flat_param import FlatParameter
from .fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fully_shard import fully_shard
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .grad_scaler import ShardedGradScaler
from .init_recording import deferred_init
from .optim_parameters import OptimStateKeyType
from .report import UnitReport, UnitReports, unit_report
from .spmd_mesh import DataParallelMeshDims
from .state_dict_settings import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .wrap import (
    CustomPolicy,
    EveryKthPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    select_modules,
    size_based_auto_wrap_policy,
    size_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "DataParallelMeshDims",
    "DefaultState",
    "EveryKthPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "LowPrecisionState",
    "MemoryHandover",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnitReport",
    "UnitReports",
    "UnshardHandle",
    "allreduce_hook",
    "always_wrap_policy",
    "bf16_compress_hook",
    "deferred_init",
    "enable_wrap",
    "fp16_compress_hook",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "materialise_deferred",
    "reduce_scatter_hook",
    "register_fsdp_forward_method",
    "select_modules",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "size_policy",
    "transformer_auto_wrap_policy",
    "unit_report",
    "wrap",
]
