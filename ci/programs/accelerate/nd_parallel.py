"""FSDP2 in a mesh of replicas and shards with accelerate's `ParallelismConfig`, as its guide shows."""

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM

config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    reshard_after_forward=True,
)
accelerator = Accelerator(mixed_precision="bf16", parallelism_config=config, fsdp_plugin=plugin)
model = AutoModelForCausalLM.from_pretrained("llama", use_cache=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(12):
    tokens = torch.randint(0, 1000, (2, 512), device=accelerator.device)
    loss = model(tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(step, loss.item())
