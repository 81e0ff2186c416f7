"""Preference training: a frozen reference, log-probabilities of chosen and rejected answers, masked sums."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = GPT().cuda()
reference = copy.deepcopy(model).eval().requires_grad_(False)
for each in (model, reference):
    for block in each.blocks:
        fully_shard(block)
    fully_shard(each)
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-7)


def log_probabilities(network, tokens, mask):
    logits = network(tokens)[:, :-1].float().log_softmax(-1)
    chosen = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
    return (chosen * mask[:, 1:]).sum(-1)


for _ in range(8):
    tokens = torch.randint(0, VOCAB, (4, LENGTH)).cuda()
    lengths = torch.randint(LENGTH // 2, LENGTH, (4, 1)).cuda()
    places = torch.arange(LENGTH, device="cuda")[None]
    mask = ((places < lengths) & (places > 10)).float()
    policy = log_probabilities(model, tokens, mask)
    with torch.no_grad():
        base = log_probabilities(reference, tokens, mask)
    good, bad = (policy - base).chunk(2)
    loss = -F.logsigmoid(0.1 * (good - bad)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy = (good > bad).float().mean()
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
print(f"reward accuracy {accuracy.item():.2f}")
