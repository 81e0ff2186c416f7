"""A complete FSDP: the FSDP1 and FSDP2 APIs on one runtime. ``README.md`` is the reading guide."""

if __name__ == "impl":
    from fsdpbench import stand_for

    stand_for(__name__)

from .activations import ActivationOffload, offload_activations
from .deferred_init.materialise import materialise_deferred
from .deferred_init.recording import deferred_init
from .fsdp1.flat_param import FlatParameter
from .fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from .fsdp1.gradients import (
    DefaultState,
    LowPrecisionState,
    ShardedGradScaler,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from .fsdp1.settings import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .fsdp1.state_dict.optim_parameters import OptimStateKeyType
from .fsdp1.wrap import (
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
from .fsdp2.fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fsdp2.fully_shard import fully_shard
from .optimizers import AdamW, Muon
from .report import UnitReport, UnitReports, unit_report
from .shared.placement import DataParallelMeshDims
from .shared.settings import CPUOffloadPolicy, MemoryHandover, MixedPrecisionPolicy, OffloadPolicy

# fmt: off
__all__ = [
    "ActivationOffload", "AdamW", "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "CustomPolicy",
    "DataParallelMeshDims", "DefaultState", "EveryKthPolicy", "FSDPModule", "FlatParameter",
    "FullOptimStateDictConfig", "FullStateDictConfig", "FullyShardedDataParallel",
    "LocalOptimStateDictConfig", "LocalStateDictConfig", "LowPrecisionState", "MemoryHandover",
    "MixedPrecision", "MixedPrecisionPolicy", "ModuleWrapPolicy", "Muon", "OffloadPolicy",
    "OptimStateDictConfig", "OptimStateKeyType", "ShardedGradScaler", "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig", "StateDictSettings", "StateDictType",
    "UnitReport", "UnitReports", "UnshardHandle", "allreduce_hook", "always_wrap_policy",
    "bf16_compress_hook", "deferred_init", "enable_wrap", "fp16_compress_hook", "fully_shard",
    "lambda_auto_wrap_policy", "materialise_deferred", "reduce_scatter_hook", "offload_activations",
    "register_fsdp_forward_method", "select_modules", "share_comm_ctx", "size_based_auto_wrap_policy",
    "size_policy", "transformer_auto_wrap_policy", "unit_report", "wrap",
]
# fmt: on
