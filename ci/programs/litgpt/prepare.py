"""Make a checkpoint of litgpt with random weights, a tokenizer, and instructions as JSON."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from litgpt import GPT, Config
from tokenizers import Tokenizer, models, pre_tokenizers

words = [f"word{number}" for number in range(1000)]
marks = ["<unk>", "<s>", "</s>"]
tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(marks + words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
folder = Path("checkpoint")
folder.mkdir(exist_ok=True)
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(
    json.dumps(
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "tokenizer_class": "GPTNeoXTokenizer",
        }
    )
)
config = Config.from_name("pythia-160m", n_layer=6)
torch.manual_seed(0)
torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
(folder / "model_config.yaml").write_text(yaml.dump(asdict(config)))
rows = [
    {
        "instruction": " ".join(random.choices(words, k=30)),
        "input": "",
        "output": " ".join(random.choices(words, k=60)),
    }
    for _ in range(400)
]
Path("rows.json").write_text(json.dumps(rows))
