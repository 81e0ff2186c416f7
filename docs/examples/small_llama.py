"""A Llama of 1.1 B parameters (TinyLlama's shape), for the examples with Hugging Face's models."""

from __future__ import annotations

from transformers import LlamaConfig

SHAPE = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    use_cache=False,
)
