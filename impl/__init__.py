"""A complete FSDP: both generations of the API on one runtime. How to read it: ``README.md`` in this
folder.
"""

if __name__ == "impl":
    from fsdpbench.bare_names import stand_for

    stand_for(__name__)

from .activations.offload import ActivationOffload, offload_activations
from .collectives.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from .deferred_init.materialise import materialise_deferred
from .deferred_init.recording import deferred_init
from .frontends.report import UnitReport, UnitReports, unit_report
from .frontends.wrap import (
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
from .fsdp1.flat_param import FlatParameter
from .fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from .fsdp1.grad_scaler import ShardedGradScaler
from .fsdp1.state_dict.optim_parameters import OptimStateKeyType
from .fsdp1.state_dict.settings import (
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
from .fsdp2.fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fsdp2.fully_shard import fully_shard
from .fsdp2.spmd_mesh import DataParallelMeshDims
from .optimizers.adamw import AdamW
from .optimizers.muon import Muon
from .shared.settings import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MemoryHandover,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

__all__ = [
    "ActivationOffload",
    "AdamW",
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
    "Muon",
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
    "offload_activations",
    "register_fsdp_forward_method",
    "select_modules",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "size_policy",
    "transformer_auto_wrap_policy",
    "unit_report",
    "wrap",
]
