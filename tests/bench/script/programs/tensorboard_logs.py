"""Loggers of rank 0: the logging module, a CSV, a JSON-lines file, tqdm with postfix, a table of parameters."""

import csv
import json
import logging
import sys
import time

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

dist.init_process_group("nccl")
rank = dist.get_rank()
logging.basicConfig(
    level=logging.INFO if rank == 0 else logging.ERROR, stream=sys.stdout, force=True,
    format=f"%(asctime)s [{rank}] %(message)s",
)  # fmt: skip
log = logging.getLogger("train")
model = fully_shard(GPT().cuda())
log.info(
    "%s parameters on %s", f"{sum(p.numel() for p in model.parameters()):,}", torch.cuda.get_device_name()
)
optimizer = torch.optim.AdamW(model.parameters())
lines = open("log.jsonl", "w") if rank == 0 else None
table = csv.DictWriter(open("log.csv", "w", newline=""), ["step", "loss", "norm"])
table.writeheader()
bar, running, began = tqdm(range(8), disable=rank != 0), 0.0, time.perf_counter()
for step in bar:
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    loss = model(tokens, tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    running = 0.9 * running + 0.1 * shown.item()
    row = {"step": step, "loss": round(running, 4), "norm": float(norm)}
    if lines:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
        table.writerow(row)
        bar.set_postfix(loss=f"{running:.3f}", norm=f"{row['norm']:.2f}")
    if step % 4 == 0:
        rate = (step + 1) * LENGTH * 2 * dist.get_world_size() / max(1e-9, time.perf_counter() - began)
        log.info("step %d %s tokens/s %.0f", step, row, rate)
