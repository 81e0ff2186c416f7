"""A diffusion transformer of diffusers, trained on noise with accelerate and FSDP2, as its training guide shows."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from diffusers import DDPMScheduler, DiTTransformer2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader, TensorDataset

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["BasicTransformerBlock"],
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, num_layers=12, sample_size=32)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
data = TensorDataset(torch.randn(800, 4, 32, 32), torch.randint(0, 1000, (800,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for step, (latents, classes) in enumerate(loader):
    noise = torch.randn(latents.shape, device=latents.device)
    times = torch.randint(0, 1000, (latents.shape[0],), device=latents.device, dtype=torch.int64)
    noisy = noise_scheduler.add_noise(latents, noise, times)
    with accelerator.accumulate(model):
        predicted = model(noisy, times, classes, return_dict=False)[0][:, :4]
        loss = F.mse_loss(predicted.float(), noise)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(step, loss.detach().item())
    if step == 11:
        break
