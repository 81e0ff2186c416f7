"""A vision transformer of transformers under Trainer with FSDP1, on random pictures."""

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return {"pixel_values": torch.randn(3, 224, 224), "labels": index % 1000}


model = ViTForImageClassification(ViTConfig(num_labels=1000))
arguments = TrainingArguments(
    output_dir="vit-trained",
    per_device_train_batch_size=16,
    max_steps=12,
    bf16=True,
    remove_unused_columns=False,
    logging_steps=3,
    report_to=[],
    save_strategy="no",
    dataloader_num_workers=2,
    fsdp=True,
    fsdp_config={"version": 1, "transformer_layer_cls_to_wrap": ["ViTLayer"]},
)
Trainer(model, arguments, train_dataset=Pictures()).train()
