"""A language model by transformers' Trainer in the steps of its example `run_clm`: its parser, texts in
blocks, evaluation with a metric, the model, its states and its card saved."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

BLOCK = 256


@dataclass
class DataArguments:
    """The model and the texts."""

    model_name_or_path: str = "llama"
    train_file: str = "text.txt"
    preprocessing_num_workers: int = 2


def in_blocks(examples: Any) -> dict[str, list[list[int]]]:
    """Join all texts and cut them into blocks."""
    joined = {name: list(chain(*examples[name])) for name in examples}
    total = len(joined["input_ids"]) // BLOCK * BLOCK
    rows = {
        name: [ids[first : first + BLOCK] for first in range(0, total, BLOCK)] for name, ids in joined.items()
    }
    return {**rows, "labels": rows["input_ids"].copy()}


def accuracy(prediction: Any) -> dict[str, float]:
    """Compare each prediction with the next token."""
    predicted, labels = prediction
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


given, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(training.seed)
texts = load_dataset("text", data_files={"train": given.train_file})
texts["validation"] = load_dataset("text", data_files={"train": given.train_file}, split="train[:5%]")
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.model_name_or_path))
workers = given.preprocessing_num_workers
with training.main_process_first(desc="tokens"):
    tokens = texts.map(
        lambda rows: tokenizer(rows["text"]), batched=True, num_proc=workers, remove_columns=["text"]
    )
with training.main_process_first(desc="blocks"):
    blocks = tokens.map(in_blocks, batched=True, num_proc=workers)
trainer = Trainer(
    model=model, args=training, train_dataset=blocks["train"], eval_dataset=blocks["validation"],
    processing_class=tokenizer, data_collator=default_data_collator, compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
)  # fmt: skip
trained = trainer.train()
trainer.save_model()
trainer.save_metrics("train", trained.metrics)
trainer.save_state()
found = trainer.evaluate()
found["perplexity"] = math.exp(found["eval_loss"])
trainer.log_metrics("eval", found)
trainer.create_model_card()
