"""A complete FSDP: both generations of the API on one runtime. How to read it: ``README.md`` in this
folder.
"""

from .api import (
    BackwardPrefetch,
    CPUOffload,
    MemoryHandover,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from .flat_param import FlatParameter
from .fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from .fully_shard import fully_shard
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .report import UnitReport, UnitReports, unit_report
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
    "CustomPolicy",
    "EveryKthPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "MemoryHandover",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "ShardingStrategy",
    "UnitReport",
    "UnitReports",
    "UnshardHandle",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "select_modules",
    "size_based_auto_wrap_policy",
    "size_policy",
    "transformer_auto_wrap_policy",
    "unit_report",
    "wrap",
]
