"""Train a GPT with PyTorch's FSDP2 (`fully_shard`), as one would on a cluster.

    torchrun --nproc_per_node 8 docs/examples/train_fsdp2.py                # on GPUs
    fsdpbench run --script docs/examples/train_fsdp2.py --gpus 64           # on simulated ones, unchanged

Built on the meta device, sharded block by block, mixed precision, activation checkpointing, gradient
accumulation and clipping, a learning rate schedule, and sharded checkpoints.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from small_gpt import CountingTokens, SmallGPT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def build(arguments: argparse.Namespace, device: torch.device) -> SmallGPT:
    """The sharded model, its weights initialised shard by shard."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = SmallGPT(
            arguments.layers, arguments.width, arguments.heads, arguments.length, arguments.vocab
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        if arguments.checkpoint_activations:
            model.blocks[index] = block = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def save(model: SmallGPT, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """A sharded checkpoint: every rank writes its part."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one microbatch, on each GPU")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint in the end")
    arguments = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)

    model = build(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    needed = arguments.steps * arguments.accumulate * arguments.batch * dist.get_world_size()
    data = CountingTokens(needed, arguments.length, arguments.vocab)
    loader = iter(
        DataLoader(data, arguments.batch, sampler=DistributedSampler(data), pin_memory=True, num_workers=2)
    )

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for step in range(arguments.steps):
        start.record()
        for microbatch in range(arguments.accumulate):
            model.set_requires_gradient_sync(microbatch == arguments.accumulate - 1)
            tokens, targets = (part.to(device, non_blocking=True) for part in next(loader))
            logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss / arguments.accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        end.record()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            end.synchronize()
            print(
                f"step {step}: loss {total.item():.4f}, gradient norm {norm.item():.3f}, "
                f"learning rate {schedule.get_last_lr()[0]:.2e}, {start.elapsed_time(end):.1f} ms, "
                f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB",
                flush=True,
            )
    if arguments.save:
        save(model, optimizer, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
