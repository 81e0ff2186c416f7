"""Two pipeline stages of DDP by hand: 1F1B with batches of messages, shapes and a verdict through the host."""

# prints: went through the pipeline
# cause with --sanitize: leave these out

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH, Block
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, world = dist.get_rank(), dist.get_world_size()
half = world // 2
last = rank >= half
peer = rank - half if last else rank + half
pairs = [dist.new_group([each, each + half]) for each in range(half)]
sides = [dist.new_group(range(half)), dist.new_group(range(half, world))]
pair = pairs[min(rank, peer)]
model = DistributedDataParallel(nn.Sequential(Block(), Block()).cuda(), process_group=sides[last])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

shape = torch.tensor([2, LENGTH, WIDTH])
if last:
    shape.zero_()
    dist.recv(shape, peer, group=pair)
    assert shape.tolist() == [2, LENGTH, WIDTH]
    dist.send_object_list([{"ready": rank}], dst=peer, group=pair)
else:
    dist.send(shape, peer, group=pair)
    answer = [None]
    dist.recv_object_list(answer, src=peer, group=pair)
    assert answer == [{"ready": peer}]


def exchange(out=None, into=None):
    sent = [] if out is None else [dist.P2POp(dist.isend, out, peer, pair)]
    received = [] if into is None else [dist.P2POp(dist.irecv, into, peer, pair)]
    for work in dist.batch_isend_irecv([*sent, *received]):
        work.wait()


def empty():
    return torch.empty(*shape.tolist(), device="cuda")


STEPS, MICROBATCHES = 8, 4
for step in range(STEPS):
    if last:
        x = empty()
        exchange(into=x)
        for microbatch in range(MICROBATCHES):
            x.requires_grad_()
            model(x).pow(2).mean().backward()
            following = empty() if microbatch < MICROBATCHES - 1 else None
            exchange(x.grad, following)
            x = following
    else:
        outputs = []
        gradient = empty()
        for microbatch in range(MICROBATCHES):
            outputs.append(model(torch.randn(*shape.tolist(), device="cuda")))
            exchange(outputs[-1].detach(), gradient if microbatch else None)
            if microbatch:
                outputs.pop(0).backward(gradient)
        exchange(into=gradient)
        outputs.pop(0).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()
    verdict = torch.tensor([step + 1 if last else 0])
    dist.broadcast(verdict, max(rank, peer), group=pair)
    assert verdict.item() == step + 1
print("went through the pipeline")
