"""transformers' own tensor parallelism (`tp_plan="auto"`) in a loop of one's own, started by torchrun."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("llama", dtype=torch.bfloat16, tp_plan="auto")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(8):
    tokens = torch.randint(0, 1000, (4, 512), device=model.device)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(step, loss.item())
