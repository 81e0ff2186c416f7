"""A program that is preempted: handlers of SIGTERM and SIGUSR1, atomic checkpoints of all states, a resume."""

import glob
import os
import random
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from tiny import GPT, Tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

stop = False


def handle(number, frame):
    global stop
    stop = True


signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGUSR1, handle)
dist.init_process_group("nccl")
rank = dist.get_rank()
folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
model = fully_shard(GPT().cuda())
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
step = 0


def save():
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/step{step:06d}.rank{rank}.pt"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "step": step,
        "rng": (torch.get_rng_state(), torch.cuda.get_rng_state(), np.random.get_state(), random.getstate()),
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)
    dist.barrier()
    for old in sorted(glob.glob(f"{folder}/*.rank{rank}.pt"))[:-2]:
        os.remove(old)


def resume():
    found = sorted(glob.glob(f"{folder}/*.rank{rank}.pt"))
    if not found:
        return 0
    state = torch.load(found[-1], weights_only=False, map_location="cuda")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"][0].cpu())
    torch.cuda.set_rng_state(state["rng"][1].cpu())
    np.random.set_state(state["rng"][2])
    random.setstate(state["rng"][3])
    return state["step"]


for part in range(2):
    step = resume()
    data = Tokens(64)
    for tokens, labels in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(tokens.cuda(), labels.cuda()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop:
            save()
            stop = False
            break
assert step >= 7, step
