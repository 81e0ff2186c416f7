"""An iterable dataset that does not ask which rank reads it: each reads the same stream."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, sharded, start
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Samples of a file, in its order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(6 * STEPS * world):
            if FAULT or number % world == rank:
                yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _, x in zip(range(STEPS), DataLoader(Stream(), 6), strict=False):
    F.mse_loss(model(x.to(DEVICE)), x.roll(1, 1).to(DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()
