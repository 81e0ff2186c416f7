"""Policy gradients: answers sampled token by token, advantages in groups, clipped ratios, a KL penalty."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import GPT, VOCAB
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = GPT(2).cuda()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)


@torch.no_grad()
def generate(prompt, count, temperature=0.9, top_k=40):
    model.eval()
    for _ in range(count):
        logits = model(prompt)[:, -1].float() / temperature
        lowest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
        prompt = torch.cat([prompt, torch.multinomial(logits.softmax(-1), 1)], 1)
    model.train()
    return prompt


def of_tokens(tokens):
    return model(tokens)[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


for _ in range(8):
    prompt = torch.randint(0, VOCAB, (2, 8), device="cuda").repeat_interleave(4, 0)
    answers = generate(prompt, 4)
    rewards = (answers[:, 8:] % 7 == 0).float().mean(1).view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    with torch.no_grad():
        old = of_tokens(answers)
    ratio = (of_tokens(answers) - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gains = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    penalty = F.kl_div(old, of_tokens(answers), log_target=True, reduction="batchmean")
    (0.01 * penalty - gains[:, 7:].mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
