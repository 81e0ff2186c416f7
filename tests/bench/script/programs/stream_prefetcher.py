"""A prefetcher with its own stream, record_stream and wait_stream, and metrics copied off the critical path."""

import torch
import torch.distributed as dist
from tiny import GPT, Tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()
        self.preload()

    def preload(self):
        try:
            self.next = next(self.loader)
        except StopIteration:
            self.next = None
            return
        with torch.cuda.stream(self.stream):
            self.next = [part.cuda(non_blocking=True) for part in self.next]

    def take(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.next
        if batch is not None:
            for part in batch:
                part.record_stream(torch.cuda.current_stream())
            self.preload()
        return batch


dist.init_process_group("nccl")
model = GPT().cuda()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
prefetcher = Prefetcher(DataLoader(Tokens(32), batch_size=4, pin_memory=True))
side = torch.cuda.Stream(priority=-1)
host = torch.empty(64, pin_memory=True)
done, step = torch.cuda.Event(), 0
while (batch := prefetcher.take()) is not None:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host[step].copy_(loss.detach(), non_blocking=True)
        loss.record_stream(side)
        done.record(side)
    step += 1
done.synchronize()
print(host[:step].tolist())
