"""Fine-tune a latent diffusion model by text, as diffusers' `train_text_to_image`: frozen encoders, a UNet
under DDP by accelerate, gradients of two batches, an average of the weights, weighted losses."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from transformers import CLIPTextConfig, CLIPTextModel

accelerator = Accelerator(
    gradient_accumulation_steps=2, mixed_precision="bf16", project_config=ProjectConfiguration("out")
)
set_seed(0, device_specific=True)
noise_schedule = DDPMScheduler(num_train_timesteps=1000)
text = CLIPTextModel(
    CLIPTextConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
)
autoencoder = AutoencoderKL(
    block_out_channels=(64, 128, 128), down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=4,
)  # fmt: skip
unet = UNet2DConditionModel(
    sample_size=64, block_out_channels=(128, 256, 512), cross_attention_dim=256, layers_per_block=2,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
)  # fmt: skip
autoencoder.requires_grad_(False)
text.requires_grad_(False)
unet.train()
unet.enable_gradient_checkpointing()
average = EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=1e-2)
rows = [{"pixels": torch.rand(3, 256, 256) * 2 - 1, "ids": torch.randint(0, 999, (77,))} for _ in range(64)]
loader = torch.utils.data.DataLoader(rows * 16, batch_size=4, shuffle=True, num_workers=1)
schedule = get_scheduler(
    "constant_with_warmup", optimizer=optimizer, num_warmup_steps=4, num_training_steps=12
)
unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
average.to(accelerator.device)
text.to(accelerator.device, dtype=torch.bfloat16)
autoencoder.to(accelerator.device, dtype=torch.bfloat16)

steps, seen = 0, 0.0
for batch in loader:
    with accelerator.accumulate(unet):
        latents = autoencoder.encode(batch["pixels"].to(torch.bfloat16)).latent_dist.sample() * 0.18
        noise = torch.randn_like(latents)
        noise += 0.1 * torch.randn((latents.shape[0], latents.shape[1], 1, 1), device=latents.device)
        times = torch.randint(0, 1000, (latents.shape[0],), device=latents.device).long()
        noisy = noise_schedule.add_noise(latents, noise, times)
        states = text(batch["ids"], return_dict=False)[0]
        found = unet(noisy, times, states, return_dict=False)[0]
        ratio = compute_snr(noise_schedule, times)
        weights = torch.stack([ratio, 5.0 * torch.ones_like(times)], dim=1).min(dim=1)[0] / ratio
        losses = F.mse_loss(found.float(), noise.float(), reduction="none")
        loss = (losses.mean(dim=list(range(1, len(losses.shape)))) * weights).mean()
        seen += accelerator.gather(loss.repeat(4)).mean().item() / 2
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.step(unet.parameters())
        steps += 1
        accelerator.log({"train_loss": seen}, step=steps)
        seen = 0.0
        if steps % 5 == 0 and accelerator.is_main_process:
            accelerator.save_state(f"out/checkpoint-{steps}")
    if steps == 12:
        break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    unet = accelerator.unwrap_model(unet)
    average.copy_to(unet.parameters())
    unet.save_pretrained("out/unet")
accelerator.end_training()
