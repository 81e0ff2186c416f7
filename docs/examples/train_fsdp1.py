"""Train a GPT with PyTorch's FSDP1 (`FullyShardedDataParallel`), as one would on a cluster.

    torchrun --nproc_per_node 8 docs/examples/train_fsdp1.py                # on GPUs
    fsdpbench run --script docs/examples/train_fsdp1.py --gpus 64           # on simulated ones, unchanged

Wrapped by a policy, mixed precision, `no_sync` accumulation, gradient clipping over all ranks, a warm-up of
the learning rate, `torch.profiler`, and a full checkpoint on rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_gpt import Block, CountingTokens, SmallGPT
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, DistributedSampler

FSDP = FullyShardedDataParallel


def save(model: FSDP, path: Path) -> None:
    """Rank 0 collects all weights on the host and writes them."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one microbatch, on each GPU")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", metavar="FOLDER", help="profile two steps")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint in the end")
    arguments = parser.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    if not torch.cuda.is_bf16_supported():
        raise SystemExit("this script wants GPUs with bfloat16")

    bf16 = torch.bfloat16
    model = FSDP(
        SmallGPT(arguments.layers, arguments.width, 12, arguments.length, arguments.vocab),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    needed = arguments.steps * arguments.accumulate * arguments.batch * dist.get_world_size()
    data = CountingTokens(needed, arguments.length, arguments.vocab)
    sampler: DistributedSampler = DistributedSampler(data, shuffle=True)
    loader = iter(DataLoader(data, arguments.batch, sampler=sampler, pin_memory=True))

    profiler = contextlib.nullcontext()
    if arguments.profile:
        profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=1, warmup=1, active=2),
            on_trace_ready=tensorboard_trace_handler(arguments.profile),
        )
    with profiler:
        for step in range(arguments.steps):
            for microbatch in range(arguments.accumulate):
                last = microbatch == arguments.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    tokens, targets = (part.cuda(non_blocking=True) for part in next(loader))
                    logits = model(tokens)
                    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                    (loss / arguments.accumulate).backward()
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad(set_to_none=True)
            if arguments.profile:
                profiler.step()
            if dist.get_rank() == 0:
                gib = torch.cuda.memory_stats()["reserved_bytes.all.peak"] / 2**30
                print(f"step {step}: loss {loss.item():.4f}, norm {norm:.3f}, {gib:.2f} GiB", flush=True)
    if arguments.save:
        save(model, arguments.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
