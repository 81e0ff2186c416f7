"""Make `rows.json`, instructions of the words of `tiny_text.py`, and the file that names it."""

import json
import random
from pathlib import Path

words = [f"word{number}" for number in range(1000)]
rows = [
    {
        "instruction": " ".join(random.choices(words, k=30)),
        "input": "",
        "output": " ".join(random.choices(words, k=90)),
    }
    for _ in range(400)
]
Path("rows.json").write_text(json.dumps(rows))
Path("dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
