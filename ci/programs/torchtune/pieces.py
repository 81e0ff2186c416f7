"""Make `pieces.model`, a tokenizer of the words of `text.txt`, and `chats.jsonl`, preferences."""

import json
from pathlib import Path

import sentencepiece

sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="pieces", vocab_size=48, bos_id=1, eos_id=2, pad_id=3, unk_id=0
)
with open("chats.jsonl", "w") as chats:
    for pair in map(json.loads, Path("pairs/train.jsonl").read_text().splitlines()):
        asked = {"role": "user", "content": pair["prompt"]}
        sides = {
            name: [asked, {"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")
        }
        chats.write(json.dumps(sides) + "\n")
