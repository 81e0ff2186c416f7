"""A Llama of Hugging Face under accelerate's FSDP: on GPUs, or by `fsdpbench run --script` without them.

fsdpbench run --script docs/examples/train_accelerate.py --gpus 8 -- --fsdp-version 2
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small_llama import SHAPE
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    options = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.fsdp_version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True if options.fsdp_version == 2 else "FULL_SHARD",
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = LlamaForCausalLM(SHAPE)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for step in range(10):
        size = (options.batch, options.seq)
        tokens = torch.randint(0, SHAPE.vocab_size, size, device=accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
