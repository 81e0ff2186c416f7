"""torchtune's builders: a Llama with LoRA, FSDP2 by its utilities, its schedule, its chunked loss."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtune.models.llama3 import lora_llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

dist.init_process_group("cuda:nccl,cpu:gloo")
model = lora_llama3(
    lora_attn_modules=["q_proj", "v_proj"], vocab_size=512, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=128,
    max_seq_len=128, lora_rank=8, lora_alpha=16,
).cuda()  # fmt: skip
set_trainable_params(model, get_adapter_params(model))
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
loss_of = CEWithChunkedOutputLoss()
model.set_num_output_chunks(loss_of.num_output_chunks)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4, fused=True)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=100)
for _ in range(8):
    tokens = torch.randint(0, 512, (2, 128), device="cuda")
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
