"""Decoder-only transformers that people fine-tune: Llama, Qwen, Mistral, Gemma, Phi, Mixtral, GPT-OSS.

One model, whose shape selects its parts; `hf_config` makes shapes from configuration files."""

from fsdpbench.workloads.decoder.shape import FAMILY, DecoderShape
from fsdpbench.workloads.decoder.workload import DecoderWorkload
