"""A transformers model without its Trainer: meta init, gradient checkpointing, fully_shard, whole weights saved."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

dist.init_process_group("cuda:nccl,cpu:gloo")
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
options = {
    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "offload_policy": CPUOffloadPolicy(),
}
for layer in model.model.layers:
    fully_shard(layer, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 100)
model.train()
for step in range(8):
    ids = torch.randint(0, 512, (2, 128))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, 100:] = 0
    batch = {name: value.cuda() for name, value in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=whole)
if dist.get_rank() == 0:
    model.save_pretrained("trained", state_dict=state, safe_serialization=True)
    config.save_pretrained("trained")
