"""Causal language modelling with accelerate alone, as transformers' example without Trainer."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--checkpointing-steps", type=int, default=None)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=1)
set_seed(42)
tokenizer = AutoTokenizer.from_pretrained("llama")
model = AutoModelForCausalLM.from_pretrained("llama")
raw = load_dataset("json", data_files={"train": "texts/train.jsonl"})
with accelerator.main_process_first():
    tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group(rows):
        joined = {name: [token for row in rows[name] for token in row] for name in rows}
        total = len(joined["input_ids"]) // 512 * 512
        parts = {name: [tokens[i : i + 512] for i in range(0, total, 512)] for name, tokens in joined.items()}
        parts["labels"] = parts["input_ids"].copy()
        return parts

    blocks = tokenized.map(group, batched=True)["train"]
loader = DataLoader(blocks, shuffle=True, collate_fn=default_data_collator, batch_size=4)
decayed = [p for n, p in model.named_parameters() if "norm" not in n]
plain = [p for n, p in model.named_parameters() if "norm" in n]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=5e-5
)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=args.steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

done = 0
while done < args.steps:
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        done += 1
        if done % 4 == 0:
            losses = accelerator.gather_for_metrics(loss.detach().repeat(4))
            accelerator.print(f"step {done}: loss {losses.mean().item():.3f}")
        if args.checkpointing_steps and done % args.checkpointing_steps == 0:
            accelerator.save_state(f"saved/step_{done}")
        if done >= args.steps:
            break
accelerator.end_training()
