"""A Llama under Hugging Face's Trainer with FSDP: on GPUs, or by `fsdpbench run --script` without them.

fsdpbench run --script docs/examples/train_transformers.py --gpus 8
"""

from __future__ import annotations

import torch
from small_llama import SHAPE
from transformers import LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, SHAPE.vocab_size, (2048,))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    arguments = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=4,
        max_steps=12,
        bf16=True,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    Trainer(LlamaForCausalLM(SHAPE), arguments, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()
