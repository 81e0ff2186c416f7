"""A small GPT as people port it: fully_shard, accumulation without sync, memmap data, mfu by perf_counter."""

import argparse
import math
import os
import tempfile
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
parser.add_argument("--max-iters", type=int, default=8)
parser.add_argument("--grad-clip", type=float, default=1.0)
given = parser.parse_args()

dist.init_process_group(backend="nccl")
rank, local_rank, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
device = f"cuda:{local_rank}"
torch.cuda.set_device(device)
torch.manual_seed(1337 + rank)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
torch.set_float32_matmul_precision("high")
assert given.gradient_accumulation_steps % min(world, 4) == 0

folder = tempfile.mkdtemp()
np.random.default_rng(0).integers(0, VOCAB, 10_000).astype(np.uint16).tofile(f"{folder}/train.bin")


def get_batch(size=4):
    data = np.memmap(f"{folder}/train.bin", dtype=np.uint16, mode="r")
    places = torch.randint(len(data) - LENGTH, (size,))
    x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in places])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


def get_lr(it, peak=6e-4, warmup=2, decay=8):
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    return 0.1 * peak + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * 0.9 * peak


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        losses[k] = model(*get_batch()).item()
    model.train()
    return losses.mean()


model = GPT().to(device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
t0, best = time.time(), 1e9
for it in range(given.max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % 4 == 0:
        best = min(best, float(estimate_loss()))
    for micro in range(given.gradient_accumulation_steps):
        model.set_requires_gradient_sync(micro == given.gradient_accumulation_steps - 1)
        with nullcontext():
            (model(*get_batch()) / given.gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), given.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dt, t0 = time.time() - t0, time.time()
    if rank == 0:
        print(f"iter {it}: time {dt * 1000:.2f}ms, {world * LENGTH * 4 / max(dt, 1e-9):.0f} tok/s")
dist.destroy_process_group()
