"""Two-dimensional parallelism: tensor parallel blocks, sequence parallel norms, loss parallel, FSDP2 on top."""

import torch
import torch.distributed as dist
from tiny import LENGTH, VOCAB, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), nn.ModuleDict()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
model = Model().cuda()
parallelize_module(model, mesh["tp"], {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
})  # fmt: skip
for layer in model.layers:
    parallelize_module(layer, mesh["tp"], {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    })  # fmt: skip
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    with loss_parallel():
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
