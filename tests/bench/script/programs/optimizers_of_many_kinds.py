"""Optimizers: ZeRO redundancy under DDP, Muon, Adafactor, LBFGS, hooks of steps, groups added, rates as tensors."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = DDP(GPT().cuda(), device_ids=[0])
square = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
ids = {id(p) for p in square}
others = [p for p in model.parameters() if id(p) not in ids]
kinds = [
    [ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)],
    [torch.optim.Muon(square, lr=0.02), torch.optim.AdamW(others, lr=1e-3)],
    [torch.optim.Adafactor(model.parameters())],
    [torch.optim.Adagrad(square), torch.optim.NAdam(others, capturable=True)],
]
calls = []
for optimizers in kinds:
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *a: calls.append(1))
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
        model(tokens, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
last = torch.nn.Linear(8, 1).cuda()
lbfgs = torch.optim.LBFGS(last.parameters(), max_iter=2, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    loss = last(torch.ones(4, 8, device="cuda")).square().mean()
    loss.backward()
    return loss


lbfgs.step(closure)
print(len(calls))
