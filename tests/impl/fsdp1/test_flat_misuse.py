"""Misuse of ``FullyShardedDataParallel`` is told at once, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Model, loss_of, tokens_of, wrap_model
from torch import nn

from fsdpbench import impl

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


def case_optimizer_made_before(rank: int) -> None:
    plain = Model(blocks=1)
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = wrap_model("impl", plain)
    loss_of(model, tokens_of(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"SGD .*made before the model was wrapped.*use_orig_params"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with impl.deferred_init():
        deferred = nn.Linear(3, 3)
    early = torch.optim.SGD(deferred.parameters(), lr=0.1)
    cpu = torch.device("cpu")
    impl.FullyShardedDataParallel(deferred, use_orig_params=True, device_id=cpu)
    with pytest.raises(RuntimeError, match="made before"):
        early.step()


def case_renamed(rank: int, *, originals: bool) -> None:
    model: Any = wrap_model("impl", Model(blocks=1), use_orig_params=originals)
    head = model.module.head
    if originals:
        head.register_parameter("matrix", head._parameters.pop("weight"))
    else:
        head.matrix = head.__dict__.pop("weight")
    with pytest.raises(ValueError, match=r"'head.weight' is no longer 'weight' of its Linear.*do it before"):
        model(tokens_of(rank, 0))


def case_replaced(rank: int) -> None:
    model: Any = wrap_model("impl", Model(blocks=1), use_orig_params=True)
    model.module.head.weight = nn.Parameter(torch.zeros(33, 15))
    with pytest.raises(RuntimeError, match=r"'head.weight' was given data of shape \(33, 15\)"):
        model(tokens_of(rank, 0))


def case_called_outside(rank: int, *, originals: bool) -> None:
    model: Any = wrap_model("impl", Model(blocks=1), use_orig_params=originals)
    with pytest.raises(RuntimeError, match=r"Embedding was called while its parameters are sharded.*'Model'"):
        model.module(tokens_of(rank, 0))
    up = model.module.blocks[0].module.up
    with pytest.raises(RuntimeError, match=r"Linear was called while .*'Block'"):
        up(torch.ones(1, 15))
    with impl.FullyShardedDataParallel.summon_full_params(model):
        assert up(torch.ones(1, 15)).shape == (1, 60)
    loss_of(model, tokens_of(rank, 0)).backward()
    # From now on only on demand: a check is a call more for each module.
    assert not [m for m in model.modules() if m._forward_pre_hooks]


def case_called_outside_later(rank: int) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        model: Any = wrap_model("impl", Model(blocks=1))
        loss_of(model, tokens_of(rank, 0)).backward()
        with pytest.raises(RuntimeError, match="Linear was called while"):
            model.module.blocks[0].module.up(torch.ones(1, 15))
    finally:
        dist.set_debug_level(before)


class Choosing(Model):
    """Runs the blocks that it is told to."""

    chosen: tuple[int, ...] = (0, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in self.chosen:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


def case_ranks_disagree(rank: int, *, others: tuple[int, ...], message: str) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        model: Any = wrap_model("impl", Choosing(blocks=2))
        model.module.chosen = (0, 1) if rank == 0 else others
        with pytest.raises(RuntimeError, match=message):
            model(tokens_of(rank, 0))
    finally:
        dist.set_debug_level(before)


def case_order_changes(rank: int) -> None:
    import logging

    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdpbench.impl.collectives.agreement").addHandler(handler)
    try:
        model: Any = wrap_model("impl", Choosing(blocks=2))
        for chosen in ((0, 1), (0, 1), (1, 0), (1, 0)):
            model.module.chosen = chosen
            loss_of(model, tokens_of(rank, 0)).backward()
        assert records == [
            "the order of units changed: ['root', 'blocks.1', 'blocks.0'] in this iteration, "
            "['root', 'blocks.0', 'blocks.1'] in the first one"
        ]
    finally:
        logging.getLogger("fsdpbench.impl.collectives.agreement").removeHandler(handler)
        dist.set_debug_level(before)


def case_cannot_communicate(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(
        ValueError, match=r"sync_module_states.* on cpu, .* communicates from cuda: pass device"
    ):
        impl.FullyShardedDataParallel(nn.Linear(2, 2), group, sync_module_states=True)


def case_mixed_devices(rank: int) -> None:
    from simulated_cases import simulated

    with simulated() as device:
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=device))
        with pytest.raises(ValueError, match=r"parameters are on \['cpu', 'sim:0'\]: pass device_id"):
            impl.FullyShardedDataParallel(mixed)
        apart = nn.Sequential(
            impl.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
            nn.Linear(2, 2, device=device),
        )
        model = impl.FullyShardedDataParallel(apart, device_id=device)
        with pytest.raises(ValueError, match=r"unit '0' is on cpu but the root's device is sim:0"):
            model(torch.ones(1, 2, device=device))


def test_mixed_devices(lone_process) -> None:
    lone_process.run(case_mixed_devices)


@MODES
@pytest.mark.parametrize("case", [case_renamed, case_called_outside], ids=lambda c: c.__name__)
def test_both_modes(two_ranks, case: Any, originals: bool) -> None:
    two_ranks.run(case, originals=originals)


CASES = [
    case_cannot_communicate,
    case_optimizer_made_before,
    case_replaced,
    case_called_outside_later,
    case_order_changes,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_misuse(two_ranks, case: Any) -> None:
    two_ranks.run(case)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((1, 0), r"rank 0: forward of unit 'blocks.0'; rank 1: forward of unit 'blocks.1'"),
        ((0,), r"rank 0: forward of unit 'blocks.1'; rank 1: end of forward"),
    ],
)
def test_ranks_disagree(two_ranks, others: tuple[int, ...], message: str) -> None:
    two_ranks.run(case_ranks_disagree, others=others, message=message)
