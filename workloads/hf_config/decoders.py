"""Decoder-only transformers by `model_type`: what each one's published code makes of its keys."""

from __future__ import annotations

from typing import Any

from fsdpbench.workloads.hf_config.keys import Keys, shortest_period
from fsdpbench.workloads.hf_config.parts import (
    ACTIVATIONS,
    common_shape,
    layer_pattern,
    longrope_shape,
    read_rope,
    rope_shape,
)

Values = dict[str, Any]

_LLAMA: Values = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL: Values = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN: Values = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GEMMA: Values = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2: Values = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_PHI: Values = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_new",
}
_PHI3: Values = {
    **_PHI,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
_QWEN3_MOE: Values = {
    **_QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
}
_QWEN2_MOE: Values = {
    **_QWEN,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_GPT_OSS: Values = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_GPT_OSS_ROPE: Values = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def llama(keys: Keys) -> Values:
    """Llama 1 to 3.3."""
    return {
        **common_shape(keys, _LLAMA),
        **rope_shape(keys, 10000.0),
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def mistral(keys: Keys) -> Values:
    """Mistral 7B and its successors of text: all layers slide, or none."""
    keys.must_be("attention_bias", False, None)
    shape = {**common_shape(keys, _MISTRAL), **rope_shape(keys, 10000.0)}
    return {**shape, **_all_slide(keys, shape["layers"], 4096)}


def _all_slide(keys: Keys, layers: int, missing: int) -> Values:
    window = keys.whole("sliding_window", missing, null=0)
    return layer_pattern(keys, layers, window, lambda layer: True)


def qwen2(keys: Keys) -> Values:
    """Qwen 2 and 2.5: biases of queries, keys and values."""
    keys.must_be("attention_bias", False, None)
    shape = {**common_shape(keys, _QWEN), **rope_shape(keys, 10000.0), "qkv_bias": True}
    return {**shape, **_upper_slide(keys, shape["layers"])}


def qwen3(keys: Keys) -> Values:
    """Qwen 3: norms of queries and keys."""
    shape = {**common_shape(keys, {**_QWEN, "head_dim": 128}), **rope_shape(keys, 10000.0), "qk_norm": True}
    return {**shape, **_upper_slide(keys, shape["layers"])}


def _upper_slide(keys: Keys, layers: int) -> Values:
    """Qwen: from a layer on, and only where it is switched on."""
    window = keys.whole("sliding_window", 4096, null=0)
    first = keys.whole("max_window_layers", 28)
    on = keys.flag("use_sliding_window", False)
    return layer_pattern(keys, layers, window if on else None, lambda layer: layer >= first)


def gemma(keys: Keys) -> Values:
    """Gemma 1."""
    return {
        **common_shape(keys, _GEMMA),
        **rope_shape(keys, 10000.0),
        **_of_all_gemmas(keys),
    }


def _of_all_gemmas(keys: Keys) -> Values:
    missing = keys.raw("hidden_act") or "gelu_pytorch_tanh"
    return {
        "norm": "rms-offset",
        "embedding_scale": True,
        "activation": keys.word("hidden_activation", str(missing), ACTIVATIONS),
    }


def gemma2(keys: Keys) -> Values:
    """Gemma 2: soft caps, every second layer slides, norms before and after."""
    shape = {
        **common_shape(keys, _GEMMA2),
        **rope_shape(keys, 10000.0),
        **_of_later_gemmas(keys, score_cap=50.0, logit_cap=30.0),
    }
    keys.ignore("sliding_window_size")  # published files say it twice; the code reads sliding_window
    window = keys.whole("sliding_window", 4096, null=0)
    return {**shape, **layer_pattern(keys, shape["layers"], window, lambda layer: layer % 2 == 0)}


def gemma3(keys: Keys) -> Values:
    """Gemma 3's text model: five of six layers slide, with rotary positions of their own."""
    shape = {
        **common_shape(keys, {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072}),
        **_gemma3_rope(keys),
        **_of_later_gemmas(keys, score_cap=0.0, logit_cap=0.0),
        "qk_norm": True,
    }
    window = keys.whole("sliding_window", 4096, null=0)
    period = keys.whole("_sliding_window_pattern", keys.whole("sliding_window_pattern", 6)) or 1
    return {**shape, **layer_pattern(keys, shape["layers"], window, lambda layer: (layer + 1) % period != 0)}


def _of_later_gemmas(keys: Keys, *, score_cap: float, logit_cap: float) -> Values:
    keys.must_be("use_bidirectional_attention", None, False)
    cap = keys.number("attn_logit_softcapping", score_cap, null=0.0)
    return {
        **_of_all_gemmas(keys),
        "post_norms": True,
        "query_scale": keys.number("query_pre_attn_scalar", 256.0),
        "score_cap": cap,
        "logit_cap": keys.number("final_logit_softcapping", logit_cap, null=0.0),
        "attention": "explicit" if cap else "fused",
    }


def _gemma3_rope(keys: Keys) -> Values:
    """Full layers may be scaled; sliding ones have a theta of their own and no scaling."""
    by_layer = keys.table("rope_parameters") or {}
    local_theta = keys.number("rope_local_base_freq", 10000.0)
    if "full_attention" not in by_layer:
        return {**rope_shape(keys, 1e6), "local_theta": local_theta}
    theta = keys.number("rope_theta", 1e6)
    full, sliding = (
        dict(keys.as_table(f"rope_parameters.{kind}", by_layer.get(kind)))
        for kind in ("full_attention", "sliding_attention")
    )
    theta = keys.as_number("rope_theta", full.pop("rope_theta", None), theta)
    local_theta = keys.as_number("rope_theta", sliding.pop("rope_theta", None), local_theta)
    if read_rope(keys, sliding).kind != "default":
        raise keys.refusal("rope_parameters of sliding_attention", sliding)
    return {"rope_theta": theta, "rope": str(read_rope(keys, full)), "local_theta": local_theta}


def phi(keys: Keys) -> Values:
    """Phi 1, 1.5 and 2: LayerNorm, biases everywhere, attention and feed-forward side by side."""
    keys.must_be("qk_layernorm", False, None)
    return {
        **common_shape(keys, _PHI),
        **rope_shape(keys, 10000.0, partial=0.5),
        **_dropouts(keys),
        "norm": "layer",
        "norm_eps": keys.number("layer_norm_eps", 1e-5),
        "parallel": True,
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    }


def phi3(keys: Keys) -> Values:
    """Phi 3 and 4: fused projections."""
    keys.must_be("attention_bias", False, None)
    keys.ignore("original_max_position_embeddings")  # of longrope alone
    keys.must_be("full_attn_mod", 1, None)
    keys.must_be("interpolate_factor", 1, None)
    shape = {
        **common_shape(keys, _PHI3),
        **longrope_shape(keys),
        **_dropouts(keys),
        "fused_projections": True,
    }
    return {**shape, **_all_slide(keys, shape["layers"], 0)}


def _dropouts(keys: Keys) -> Values:
    return {
        "embedding_dropout": keys.number("embd_pdrop", 0.0),
        "residual_dropout": keys.number("resid_pdrop", 0.0),
    }


def mixtral(keys: Keys) -> Values:
    """Mixtral: every layer a mixture."""
    keys.must_be("attention_bias", False, None)
    keys.must_be("router_jitter_noise", 0.0, None)
    shape = {
        **common_shape(keys, {**_MISTRAL, "rms_norm_eps": 1e-5}),
        **rope_shape(keys, 1e6),
        **_mixture(keys, keys.whole("num_local_experts", 8), 2),
        "moe_pattern": "M",
    }
    return {**shape, "expert_d_ff": shape["d_ff"], **_all_slide(keys, shape["layers"], 0)}


def _mixture(keys: Keys, experts: int, chosen: int) -> Values:
    keys.must_be("output_router_logits", False, None)
    return {"experts": experts, "experts_per_token": keys.whole("num_experts_per_tok", chosen)}


def qwen2_moe(keys: Keys) -> Values:
    """Qwen 1.5's and 2's mixtures: small experts beside a shared one, which a sigmoid weighs."""
    shared = keys.whole("shared_expert_intermediate_size", 5632)
    shape = {
        **common_shape(keys, _QWEN2_MOE),
        **rope_shape(keys, 10000.0),
        **_small_experts(keys, keys.whole("num_experts", 60), 4, 1408),
        "qkv_bias": keys.flag("qkv_bias", True),
        "output_bias": False,
        "shared_d_ff": shared,
        "shared_gate": shared > 0,
    }
    keys.must_be("attention_bias", False, None)
    shape |= {"moe_pattern": _sparse_layers(keys, shape["layers"], shape["experts"])}
    return {**shape, **_upper_slide(keys, shape["layers"])}


def _small_experts(keys: Keys, experts: int, chosen: int, width: int) -> Values:
    return {
        **_mixture(keys, experts, chosen),
        "expert_d_ff": keys.whole("moe_intermediate_size", width),
        "renormalised": keys.flag("norm_topk_prob", False),
    }


def _sparse_layers(keys: Keys, layers: int, experts: int) -> str:
    """Every `decoder_sparse_step`-th layer is a mixture, except those that are listed."""
    step, dense = keys.whole("decoder_sparse_step", 1) or 1, keys.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise keys.misfit("mlp_only_layers", dense, "a list of layers")
    return shortest_period(
        "M" if experts and layer not in dense and (layer + 1) % step == 0 else "D" for layer in range(layers)
    )


def qwen3_moe(keys: Keys) -> Values:
    """Qwen 3's mixtures: many small experts, some layers dense where the file says so."""
    experts = keys.whole("num_experts", keys.whole("num_local_experts", 128))
    again = keys.whole("num_local_experts", experts)
    if again != experts:
        raise keys.misfit("num_local_experts", again, f"what num_experts is, {experts}")
    shape = {
        **common_shape(keys, _QWEN3_MOE),
        **rope_shape(keys, 10000.0),
        **_small_experts(keys, experts, 8, 768),
        "qk_norm": True,
    }
    keys.ignore("max_window_layers")
    window = keys.whole("sliding_window", 4096, null=0)
    on = keys.flag("use_sliding_window", False)
    sliding = layer_pattern(keys, shape["layers"], window if on else None, lambda layer: True)
    return {**shape, **sliding, "moe_pattern": _sparse_layers(keys, shape["layers"], experts)}


def gpt_oss(keys: Keys) -> Values:
    """GPT-OSS: every layer a mixture with biases, sinks, every second layer slides."""
    keys.must_be("swiglu_limit", 7.0, 7, None)
    keys.must_be("swiglu_alpha", 1.702, None)
    keys.ignore("initial_context_length", "experts_per_token")  # said again by keys that are read
    _check_quantization(keys)
    shape = {
        **common_shape(keys, _GPT_OSS),
        **rope_shape(keys, 150000.0, _GPT_OSS_ROPE),
        **_mixture(keys, keys.whole("num_local_experts", 128), 4),
        "moe_pattern": "M",
        "router_bias": True,
        "expert_bias": True,
        "clamped": True,
        "sinks": True,
        "attention": "explicit",
    }
    bias = keys.flag("attention_bias", True)
    shape |= {"expert_d_ff": shape["d_ff"], "qkv_bias": bias, "output_bias": bias}
    window = keys.whole("sliding_window", 128, null=0)
    return {**shape, **layer_pattern(keys, shape["layers"], window, lambda layer: layer % 2 == 0)}


def _check_quantization(keys: Keys) -> None:
    """The published checkpoint is MXFP4, and is trained after it was expanded to bf16: the same model."""
    table = keys.table("quantization_config")
    if table is not None and table.get("quant_method") != "mxfp4":
        raise keys.refusal("quantization_config", table)
