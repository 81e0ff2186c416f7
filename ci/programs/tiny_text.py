"""Make `texts/train.jsonl`, `pairs/train.jsonl` (preferences), `text.txt` and a tokenizer of 1,000 words."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"word{number}" for number in range(1000)]
MARKS = ["<unk>", "<s>", "</s>", "<pad>"]
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)

random.seed(0)
tokenizer = Tokenizer(
    models.WordLevel({word: number for number, word in enumerate(MARKS + WORDS)}, unk_token="<unk>")
)
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(MARKS)
Path("tokenizer").mkdir(exist_ok=True)
tokenizer.save("tokenizer/tokenizer.json")
Path("tokenizer/tokenizer_config.json").write_text(
    json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT, "model_max_length": 2048,
        }
    )
)  # fmt: skip
for folder in ("texts", "pairs"):
    Path(folder).mkdir(exist_ok=True)
with (
    open("texts/train.jsonl", "w") as lines,
    open("text.txt", "w") as plain,
    open("pairs/train.jsonl", "w") as pairs,
):
    for _ in range(400):
        text = " ".join(random.choices(WORDS, k=300))
        lines.write(json.dumps({"text": text}) + "\n")
        plain.write(text + "\n")
        prompt, good, bad = (" ".join(random.choices(WORDS, k=n)) for n in (40, 120, 110))
        pairs.write(json.dumps({"prompt": prompt, "chosen": good, "rejected": bad}) + "\n")
