"""LoRA with PEFT in Trainer with FSDP2, as PEFT's guide on FSDP shows."""

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("llama")
model = AutoModelForCausalLM.from_pretrained("llama")
lora = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear"
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()
data = load_dataset("json", data_files="texts/train.jsonl", split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns=["text"])
arguments = TrainingArguments(
    output_dir="adapter",
    per_device_train_batch_size=4,
    max_steps=10,
    learning_rate=1e-4,
    bf16=True,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model, arguments, train_dataset=data, data_collator=collator).train()
model.save_pretrained("adapter")
