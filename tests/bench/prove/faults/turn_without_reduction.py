"""A generator and its discriminator take turns; the generator's backward is left in `no_sync()`."""

import contextlib

import torch
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
generator, discriminator = (DistributedDataParallel(Net().to(DEVICE)) for _ in range(2))
generates, judges = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, discriminator))
for step in range(STEPS):
    real, noise = batch(rank, step)
    with torch.no_grad():
        made = generator(noise)
    judges.zero_grad()
    (discriminator(made) - discriminator(real)).mean().backward()
    judges.step()
    generates.zero_grad()
    with generator.no_sync() if FAULT else contextlib.nullcontext():
        discriminator.module(generator(noise)).square().mean().backward()
    generates.step()
