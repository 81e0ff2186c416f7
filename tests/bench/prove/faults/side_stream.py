"""A mean on another stream, which does not wait for what it reads."""

import torch
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
side, mean = torch.cuda.Stream(), torch.zeros(WIDTH, device=DEVICE)
for step in range(STEPS):
    x, y = batch(rank, step)
    output = model(x)
    if not FAULT:
        side.wait_stream(torch.cuda.current_stream())
        output.record_stream(side)
    with torch.cuda.stream(side):
        mean.lerp_(output.detach().mean(0), 0.01)
    (output - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
