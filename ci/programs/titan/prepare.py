"""Make TorchTitan's tokenizer and its dataset `c4_test` in the current folder."""

import json
import random
from pathlib import Path

from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers

words = [f"word{number}" for number in range(1900)]
marks = {"<unknown>": 0, "<s>": 1, "</s>": 2}
vocabulary = marks | {word: number for number, word in enumerate(words, len(marks))}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
for place in ("tokenizer", "tests/assets/c4_test"):
    Path(place).mkdir(parents=True, exist_ok=True)
tokenizer.save("tokenizer/tokenizer.json")
with open("tokenizer/tokenizer_config.json", "w") as file:
    json.dump({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, file)
with open("tests/assets/c4_test/data.json", "w") as file:
    for row in range(400):
        random.Random(row).shuffle(words)
        file.write(json.dumps({"text": " ".join(words)}) + "\n")
load_dataset("tests/assets/c4_test", split="train")  # its cache
