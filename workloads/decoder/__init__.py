"""Decoder-only transformers of the kinds that people fine-tune: Llama, Qwen, Mistral, Gemma, Phi, Mixtral,
GPT-OSS. One model whose shape says which of their parts it has; `hf_config` makes shapes of their
configuration files."""

from fsdpbench.workloads.decoder.shape import FAMILY, DecoderShape
from fsdpbench.workloads.decoder.workload import DecoderWorkload
