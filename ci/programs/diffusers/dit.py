"""Stable Diffusion 3's transformer of diffusers, trained by rectified flow with accelerate and FSDP2."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from diffusers import SD3Transformer2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader, TensorDataset

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["JointTransformerBlock"],
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = SD3Transformer2DModel(
    sample_size=64, patch_size=2, in_channels=16, num_layers=8, attention_head_dim=64, num_attention_heads=16,
    joint_attention_dim=1024, caption_projection_dim=1024, pooled_projection_dim=512, out_channels=16,
)  # fmt: skip
data = TensorDataset(torch.randn(400, 16, 64, 64), torch.randn(400, 77, 1024), torch.randn(400, 512))
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for step, (latents, words, pooled) in enumerate(loader):
    noise = torch.randn_like(latents)
    sigma = torch.rand(latents.shape[0], 1, 1, 1, device=latents.device)
    noisy = (1 - sigma) * latents + sigma * noise
    with accelerator.accumulate(model):
        predicted = model(noisy, words, pooled, timestep=sigma.flatten() * 1000, return_dict=False)[0]
        loss = F.mse_loss(predicted.float(), (noise - latents).float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(step, loss.detach().item())
    if step == 11:
        break
