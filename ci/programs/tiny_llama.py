"""Make `llama`, a small Llama with random weights as `save_pretrained` leaves it, with the tokenizer."""

import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=3,
)  # fmt: skip
LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained("llama")
shutil.copytree("tokenizer", "llama", dirs_exist_ok=True)
