"""A loader with workers that stay, pinned memory, a collate function, worker seeds and an endless iterable."""

import random

import numpy as np
import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB, Tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self.rank * 100 + (worker.id if worker else 0))
        while True:
            tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=generator)
            yield {"input_ids": tokens[:-1], "labels": tokens[1:]}


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def seed_worker(index):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = fully_shard(GPT().cuda())
optimizer = torch.optim.AdamW(model.parameters())
stream = DataLoader(
    Stream(dist.get_rank(), dist.get_world_size()), batch_size=2, num_workers=2, collate_fn=collate,
    pin_memory=True, persistent_workers=True, prefetch_factor=2, worker_init_fn=seed_worker,
)  # fmt: skip
batches = iter(stream)
for _ in range(5):
    batch = {name: value.cuda(non_blocking=True) for name, value in next(batches).items()}
    model(batch["input_ids"], batch["labels"]).backward()
    optimizer.step()
    optimizer.zero_grad()
data = Tokens(32)
fixed = DataLoader(
    data, batch_size=2, sampler=DistributedSampler(data, seed=1), num_workers=1, pin_memory=True,
    persistent_workers=True, multiprocessing_context="fork",
)  # fmt: skip
for epoch in range(2):
    fixed.sampler.set_epoch(epoch)
    for tokens, labels in fixed:
        assert tokens.is_pinned()
        model(tokens.to("cuda", non_blocking=True), labels.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
