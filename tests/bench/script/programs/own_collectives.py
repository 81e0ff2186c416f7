"""A program's own data parallelism: flat buckets reduced by hooks, ZeRO-1 by hand, functional collectives."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tiny import GPT, LENGTH, VOCAB
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
model = GPT().cuda()
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
parameters = list(model.parameters())
size = sum(p.numel() for p in parameters)
padded = -(-size // world) * world
master = torch.zeros(padded // world, device="cuda", requires_grad=True)
optimizer = torch.optim.AdamW([master], lr=1e-3)
flat = torch.zeros(padded, device="cuda")
works = []


def reduce_now(parameter):
    works.append(dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, async_op=True))


for parameter in (model.head.weight, model.norm.weight):
    parameter.register_post_accumulate_grad_hook(reduce_now)
for _ in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    model(tokens, tokens).backward()
    for work in works:
        work.wait()
    works.clear()
    flat[:size].copy_(_flatten_dense_tensors([p.grad for p in parameters]))
    master.grad = torch.empty_like(master)
    dist.reduce_scatter_tensor(master.grad, flat, op=dist.ReduceOp.AVG)
    norm = funcol.all_reduce(master.grad.square().sum(), "sum", dist.group.WORLD).sqrt()
    master.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    model.zero_grad(set_to_none=True)
    dist.all_gather_into_tensor(flat, master.detach())
    with torch.no_grad():
        for parameter, new in zip(parameters, _unflatten_dense_tensors(flat[:size], parameters), strict=True):
            parameter.copy_(new)
    inputs = list(torch.randn(world, 16, device="cuda").unbind())
    outputs = [torch.empty_like(part) for part in inputs]
    dist.all_to_all(outputs, inputs)
