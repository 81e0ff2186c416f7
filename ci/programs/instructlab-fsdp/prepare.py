"""Make `data.jsonl`: rows of token numbers and labels, as InstructLab's own preparation writes them."""

import json
import random
from pathlib import Path

random.seed(0)
rows = []
for _ in range(512):
    length = random.randint(64, 256)
    tokens = random.choices(range(5, 1000), k=length)
    labels = [-100] * 8 + tokens[8:]
    rows.append({"input_ids": tokens, "labels": labels, "len": length, "num_loss_counted_tokens": length - 8})
Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
