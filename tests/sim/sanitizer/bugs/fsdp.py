"""FSDP's own streams and a program's: unsharded parameters, sharded gradients, the optimizer's event."""

from __future__ import annotations

from typing import Any

import torch
from seeded import bug
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdpbench.impl import FullyShardedDataParallel, fully_shard


def sharded(shard: Any = fully_shard) -> Any:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).cuda()
    for layer in model:
        shard(layer)
    return shard(model)


@bug("use_after_free", "record_stream")
def resharded_while_a_side_stream_reads(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, total = sharded(torch_fully_shard), torch.zeros((), device="cuda")
    for layer in model:
        layer.unshard()  # second
        side.wait_stream(main)
        with torch.no_grad(), torch.cuda.stream(side):
            total.add_(layer.weight.square().sum())  # first
        if fixed:
            main.wait_stream(side)
        layer.reshard()
    main.wait_stream(side)


@bug("race", "wait")
def unsharded_weight_read_on_a_side_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = sharded(torch_fully_shard)
    model[0].unshard()  # first
    if fixed:
        side.wait_stream(main)
    with torch.no_grad(), torch.cuda.stream(side):
        model[0].weight.norm()  # second
    main.wait_stream(side)
    model[0].reshard()


@bug("race", "wait")
def sharded_gradient_read_on_a_side_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = sharded()
    side.wait_stream(main)
    model(torch.randn(8, 256, device="cuda")).sum().backward()  # first
    if fixed:
        side.wait_stream(main)
    with torch.no_grad(), torch.cuda.stream(side):
        model[1].weight.grad.to_local().norm()  # second
    main.wait_stream(side)


def steps_with_event(shard: Any, fixed: bool) -> None:
    """`set_post_optim_event` says for what all-gathers wait; one recorded too early lets them start."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = sharded(shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    event = torch.cuda.Event()
    for _ in range(2):
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            if not fixed:
                event.record()
            optimizer.step()
            if fixed:
                event.record()
        model.set_post_optim_event(event)
    main.wait_stream(side)


@bug("race", "wait")
def event_of_the_optimizer_recorded_too_early(fixed: bool) -> None:
    steps_with_event(fully_shard, fixed)  # first # second


@bug("race", "wait")
def event_of_the_optimizer_recorded_too_early_in_torch(fixed: bool) -> None:
    steps_with_event(torch_fully_shard, fixed)  # first # second


@bug("race", "wait")
def wrapped_model_stepped_on_a_side_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
    model = FullyShardedDataParallel(layers, device_id=torch.device("cuda", 0))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 256, device="cuda")).sum().backward()  # second
        side.wait_stream(main)
        with torch.cuda.stream(side):
            optimizer.step()  # first
        if fixed:
            main.wait_stream(side)
    main.wait_stream(side)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)]) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@bug("use_after_free", "record_stream")
def offload_without_sharding_in_torch(fixed: bool) -> None:
    """A race of torch's own: `FlatParamHandle._use_sharded_flat_param` drops the device's copy of the
    parameters, which was made on the pre-unshard stream and is still computed with, without a word. The
    The next unit's copy takes its memory. Nobody else holds it where activations are recomputed."""
    strategy = ShardingStrategy.FULL_SHARD if fixed else ShardingStrategy.NO_SHARD
    model = TorchFullyShardedDataParallel(
        Checkpointed(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=True),
        device_id=0,
        use_orig_params=True,
    )
    for _ in range(2):
        loss = model(torch.randn(8, 512, device="cuda"))  # first
        loss.sum().backward()  # second
