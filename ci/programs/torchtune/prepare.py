"""Make torchtune's tokenizer, text and random weights of a small Llama 3.2 in the current folder."""

import json
import random

import sentencepiece
import torch
from torchtune.models.llama3_2 import llama3_2

random.seed(0)
words = [f"word{number}" for number in range(1000)]
with open("text.jsonl", "w") as lines, open("text.txt", "w") as plain:
    for _ in range(400):
        text = " ".join(random.choices(words, k=600))
        lines.write(json.dumps({"text": text}) + "\n")
        plain.write(text + "\n")
sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="tokenizer", vocab_size=1000, hard_vocab_limit=False
)
SIZES = {
    "vocab_size": 32000, "num_layers": 8, "num_heads": 16, "num_kv_heads": 4, "embed_dim": 1024,
    "max_seq_len": 2048, "intermediate_dim": 4096,
}  # fmt: skip
torch.save(llama3_2(**SIZES).to(torch.bfloat16).state_dict(), "model.pt")
