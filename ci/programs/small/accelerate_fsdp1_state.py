"""accelerate with FSDP1: save_state and load_state of model, optimizer, schedule and random states."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    state_dict_type="FULL_STATE_DICT", use_orig_params=True,
)  # fmt: skip
accelerator = Accelerator(
    mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin,
    project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2),
)  # fmt: skip
set_seed(1)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(TensorDataset(torch.randint(0, 512, (256, 64))), batch_size=2, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for step, (ids,) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if step == 5:
        accelerator.save_state()
        accelerator.wait_for_everyone()
        accelerator.load_state("project/checkpoints/checkpoint_0")
    accelerator.log({"loss": accelerator.gather_for_metrics(loss.detach()).mean().item()}, step=step)
accelerator.end_training()
