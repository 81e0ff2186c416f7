"""Make `bert`, a small BERT with random weights as `save_pretrained` leaves it, with the tokenizer."""

import shutil

from transformers import BertConfig, BertModel

shape = BertConfig(
    vocab_size=1024, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12
)
BertModel(shape).save_pretrained("bert")
shutil.copytree("tokenizer", "bert", dirs_exist_ok=True)
