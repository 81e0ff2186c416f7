"""What cannot fit by arithmetic alone, so that it need not be simulated.

A rank holds its share of parameters, gradients and AdamW's states, 16 bytes a parameter in fp32, all at the
same time in the
optimizer's step. Where these alone are more than the allocator may take, no other setting helps. The
bound is never
above the truth: where something unknown might hold less, there is none.
"""

from __future__ import annotations

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.settings import SETTINGS
from fsdpbench.sim.hardware.profile import ProfileError, load_profile
from fsdpbench.systems.base import shard_size_of
from fsdpbench.workloads import get_workload

_STATE_BYTES = 16
_SGD_BYTES = 8
_MUON_BYTES = 12  # at least: one moment for the matrices
_TWO_BYTE_STATES = 12
_REPLICATED = ("torch-ddp", "single")
_SHARDED = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2")
_UNDERSTOOD = {
    *("seq", "batch", "grad_accum", "grad_sync", "strategy", "shard_size", "wrap", "reshard_after_forward"),
    *("backward_prefetch", "backward_prefetch_depth", "forward_prefetch", "limit_all_gathers"),
    *("memory_handover", "param_dtype", "reduce_dtype", "buffer_dtype", "activation_checkpointing"),
    *("cpu_offload", "optimizer", "optimizer_dtype", "zero_grad", "tp", "cp", "ep", "compile", "seed"),
    *("checkpoint_first", "clip", "norm", "rotary", "loss", "linear_dtype"),
    *("keep_last_unsharded", "activation_offload", "compile_loss", "graph", "symmetric_memory"),
}
"""Settings whose part in the bound is known; another one that is not at its default makes it unknown."""


def cannot_fit(config: Config) -> str | None:
    """Why `config`, on simulated GPUs, has no room for its training state; None where it may have, or
    where that is unknown."""
    needed = state_bytes(config)
    if needed is None or config.hardware is None:
        return None
    try:
        profile = load_profile(config.hardware)
    except ProfileError:
        return None
    if needed <= profile.usable_memory_bytes:
        return None
    return (
        f"by arithmetic: parameters, gradients and optimizer alone take {needed / 2**30:,.1f} GiB a "
        f"GPU, and torch "
        f"has {profile.usable_memory_bytes / 2**30:,.1f} GiB (not simulated)"
    )


def state_bytes(config: Config) -> int | None:
    """At least so many bytes a rank holds in its optimizer's step; None where that is not known."""
    settings = config.settings
    strange = any(
        value != SETTINGS[name].default
        for name, value in settings.to_dict().items()
        if name not in _UNDERSTOOD and name in SETTINGS
    )
    if strange or settings.cpu_offload or config.script is not None or config.what_if is not None:
        return None
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    if workload.training_state_bytes != _STATE_BYTES * workload.parameters:
        return None  # tables of their own dtype, sharded in their own way
    each = {"sgd": _SGD_BYTES, "muon": _MUON_BYTES}.get(settings.optimizer, _STATE_BYTES)
    if settings.optimizer_dtype is not None:
        each = min(each, _TWO_BYTE_STATES)
    if config.system in _REPLICATED:
        return each * workload.parameters
    if config.system not in _SHARDED:
        return None
    return each * workload.parameters // (shard_size_of(config) * settings.tp)
