"""Make `messages.jsonl` and `messages.parquet`: conversations of one question and one answer."""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

random.seed(0)
words = [f"word{number}" for number in range(1000)]
rows = [
    {
        "messages": [
            {"role": "user", "content": " ".join(random.choices(words, k=40))},
            {"role": "assistant", "content": " ".join(random.choices(words, k=120))},
        ]
    }
    for _ in range(400)
]
Path("messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "messages.parquet")
