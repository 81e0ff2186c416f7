"""transformers' Trainer with FSDP1 that saves its optimizer's states, best model at the end."""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
ids = [torch.randint(0, 512, (64,)).tolist() for _ in range(256)]
data = Dataset.from_dict({"input_ids": ids, "labels": ids})
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, max_steps=9, logging_steps=3, save_steps=3, bf16=True,
    eval_strategy="steps", eval_steps=3, load_best_model_at_end=False, report_to="none", save_total_limit=2,
    fsdp="full_shard auto_wrap",
    fsdp_config={
        "fsdp_version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "use_orig_params": True,
        "state_dict_type": "FULL_STATE_DICT", "backward_prefetch": "backward_pre",
    },
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    eval_dataset=data.select(range(32)),
    data_collator=default_data_collator,
)
trainer.train()
