"""Named sizes: shapes as published in the models' configuration files (parameters in `docs/models.md`).

`max_seq`, where no length is asked for, is 4,096: what such models are usually trained at, not the longest
context that they take.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdpbench.workloads.decoder.shape import DecoderShape

_QWEN3 = {
    "kv_heads": 8,
    "head_width": 128,
    "vocab": 151936,
    "qk_norm": True,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
}

SIZES: Mapping[str, DecoderShape] = {
    "decoder-tiny": DecoderShape(4, 128, 384, 4, 2, 512, max_seq=128),
    "moe-tiny": DecoderShape(
        4, 64, 128, 4, 2, 512, max_seq=128, experts=4, expert_d_ff=96, experts_per_token=2, moe_pattern="M"
    ),
    "mistral-7b": DecoderShape(32, 4096, 14336, 32, 8, 32000, window=4096, layer_pattern="S"),
    "qwen3-8b": DecoderShape(36, 4096, 12288, 32, **_QWEN3),  # type: ignore[arg-type]
    "qwen3-32b": DecoderShape(64, 5120, 25600, 64, **_QWEN3),  # type: ignore[arg-type]
    "gemma3-27b": DecoderShape(
        62,
        5376,
        21504,
        32,
        16,
        262208,
        head_width=128,
        tied=True,
        query_scale=168.0,
        qk_norm=True,
        window=1024,
        layer_pattern="SSSSSF",
        rope_theta=1e6,
        local_theta=1e4,
        norm="rms-offset",
        norm_eps=1e-6,
        post_norms=True,
        activation="gelu-tanh",
        embedding_scale=True,
    ),
    "mixtral-8x7b": DecoderShape(
        32,
        4096,
        14336,
        32,
        8,
        32000,
        rope_theta=1e6,
        experts=8,
        expert_d_ff=14336,
        experts_per_token=2,
        moe_pattern="M",
    ),
    "qwen3-30b-a3b": DecoderShape(
        48,
        2048,
        6144,
        32,
        4,
        151936,
        head_width=128,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        experts=128,
        expert_d_ff=768,
        experts_per_token=8,
        moe_pattern="M",
    ),
    "gpt-oss-20b": DecoderShape(
        24,
        2880,
        2880,
        64,
        8,
        201088,
        head_width=64,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        attention="explicit",
        window=128,
        layer_pattern="SF",
        rope_theta=150000.0,
        rope="yarn:factor=32;original=4096;truncate=0",
        experts=32,
        expert_d_ff=2880,
        experts_per_token=4,
        moe_pattern="M",
        router_bias=True,
        expert_bias=True,
        clamped=True,
    ),
}
