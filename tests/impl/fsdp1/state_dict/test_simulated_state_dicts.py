"""What saving and loading state dicts takes on the simulated device."""

from __future__ import annotations

from typing import Any

import torch
from simulated_cases import Layer, simulated
from torch import nn

from fsdpbench import impl

RANKS, LAYERS = 8, 4


def peaks(kind: str, state: str) -> dict[str, int]:
    """Bytes above what is held before and kept after: the peak of saving, and of loading."""
    from torch.distributed import fsdp as torch_fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

    api: Any = torch_fsdp if kind == "torch" else impl
    policy: Any = TorchModuleWrapPolicy if kind == "torch" else impl.ModuleWrapPolicy
    with simulated(RANKS) as device:
        model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        model = api.FullyShardedDataParallel(model, auto_wrap_policy=policy({Layer}), device_id=device)
        found: dict[str, int] = {"unit": sum(p.numel() * 4 for p in Layer().parameters())}
        with api.FullyShardedDataParallel.state_dict_type(model, api.StateDictType[state]):
            for step in ("save", "load"):
                before = torch.sim.memory_allocated()
                torch.sim.reset_peak_memory_stats()
                if step == "save":
                    saved = model.state_dict()
                else:
                    model.load_state_dict(saved)
                after = torch.sim.memory_allocated()
                found[step] = torch.sim.max_memory_allocated() - max(before, after)
        return found


def case_sharded(rank: int) -> None:
    ours = peaks("impl", "SHARDED_STATE_DICT")
    part = ours["unit"] // RANKS  # what is sent and what is received, at most
    assert ours["save"] <= 2 * part + 1024
    assert ours["load"] <= 2 * part + 1024


def test_sharded_values_take_no_whole_unit(lone_process) -> None:
    lone_process.run(case_sharded)


def case_whole(rank: int) -> None:
    ours, theirs = (peaks(kind, "FULL_STATE_DICT") for kind in ("impl", "torch"))
    assert ours["save"] <= theirs["save"]
    assert ours["load"] <= 1024  # the agreement of the ranks
    assert theirs["load"] >= ours["unit"]


def test_whole_values_are_loaded_in_place(lone_process) -> None:
    lone_process.run(case_whole)
