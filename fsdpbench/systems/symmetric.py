"""The setting `symmetric_memory`: all-gathers by copy engines, and where there are none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.degrees import PARALLEL
from fsdpbench.sim.hardware.profile import load_profile

_NAME = "symmetric_memory"
_POLICY = "NCCL_CTA_POLICY"


def use_symmetric_memory(modules: Iterable[Any], config: Config) -> None:
    """Let the wrapped `modules` gather in symmetric memory, if `config` asks for it."""
    if not config.settings.symmetric_memory:
        return
    if config.device == "sim":
        os.environ[_POLICY] = "2"  # as somebody would who asks for it; a real run is refused without
    for module in modules:
        module.set_symm_mem_for_comm()


def refuse_symmetric_memory(config: Config, shard_size: int) -> dict[str, str]:
    """Why `config` cannot gather by copy engines: setting -> reason."""
    if not config.settings.symmetric_memory:
        return {}
    why = _of_device(config)
    if why is None and shard_size == 1:
        why = "nothing is gathered where nothing is sharded"
    elif why is None and shard_size > config.ranks_per_node:
        why = (
            f"copy engines reach the {config.ranks_per_node} GPUs of a node, and {shard_size} share a copy "
            "of the model: strategy=HYBRID_SHARD"
        )
    for other in PARALLEL if why is None else ():
        if getattr(config.settings, other) > 1:
            why = f"groups of {other} beside it were not tried: leave {other} at 1"
    if why is None and config.settings.layout == "grouped":
        why = "a gather in symmetric memory is packed: leave layout out"
    return {} if why is None else {_NAME: why}


def _of_device(config: Config) -> str | None:
    if config.device == "cpu" or config.emulate:
        return "it is NCCL's, on GPUs that really communicate or simulated ones"
    if config.device == "cuda":
        missing = os.environ.get(_POLICY) != "2"
        return (
            f"NCCL gathers by copy engines with {_POLICY}=2 in the environment: set it" if missing else None
        )
    if config.software is not None:
        return f"software {config.software} is older than it: leave --software out"
    assert config.hardware is not None
    profile = load_profile(config.hardware)
    if profile.nvlink.copy_engine_gathers:
        return None
    return (
        f"no source has figures of all-gathers by copy engines on {profile.name} "
        "(nvlink.copy_engine_gathers of its profile): --hardware h100-80gb has them"
    )
