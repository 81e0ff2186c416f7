"""transformers' Trainer with FSDP2, gradient checkpointing, flattened (packed) rows, evaluation, saves, a resume."""

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip


class Note(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            print(state.global_step, sorted(logs))


def rows(count):
    lengths = [20 + 7 * (i % 5) for i in range(count)]
    return Dataset.from_list([{"input_ids": torch.randint(0, 512, (n,)).tolist()} for n in lengths])


config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, max_steps=10, logging_steps=2, save_steps=5, eval_steps=5,
    eval_strategy="steps", bf16=True, gradient_checkpointing=True, report_to="none", save_total_limit=1,
    gradient_checkpointing_kwargs={"use_reentrant": False}, fsdp="full_shard auto_wrap",
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    optim="adamw_torch_fused", lr_scheduler_type="cosine", warmup_steps=2, dataloader_num_workers=1,
)  # fmt: skip
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config), args=arguments, train_dataset=rows(256), eval_dataset=rows(32),
    data_collator=DataCollatorWithFlattening(), callbacks=[Note()],
)  # fmt: skip
trainer.train()
trainer.save_model("final")
print(sorted(trainer.evaluate()))
