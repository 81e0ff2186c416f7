"""Two networks and two optimizers under FSDP2: a gradient penalty of second order, a moving average generator."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")


def layers(inner, outer):
    return nn.Sequential(
        nn.Linear(inner, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, outer)
    )


maker, judge = layers(32, 64).cuda(), layers(64, 1).cuda()
average = copy.deepcopy(maker).requires_grad_(False)
for network in (maker, judge):
    fully_shard(network)
of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.0, 0.99))
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.0, 0.99))
for step in range(8):
    real = torch.randn(16, 64, device="cuda", requires_grad=True)
    made = maker(torch.randn(16, 32, device="cuda"))
    scores = judge(real)
    slope = torch.autograd.grad(scores.sum(), real, create_graph=True)[0]
    penalty = slope.square().sum(1).mean()
    loss = (
        nn.functional.softplus(judge(made.detach())).mean() + nn.functional.softplus(-scores).mean() + penalty
    )
    loss.backward()
    of_judge.step()
    of_judge.zero_grad()
    if step % 2 == 0:
        judge.requires_grad_(False)
        nn.functional.softplus(-judge(maker(torch.randn(16, 32, device="cuda")))).mean().backward()
        of_maker.step()
        of_maker.zero_grad()
        judge.requires_grad_(True)
        with torch.no_grad():
            for mean, current in zip(average.parameters(), maker.parameters(), strict=True):
                mean.lerp_(current.full_tensor(), 0.01)
