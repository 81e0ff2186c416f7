"""Evaluation between epochs: no_grad, accuracy reduced over ranks, early stopping, best model on rank 0."""

import torch
import torch.distributed as dist
from tiny import GPT, Block, Tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
device = torch.device("cuda", 0)
model = GPT().to(device)
for module in model.modules():
    if isinstance(module, Block):
        fully_shard(module)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


def loader_of(data, shuffle):
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=shuffle))


@torch.inference_mode()
def evaluate():
    model.eval()
    sums = torch.zeros(3, device=device)
    for tokens, labels in loader_of(Tokens(32), False):
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens)
        sums[0] += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        sums[1] += (logits.argmax(-1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


best, bad = float("inf"), 0
for _ in range(4):
    for tokens, labels in loader_of(Tokens(64), True):
        model(tokens.to(device), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss, accuracy = evaluate()
    plateau.step(loss)
    if loss < best:
        best, bad = loss, 0
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, "best.pt")
    else:
        bad += 1
    stop = torch.tensor([bad > 5], device=device, dtype=torch.int32)
    dist.broadcast(stop, 0)
    if stop.item():
        break
