"""Parameters that change after wrapping, and optimizers that step inside backward, as with torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_cases import Model, assert_close, full_dtensors, loss_of, shard_model, tokens_of
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl

SIDES = (("impl", impl), ("torch", torch_fsdp))


def case_frozen_after_wrapping(rank: int) -> None:
    """What is frozen or thawed between steps gets no gradient, or one again."""
    found = []
    for kind, _ in SIDES:
        torch.manual_seed(0)
        model: Any = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        seen = []
        for step, trains in enumerate((True, False, True)):
            model.blocks[0].up.weight.requires_grad_(trains)
            model.head.weight.requires_grad_(trains)
            loss_of(model, tokens_of(rank, step)).backward()
            assert (model.blocks[0].up.weight.grad is not None) == trains
            seen.append(full_dtensors(model, True))
            model.zero_grad()
        found.append(seen)
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def case_optimizer_in_backward(rank: int) -> None:
    """An optimizer a parameter, stepped by its hook while backward goes on: three steps like torch's."""
    found = []
    for kind, _ in SIDES:
        torch.manual_seed(0)
        model = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(3):
            loss_of(model, tokens_of(rank, index)).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        found.append(full_dtensors(model, False))
    assert_close(*found)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def thawing_program(seed: int) -> list[tuple[str, int]]:
    """What happens in turn, and to which part of the model."""
    draw = random.Random(seed)
    kinds = ("train", "train", "freeze", "thaw", "thaw", "eval", "forward", "accumulate")
    return [(draw.choice(kinds), draw.randrange(4)) for _ in range(10)]


def case_thawed_in_bf16(rank: int) -> None:
    """Frozen and thawed in any order, computed in bf16, reduced in fp32: the plain model's weights.

    torch's fully_shard refuses a gradient in bf16 of what was thawed after wrapping.
    """
    for seed in range(12):
        model: Any = small()
        plain, lows = small(), [small().bfloat16() for _ in range(2)]
        policy = impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for each in (model, plain):
            each[0].requires_grad_(False)
        for module in (*model, model):
            impl.fully_shard(module, mp_policy=policy, reshard_after_forward=bool(seed % 2))
        parts = [[list(part.parameters()) for part in each] for each in (model, plain)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        sums: dict[str, torch.Tensor] = {}
        for step, (kind, place) in enumerate(thawing_program(seed)):
            batches = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
            if kind in ("freeze", "thaw"):
                for parameter in (*parts[0][place], *parts[1][place]):
                    parameter.requires_grad_(kind == "thaw")
            elif kind in ("eval", "forward") or not any(p.requires_grad for p in plain.parameters()):
                with torch.set_grad_enabled(kind != "eval"):
                    model(batches[rank])
            else:
                model.set_requires_gradient_sync(kind == "train")
                model(batches[rank]).float().square().mean().backward()
                for low, batch in zip(lows, batches.bfloat16(), strict=True):
                    low.load_state_dict(plain.state_dict())
                    for own, other in zip(low.parameters(), plain.parameters(), strict=True):
                        own.grad = None
                        own.requires_grad_(other.requires_grad)
                    low(batch).float().square().mean().backward()
                    for name, own in low.named_parameters():
                        if own.grad is not None:
                            sums[name] = sums.get(name, 0) + own.grad.float() / 2
                if kind == "train":
                    for name, parameter in plain.named_parameters():
                        parameter.grad = sums.get(name)
                    sums.clear()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name], rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    """Weights of three dtypes, one of them integers and one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, dtype=torch.float64)
        self.third = nn.Linear(6, 6, dtype=torch.float64, bias=False)
        self.third.weight = self.second.weight
        self.steps = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(torch.tanh(self.first(x)).double())) * self.steps.sum()


def case_mixed_dtypes_and_tied(rank: int) -> None:
    """Ours in one unit, torch's with one unit a dtype, since it refuses more; and tied inside a unit."""
    found = []
    for kind, api in SIDES:
        torch.manual_seed(0)
        model = Mixed()
        mesh = init_device_mesh("cpu", (2,))
        if kind == "torch":
            ignored = {model.steps}
            api.fully_shard(model.first, mesh=mesh)
            api.fully_shard(model, mesh=mesh, ignored_params=ignored)
        else:
            api.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        x = torch.arange(12.0).view(2, 6) / (10 + rank)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.third.weight is model.second.weight
        values = full_dtensors(model, False) if kind == "impl" else None
        if values is None:
            values = {name: p.full_tensor() for name, p in model.named_parameters() if name != "steps"}
        assert torch.equal(values.pop("steps", torch.arange(7)), torch.arange(7))
        found.append(values)
    assert_close(*found)


def case_gradient_scaler(rank: int) -> None:
    """fp16 gradients, scaled; a step whose gradients overflow on one rank is left out on all."""
    found = []
    for kind, _ in SIDES:
        torch.manual_seed(0)
        model = shard_model(
            kind, Model(blocks=1), mesh=init_device_mesh("cpu", (2,)), policy=(None, torch.float32)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = loss_of(model, tokens_of(rank, step))
            scaler.scale(loss * (float("inf") if step == 1 and rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append({**full_dtensors(model, False), "scale": torch.tensor(scaler.get_scale())})
    assert_close(*found)
    assert found[0]["scale"].item() == 128.0


class _Empty(nn.Module):
    """Parameters without elements beside one that has some, or alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.ones(0))
        if not alone:
            self.rows = nn.Parameter(torch.ones(0, 4))
            self.columns = nn.Parameter(torch.ones(3, 0))
            self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = [name for name in ("none", "rows", "columns", "gain") if hasattr(self, name)]
        return x * (1 + sum(getattr(self, name).sum() for name in names))


def case_parameters_without_elements(rank: int) -> None:
    """As in the plain model, also where a unit has no others (torch: RuntimeError or AssertionError)."""
    batches = torch.arange(8.0).view(2, 4)
    fronts: list[Callable[[nn.Module], Any]] = [
        impl.fully_shard,
        lambda module: impl.fully_shard(module, layout="grouped"),
        lambda module: impl.FullyShardedDataParallel(module, device_id=torch.device("cpu")),
        lambda module: impl.FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), sharding_strategy=impl.ShardingStrategy.NO_SHARD
        ),
    ]
    for front in fronts:
        for alone in (True, False):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(4, 4), _Empty(alone))
            plain(batches).sum().backward()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), _Empty(alone))
            model[1] = front(model[1])
            wrapped = front(model)
            (wrapped(batches[rank : rank + 1]).sum() * 2).backward()
            for name, expected in (("weight", plain[0].weight), ("gain", getattr(plain[1], "gain", None))):
                found = [p for n, p in wrapped.named_parameters() if n.endswith(name)]
                if found and expected is not None:
                    torch.testing.assert_close(found[0].grad.full_tensor(), expected.grad)
            missing = [name for name, p in wrapped.named_parameters() if p.numel() and p.grad is None]
            assert not missing, (fronts.index(front), alone, missing)


CASES = [
    case_parameters_without_elements,
    case_frozen_after_wrapping,
    case_thawed_in_bf16,
    case_optimizer_in_backward,
    case_mixed_dtypes_and_tied,
    case_gradient_scaler,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_kinds(two_ranks, case: Any) -> None:
    two_ranks.run(case)
