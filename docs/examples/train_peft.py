"""A Llama with LoRA of `peft`, sharded by FSDP: on GPUs, or by `fsdpbench run --script` without them.

fsdpbench run --script docs/examples/train_peft.py --gpus 8
fsdpbench run --script docs/examples/train_peft.py --gpus 8 -- --fsdp impl2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SHAPE = LlamaConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
    use_cache=False,
)


def shard_parameters(model: nn.Module, package: str) -> nn.Module:
    """FSDP2: frozen bf16 and adapters in fp32 are in one unit as they are."""
    if package == "impl2":
        from fsdpbench.impl import MixedPrecisionPolicy, fully_shard
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]:
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def shard_flat(model: nn.Module, package: str) -> nn.Module:
    """FSDP1: a flat parameter has one dtype, so that all of it is fp32 and cast when it is gathered."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if package == "impl1":
        from fsdpbench.impl import FullyShardedDataParallel, MixedPrecision
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    return FullyShardedDataParallel(
        model.float(),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", choices=("torch2", "impl2", "torch1", "impl1"), default="torch2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = get_peft_model(
        LlamaForCausalLM(SHAPE).to(torch.bfloat16), LoraConfig(r=asked.rank, target_modules="all-linear")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.print_trainable_parameters()
    shard = shard_flat if asked.fsdp.endswith("1") else shard_parameters
    model = shard(model.to("cuda"), asked.fsdp)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    for _ in range(asked.steps):
        tokens = torch.randint(SHAPE.vocab_size, (2, 512), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
