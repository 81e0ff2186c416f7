"""Low-rank adapters as `peft` builds them, in one unit with what is frozen, under torch's FSDPs and ours:
numbers, optimizer and saved state are those of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdpbench import impl

pytestmark = pytest.mark.campaign
WIDTH, RANKS, STEPS = 12, 4, 3
CASES = {
    "all": {"rank": 3, "alpha": 6.0, "targets": ("query", "up", "down")},
    "one": {"rank": 5, "alpha": 1.0, "targets": ("query",)},
    "dropout": {"rank": 2, "alpha": 8.0, "targets": ("up", "down"), "dropout": 0.4},
}


class Adapted(nn.Module):
    """`peft.tuners.lora.Linear`: the layer, and two small ones beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        return result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.query(self.norm(x))
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def built(rank: int, alpha: float, targets: tuple[str, ...], dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3))
    model.requires_grad_(False)
    for block in (model[1], model[2]):
        for name in targets:
            setattr(block, name, Adapted(getattr(block, name), rank, alpha, dropout))
    return model


def sharded(model: nn.Module, system: str) -> nn.Module:
    package: Any = impl if system.startswith("impl") else torch_fsdp
    if system.endswith("fsdp2"):
        for block in (model[1], model[2]):  # type: ignore[index]
            package.fully_shard(block)
        package.fully_shard(model)
        return model
    policy = impl.ModuleWrapPolicy({Block}) if package is impl else ModuleWrapPolicy({Block})
    whole: nn.Module = package.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return whole


def saved(model: nn.Module, system: str) -> dict[str, torch.Tensor]:
    if system.endswith("fsdp2"):
        return {name: value.full_tensor() for name, value in model.state_dict().items()}  # type: ignore[attr-defined]
    package: Any = impl if system.startswith("impl") else torch_fsdp
    with package.FullyShardedDataParallel.state_dict_type(model, package.StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[torch.Tensor]]) -> None:
    """Each batch in parts, whose mean is the loss; masks of dropout are drawn by step, alike on all ranks."""
    for number, parts in enumerate(batches):
        optimizer.zero_grad()
        for part in parts:
            torch.manual_seed(100 + number)
            (model(part).square().mean() / len(parts)).backward()
        optimizer.step()


def train(rank: int, system: str, case: dict[str, Any]) -> dict[str, float]:
    """Errors against the unsharded model, and what of optimizer and saved state is not as it must be."""
    reference = built(**case)
    start = copy.deepcopy(reference.state_dict())
    learning = {name for name, p in reference.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    data = [[torch.randn(6, 5) for _ in range(RANKS)] for _ in range(STEPS)]
    first = [p for p in reference.parameters() if p.requires_grad]
    steps(reference, torch.optim.AdamW(first, lr=0.05), data)
    model = sharded(built(**case), system)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.05)
    steps(model, optimizer, [[parts[rank]] for parts in data])
    grown = sum(s["exp_avg"].numel() if system.endswith("fsdp1") else s["exp_avg"].to_local().numel()
                for s in optimizer.state.values() if "exp_avg" in s)  # fmt: skip
    count = torch.tensor([float(grown)])
    dist.all_reduce(count)
    kept, wanted = saved(model, system), reference.state_dict()
    frozen = [name for name in wanted if name not in learning]
    return {
        "missing": float(set(kept) != set(wanted)),
        "states": float(count) - sum(p.numel() for p in first),
        "frozen": max(float((kept[name] - start[name]).abs().max()) for name in frozen),
        "learnt": max(float((kept[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in learning),
        "still": float(any(torch.equal(wanted[n], start[n]) for n in learning)),
        "gradients": float(sum(p.grad is not None for p in model.parameters() if not p.requires_grad)),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("system", ["torch-fsdp1", "impl-fsdp1", "torch-fsdp2", "impl-fsdp2"])
def test_adapters_learn_as_they_do_unsharded(four_ranks: Any, system: str, case: str) -> None:
    for errors in four_ranks.run_everywhere(train, timeout=120, system=system, case=CASES[case]):
        learnt = errors.pop("learnt")
        assert errors == dict.fromkeys(errors, 0.0)
        assert learnt < 1e-4
