"""A complete FSDP: both generations of the API on one runtime. How to read it: ``README.md`` in this folder."""

from .api import (
    MixedPrecisionPolicy,
)
from .fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from .fully_shard import fully_shard

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
