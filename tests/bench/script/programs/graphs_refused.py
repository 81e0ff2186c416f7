"""CUDA graph capture of the whole step: refused, with the way out."""

# cause: torch.cuda.CUDAGraph is not simulated

import torch
from tiny import GPT, LENGTH, VOCAB

model = GPT().cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(tokens, tokens).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    model(tokens, tokens).backward()
    optimizer.step()
for _ in range(7):
    graph.replay()
