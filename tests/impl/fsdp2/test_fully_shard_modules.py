"""``fully_shard`` with modules as users have them: nested outputs, unused branches, calls of other kinds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    assert_close,
    assert_same_outcome,
    loss_of,
    read_fully_shard,
    read_shards,
    recorded,
    shard_model,
    tokens_of,
    train,
)
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch_version import BEFORE_2_12, BEFORE_2_13

from fsdpbench import impl

WIDTH = 15


@dataclass
class Pair:
    main: torch.Tensor
    side: torch.Tensor


class Branches(nn.Module):
    """Named inputs, an output inside a dataclass inside a dictionary, and a branch that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: torch.Tensor, factor: float) -> dict[str, Any]:
        y = self.used(x) * factor
        return {"pair": Pair(y, y.detach()), "number": 3}


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter = nn.Embedding(33, WIDTH)
        self.blocks = nn.ModuleList(
            Branches() if kind == "branches" else nn.Linear(WIDTH, WIDTH) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 33)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            if self.kind == "branches":
                x = block(x=x, factor=2.0)["pair"].main
            elif self.kind == "called twice":
                x = torch.relu(block(torch.relu(block(x))))
            elif self.kind == "skipped" and block is self.blocks[1]:
                continue
            else:
                x = x + block(x)
        return self.head(x)


def case_like_torch(rank: int, *, kind: str, policy: Any) -> None:
    outcomes, records = [], []
    for side in ("impl", "torch"):
        torch.manual_seed(0)
        with recorded(side) as record:
            model: Any = shard_model(side, Odd(kind), mesh=init_device_mesh("cpu", (2,)), policy=policy)
            outcomes.append(train(model, rank, *read_shards, steps=3))
        records.append(record)
    assert_same_outcome(*outcomes)
    assert records[0] == records[1], records


@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["branches", "called twice", "skipped"])
def test_equals_torch(two_ranks, kind: str, policy: Any) -> None:
    if BEFORE_2_12 and kind == "branches":
        pytest.skip("torch 2.11 loses what it gathered, and fails in backward")
    two_ranks.run(case_like_torch, kind=kind, policy=policy)


