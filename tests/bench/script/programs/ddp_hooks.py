"""DDP with communication hooks, no_sync, Join over uneven data, and a compiled model."""

# cause with --sanitize: a compiled part is not simulated

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
for hook in (default_hooks.bf16_compress_hook, None):
    network = GPT(2).cuda()
    if hook is None:
        network = torch.compile(network)
    model = DDP(network, device_ids=[0], gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters())
    with Join([model]):
        for _ in range(4):
            tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
            with model.no_sync():
                model(tokens, tokens).backward()
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
