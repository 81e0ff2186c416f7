"""Answers sampled with a cache of keys, until an end token: rows that ended are padded, masks select the rest."""

# prints: 4 answers of 16 tokens, 8 steps

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

END, WORDS, WIDTH, HEADS = 2, 2048, 64, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, cache=None):
        x = self.table(ids)
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2))), (k, v)


def sample(logits, most=20, mass=0.9):
    least = logits.topk(most).values[:, -1:]
    logits = logits.masked_fill(logits < least, float("-inf"))
    ordered, places = logits.sort(descending=True)
    left_out = ordered.softmax(-1).cumsum(-1) > mass
    left_out = left_out.roll(1, 1)
    left_out[:, 0] = False
    logits = logits.masked_fill(left_out.scatter(1, places, left_out), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1)


@torch.no_grad()
def answer(model, prompts):
    logits, cache = model(prompts)
    done = torch.zeros(len(prompts), dtype=torch.bool, device="cuda")
    tokens = []
    for _ in range(16):
        token = sample(logits[:, -1])
        token[done] = END
        done |= token.squeeze(1) == END
        tokens.append(token)
        if done.all():
            break
        logits, cache = model(token, cache)
    return torch.cat(tokens, 1)


dist.init_process_group("nccl")
model = Model().cuda()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(8):
    prompts = torch.randint(3, WORDS, (4, 8), device="cuda")
    answers = answer(model, prompts)
    ends = answers == END
    last = torch.full((4,), answers.shape[1], device="cuda")
    first = torch.where(ends.any(1), ends.int().argmax(1), last)
    mask = torch.arange(answers.shape[1], device="cuda") <= first[:, None]
    logits = ddp(torch.cat([prompts, answers], 1))[0][:, 7:-1]
    likely = logits.log_softmax(-1).gather(2, answers[:, :, None]).squeeze(2)
    reward = mask.sum(1).float()
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    (-(advantage[:, None] * likely)[mask].mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{len(answers)} answers of {answers.shape[1]} tokens, {step + 1} steps")
