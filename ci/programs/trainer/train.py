"""A causal language model of a local checkpoint under transformers' Trainer with FSDP."""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp-version", type=int, default=2)
given = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained("llama")
model = AutoModelForCausalLM.from_pretrained("llama")
data = load_dataset("json", data_files="texts/train.jsonl", split="train")
data = data.map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=512),
    batched=True,
    remove_columns=["text"],
)
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=4,
    max_steps=12,
    bf16=True,
    logging_steps=2,
    report_to=[],
    fsdp=True,
    fsdp_config={"version": given.fsdp_version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model, arguments, train_dataset=data, data_collator=collator).train()