def case_modules_as_one_unit(rank: int) -> None:
    """``fully_shard([a, b])``: one gather and one reduction for both, as torch does."""
    outcomes, records = [], []
    for side, api in (("impl", impl), ("torch", torch_fsdp)):
        torch.manual_seed(0)
        model = Model(blocks=2)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh)
        api.fully_shard([model.norm, model.head], mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        with recorded(side) as record:
            outcomes.append(train(model, rank, *read_shards, steps=3))
        records.append(record)
    assert_same_outcome(*outcomes)
    assert records[0] == records[1], records


class Body(Model):
    """Leaves the head to its caller."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def backward_in_chunks(model: Any, tokens: torch.Tensor, weight: float = 1.0) -> None:
    body = model(tokens)
    cut = body.detach().requires_grad_()
    for part, target in zip(cut.chunk(2, dim=1), tokens.chunk(2, dim=1), strict=True):
        logits = model.head(part).flatten(0, 1)
        (weight * nn.functional.cross_entropy(logits, target.flatten())).backward()
    body.backward(cut.grad)


def case_loss_in_chunks(rank: int) -> None:
    """The head, one unit with the norm, runs outside of the model's forward, once a chunk of the sequence."""
    torch.manual_seed(0)
    alone = Body(blocks=2)
    for step in range(2):
        for each in range(2):
            backward_in_chunks(alone, tokens_of(each, step), weight=0.5)
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    # torch 2.12 loses the gathered parameters between the chunks.
    for api in (impl,) if BEFORE_2_13 else (impl, torch_fsdp):
        torch.manual_seed(0)
        model = Body(blocks=2)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh)
        api.fully_shard([model.norm, model.head], mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        for step in range(2):
            backward_in_chunks(model, tokens_of(rank, step))
        assert_close(read_fully_shard[0](model), expected)


def case_forward_without_gradients(rank: int) -> None:
    """Evaluation between training steps: parameters are freed again, and training is not disturbed."""
    torch.manual_seed(0)
    model: Any = shard_model("impl", Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
    before = loss_of(model, tokens_of(rank, 0))
    before.backward()
    gradients = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        assert loss_of(model, tokens_of(rank, 0)).item() == before.item()
    assert all(isinstance(p, DTensor) for block in model.blocks for p in block.parameters())
    loss_of(model, tokens_of(rank, 0)).backward()
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.to_local(), expected)


def case_unshard_by_hand(rank: int) -> None:
    torch.manual_seed(0)
    plain = Model(blocks=1)
    torch.manual_seed(0)
    model: Any = shard_model("impl", Model(blocks=1), mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(tokens_of(rank, 0))
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    handle.wait()
    handle.wait()
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    assert torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)


def case_backward_twice(rank: int) -> None:
    """Two backward passes through one graph, and two graphs alive at once, as torch reduces them."""
    found = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        loss = loss_of(model, tokens_of(rank, 0))
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = (loss_of(model, tokens_of(rank, step)) for step in (1, 2))
        (first + second).backward()
        found.append(read_fully_shard[0](model))
    assert_close(found[0], found[1])


def unsharded_loss(handles: list[Any], model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Unshard two blocks at the first call, when the optimizer of sharded parameters is made."""
    if not handles:
        model.blocks[0].unshard()
        assert not isinstance(model.blocks[0].up.weight, DTensor)
        handles.append(model.blocks[1].unshard(async_op=True))
    return loss_of(model, tokens)


def case_unshard_before_the_first_forward(rank: int) -> None:
    """A part that is unsharded by hand is no root yet, and its handle may be waited for later."""
    found = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        handles: list[Any] = []
        found.append(train(model, rank, *read_fully_shard, steps=2, loss=partial(unsharded_loss, handles)))
        handles[0].wait()
        model.blocks[1].reshard()
        assert isinstance(model.blocks[1].up.weight, DTensor)
    assert_same_outcome(*found)


class Regions(nn.Module):
    """Checkpointing over several units at once, so that a unit is recomputed before its own backward; the
    recomputation ends early, inside the second unit, whose post-forward hooks do not run."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter = nn.Embedding(33, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 33)
        self.reentrant = reentrant

    def two(self, x: torch.Tensor, start: int) -> torch.Tensor:
        return self.blocks[start + 1](torch.tanh(self.blocks[start](x)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for start in (0, 2):
            x = checkpoint(self.two, x, start, use_reentrant=self.reentrant)
        return self.head(x)


def case_checkpointing_over_several_units(rank: int) -> None:
    for reentrant in (False, True):
        outcomes, records = [], []
        for kind in ("impl", "torch"):
            torch.manual_seed(0)
            model: Any = shard_model(kind, Regions(reentrant), mesh=init_device_mesh("cpu", (2,)))
            with recorded(kind) as record:
                outcomes.append(train(model, rank, *read_shards, steps=3))
            records.append(record)
        assert_same_outcome(*outcomes)
        assert records[0] == records[1], (reentrant, records)


def case_first_forward_in_inference_mode(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = shard_model("impl", Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
    with torch.inference_mode():
        before = loss_of(model, tokens_of(rank, 0)).item()
    loss = loss_of(model, tokens_of(rank, 0))
    loss.backward()
    assert loss.item() == before
    assert all(p.grad is not None for p in model.parameters())


class WithEncode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).sum()


def case_another_method_as_forward(rank: int) -> None:
    model: Any = impl.fully_shard(WithEncode(), mesh=init_device_mesh("cpu", (2,)))
    impl.register_fsdp_forward_method(model, "encode")
    model.encode(torch.ones(2, 4)).sum().backward()
    assert model.linear.weight.grad is not None
    with pytest.raises(ValueError, match="no method 'decode'"):
        impl.register_fsdp_forward_method(model, "decode")
    impl.register_fsdp_forward_method(nn.Linear(2, 2), "extra_repr")


def case_several_dtypes_in_one_unit(rank: int) -> None:
    """One unit a dtype, where torch refuses; equal to training alone on the same data."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    module[0].register_forward_hook(lambda m, a, out: out.double())
    expected = [p.detach().clone() for p in module.parameters()]
    module(torch.ones(2, 4)).sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    sharded: Any = impl.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    assert [unit.dtype for unit in impl.unit_report(sharded)] == ["float32", "float64"]
    sharded(torch.ones(2, 4)).sum().backward()
    for parameter, value, gradient in zip(sharded.parameters(), expected, gradients, strict=True):
        assert torch.equal(parameter.full_tensor(), value)
        assert torch.allclose(parameter.grad.full_tensor(), gradient)


def case_ignored_parameters(rank: int) -> None:
    model = Model(blocks=1)
    ignored = {model.embed.weight}
    impl.fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    assert not isinstance(model.embed.weight, DTensor)
    assert isinstance(model.head.weight, DTensor)
    loss_of(model, tokens_of(rank, 0)).backward()
    assert model.embed.weight.grad is not None


def case_class_and_names_stay(rank: int) -> None:
    plain = Model(blocks=1)
    names = [name for name, _ in plain.named_parameters()]
    model: Any = shard_model("impl", plain, mesh=init_device_mesh("cpu", (2,)))
    assert model is plain
    assert isinstance(model, Model)
    assert isinstance(model, impl.FSDPModule)
    assert type(model).__mro__[1] is impl.FSDPModule
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model.blocks[:1], nn.ModuleList)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)


def case_compiled_blocks(rank: int) -> None:
    """Blocks compiled before or after they are sharded compute what eager ones and torch's compute."""
    outcomes = []
    for api, when in ((impl, ""), (impl, "before"), (impl, "after"), (torch_fsdp, "before")):
        torch.manual_seed(0)
        model = Model(blocks=2)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            if when == "before":
                block.compile(backend="aot_eager")
            api.fully_shard(block, mesh=mesh)
            if when == "after":
                block.compile(backend="aot_eager")
        api.fully_shard(model, mesh=mesh)
        outcomes.append(train(model, rank, *read_shards, steps=3))
    for outcome in outcomes[1:]:
        assert_same_outcome(outcome, outcomes[0])


def case_replicate_around_and_inside(rank: int) -> None:
    """DDP, by torch's ``replicate``, and ``fully_shard`` leave each other's modules alone."""
    mesh = init_device_mesh("cpu", (2,))
    for outer in ("replicate", "fully_shard"):
        found = []
        for api in (impl, torch_fsdp):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            if outer == "replicate":
                api.fully_shard(model[0], mesh=mesh)
                replicate(model)
            else:
                replicate(model[0])
                api.fully_shard(model, mesh=mesh)
            torch.manual_seed(rank)
            model(torch.randn(4, WIDTH)).sum().backward()
            found.append([p.grad for p in model.parameters()])
        for ours, theirs in zip(*found, strict=True):
            assert type(ours) is type(theirs)
            assert_close({"gradient": full(ours)}, {"gradient": full(theirs)})
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(impl.fully_shard(nn.Linear(2, 2), mesh=mesh))


def full(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


CASES = [
    case_replicate_around_and_inside,
    case_loss_in_chunks,
    case_first_forward_in_inference_mode,
    case_backward_twice,
    case_checkpointing_over_several_units,
    pytest.param(case_compiled_blocks, marks=pytest.mark.campaign),
    case_modules_as_one_unit,
    case_forward_without_gradients,
    case_unshard_by_hand,
    case_unshard_before_the_first_forward,
    case_another_method_as_forward,
    case_several_dtypes_in_one_unit,
    case_ignored_parameters,
    case_class_and_names_stay,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_module(two_ranks, case: Any) -> None:
    two_ranks.run(case)
