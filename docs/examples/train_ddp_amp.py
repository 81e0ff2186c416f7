"""Train a GPT with DistributedDataParallel, autocast to float16 and a GradScaler.

    torchrun --nproc_per_node 8 docs/examples/train_ddp_amp.py              # on GPUs
    fsdpbench run --script docs/examples/train_ddp_amp.py --gpus 64         # on simulated ones, unchanged

Skips a step whose loss is not finite, evaluates now and then, and writes a checkpoint and a memory snapshot.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_gpt import CountingTokens, SmallGPT
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8, help="sequences on each GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint in the end")
    parser.add_argument("--memory-snapshot", metavar="FILE", help="for https://pytorch.org/memory_viz")
    arguments = parser.parse_args()

    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    device_type = "cuda" if "cuda" in device else "cpu"
    dist.init_process_group(backend="nccl" if device_type == "cuda" else "gloo", init_method="env://")
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    if arguments.memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    model = SmallGPT(arguments.layers, arguments.width, 12, arguments.length, arguments.vocab).to(device)
    model = DistributedDataParallel(model, device_ids=[int(os.environ["LOCAL_RANK"])])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device_type)
    data = CountingTokens(
        arguments.steps * arguments.batch * dist.get_world_size(), arguments.length, arguments.vocab
    )
    loader = DataLoader(data, arguments.batch, sampler=DistributedSampler(data), pin_memory=True)

    for step, (tokens, targets) in enumerate(loader):
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device_type=device_type, dtype=torch.float16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if not math.isfinite(loss.item()):
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, scale {scaler.get_scale():g}", flush=True)
    if arguments.memory_snapshot and dist.get_rank() == 0:
        torch.cuda.memory._dump_snapshot(arguments.memory_snapshot)
    if arguments.save and dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "scaler": scaler.state_dict()}, arguments.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
