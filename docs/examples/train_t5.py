"""Train a T5 with FullyShardedDataParallel, in the manner of PyTorch's FSDP tutorial.

    torchrun --nproc_per_node 2 docs/examples/train_t5.py                                      # on CPUs
    torchrun --nproc_per_node 8 docs/examples/train_t5.py --model t5-3b --seq 512 --batch 8    # on GPUs

One import decides whose FSDP trains: `--fsdp fsdpbench.impl` is this project's,
`--fsdp torch.distributed.fsdp` is PyTorch's. Everything else is the same, and so are the losses.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fsdpbench.workloads import Workload, get_workload
from fsdpbench.workloads.families.t5 import T5DecoderBlock, T5EncoderBlock

DOCS = Path(__file__).resolve().parents[1]
Batches = Iterator[tuple[torch.Tensor, ...]]


def setup() -> torch.device:
    """Join the process group; the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def shard(model: nn.Module, fsdp: ModuleType, device: torch.device) -> nn.Module:
    """Wrap each block as a unit, and the rest as another."""
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={T5EncoderBlock, T5DecoderBlock}
    )
    bf16 = None
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        bf16 = fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        )
    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        mixed_precision=bf16,
        sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, steps: int) -> float:
    """One epoch of so many steps; the mean loss over all ranks."""
    model.train()
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in islice(batches, steps):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
    return mean_over_ranks(total / steps)


@torch.no_grad()
def validate(model: nn.Module, batches: Batches, steps: int) -> float:
    """The mean loss over so many batches and all ranks."""
    model.eval()
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in islice(batches, steps):
        total += model(*batch)
    return mean_over_ranks(total / steps)


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def data(workload: Workload, text: Path, device: torch.device, options: argparse.Namespace) -> Batches:
    """This rank's share of a text, in microbatches without end."""
    return workload.batches(
        options.batch,
        options.seq,
        options.seed,
        dist.get_rank(),
        device,
        data=text,
        world_size=dist.get_world_size(),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a T5 with FullyShardedDataParallel.")
    parser.add_argument(
        "--fsdp", default="fsdpbench.impl", help="package to import: fsdpbench.impl or torch.distributed.fsdp"
    )
    parser.add_argument("--model", default="t5-tiny")
    parser.add_argument("--text", type=Path, default=DOCS / "architecture.md", help="to train on, as bytes")
    parser.add_argument("--validation-text", type=Path, default=DOCS.parent / "README.md")
    parser.add_argument("--seq", type=int, default=32, help="tokens of source and of target")
    parser.add_argument("--batch", type=int, default=4, help="samples a rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="an epoch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.85, help="of the learning rate, an epoch")
    parser.add_argument("--activation-checkpointing", default="none", help="none, full, every-K or op")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def fit(options: argparse.Namespace, device: torch.device) -> None:
    """Build, shard, train and validate; rank 0 tells each epoch's losses."""
    fsdp = importlib.import_module(options.fsdp)
    workload = get_workload(options.model)
    torch.manual_seed(options.seed)
    model = shard(workload.build(options.activation_checkpointing, options.seq), fsdp, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    training = data(workload, options.text, device, options)
    validation = data(workload, options.validation_text, device, options)
    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        loss = train(model, optimizer, training, options.steps)
        seconds = time.perf_counter() - started
        unseen = validate(model, validation, 2)
        scheduler.step()
        if dist.get_rank() == 0:
            rate = dist.get_world_size() * options.batch * options.steps / seconds
            print(
                f"epoch {epoch}: loss {loss:.4f}, validation {unseen:.4f}, {rate:.1f} samples/s", flush=True
            )


def main() -> None:
    options = parse()
    device = setup()
    fit(options, device)
    # A sharded model holds its process group, in cycles that only the collector ends; gloo's threads must not
    # outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
