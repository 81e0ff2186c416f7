"""``FullyShardedDataParallel`` with modules as users have them, and what may differ between its two modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    Block,
    Model,
    assert_close,
    loss_of,
    our_full,
    read_flat,
    recorded,
    tokens_of,
    train,
    wrap_model,
)
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fsdpbench import impl

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


class Repeated(Model):
    """Every block runs twice in each forward, the second time after all others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Skipping(Model):
    """The second block is there but not used."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index != 1:
                x = block(x)
        return self.head(self.norm(x))


KINDS: dict[str, type[Model]] = {"repeated": Repeated, "skipping": Skipping}


def case_like_torch(rank: int, *, kind: str, originals: bool) -> None:
    found = []
    for side in ("impl", "torch"):
        torch.manual_seed(0)
        model = wrap_model(side, KINDS[kind](blocks=3), use_orig_params=originals)
        outcome = train(model, rank, lambda _: {}, read_flat(side)[1], steps=3)
        found.append(outcome)
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-6)
    assert_close(found[0].parameters, found[1].parameters)


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(two_ranks, kind: str, originals: bool) -> None:
    two_ranks.run(case_like_torch, kind=kind, originals=originals)


def case_buffers(rank: int) -> None:
    """Floating point buffers are held in their dtype; others stay."""

    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
            self.seen: list[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += [x.dtype, self.scale.dtype, self.linear.weight.dtype, self.count.dtype]
            return self.linear(x) * self.scale

    for api in (impl, torch_fsdp):
        policy = api.MixedPrecision(torch.bfloat16, torch.float32, torch.float64)
        module = Buffers()
        api.FullyShardedDataParallel(module, mixed_precision=policy, device_id=torch.device("cpu"))(
            torch.ones(2, 4)
        ).sum().backward()
        assert module.seen == [torch.bfloat16, torch.float64, torch.bfloat16, torch.int64]


def case_attributes_and_nesting(rank: int) -> None:
    model: Any = wrap_model("impl", Model(blocks=2))
    assert isinstance(model.module, Model)
    assert model.head is model.module.head
    assert model.blocks[0].module.up.in_features == 15
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it
    text = repr(model)
    assert text.startswith("FullyShardedDataParallel(")
    assert "2 x FullyShardedDataParallel(" in text
    assert "Block(" in text
    wrappers = impl.FullyShardedDataParallel.fsdp_modules(model)
    assert len(wrappers) == 3
    assert impl.FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    assert model.check_is_root()
    assert not wrappers[1].check_is_root()


def case_ignored(rank: int) -> None:
    torch.manual_seed(0)
    plain = Model(blocks=2)
    model: Any = wrap_model("impl", plain, ignored_modules=[plain.embed], use_orig_params=True)
    assert plain.embed.weight.shape == (33, 15)
    loss_of(model, tokens_of(rank, 0)).backward()
    assert plain.embed.weight.grad is not None
    assert "embed.weight" not in our_full(model, False)


def case_original_parameters_stay_the_same_objects(rank: int) -> None:
    """An optimizer made before wrapping still trains the model."""
    torch.manual_seed(0)
    plain = Model(blocks=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = wrap_model("impl", plain, use_orig_params=True)
    before = our_full(model, False)
    loss_of(model, tokens_of(rank, 0)).backward()
    optimizer.step()
    after = our_full(model, False)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def case_torch_settings_are_understood(rank: int) -> None:
    """Enums and policies imported from torch mean the same here."""
    model: Any = impl.FullyShardedDataParallel(
        Model(blocks=1),
        sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=torch_fsdp.MixedPrecision(torch.bfloat16),
        auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    assert model.sharding_strategy is impl.ShardingStrategy.SHARD_GRAD_OP
    with recorded("impl") as record:
        loss_of(model, tokens_of(rank, 0)).backward()
    assert [kind for kind, _ in record] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert impl.unit_report(model)[1].compute_dtype == "bfloat16"


CASES = [
    case_buffers,
    case_attributes_and_nesting,
    case_ignored,
    case_original_parameters_stay_the_same_objects,
    case_torch_settings_are_understood,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_wrapper(two_ranks, case: Any) -> None:
    two_ranks.run(case)
