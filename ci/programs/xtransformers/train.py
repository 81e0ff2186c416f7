"""x-transformers' decoder (rotary positions, grouped queries, SwiGLU, flash attention) with `fully_shard`."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from x_transformers import Decoder, TransformerWrapper
from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
decoder = Decoder(
    dim=512, depth=6, heads=8, rotary_pos_emb=True, attn_flash=True, attn_kv_heads=2, ff_glu=True,
    ff_swish=True, use_rmsnorm=True,
)  # fmt: skip
words = TransformerWrapper(num_tokens=8192, max_seq_len=1024, attn_layers=decoder)
model = AutoregressiveWrapper(words).cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for _, block, _ in decoder.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(10):
    loss = model(torch.randint(0, 8192, (8, 1025), device="cuda"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{step}: {loss.item():.3f}")
dist.destroy_process_group()
