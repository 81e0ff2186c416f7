"""Model types of Hugging Face's configuration files: the reader of each one's keys, and the translation.

A reader returns the shape of a family of ours as the published code of the model makes it of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.workloads.decoder.shape import FAMILY as DECODER
from fsdpbench.workloads.families.gpt import FAMILY as GPT
from fsdpbench.workloads.families.t5 import FAMILY as T5
from fsdpbench.workloads.hf_config.keys import (
    ACTIVATIONS,
    Keys,
    common_shape,
    layer_pattern,
    longrope_shape,
    read_rope,
    rope_shape,
    shortest_period,
)
from fsdpbench.workloads.library_model import LIBRARY, has_field, values_of
from fsdpbench.workloads.shape import NotBuiltError, ShapeError

Values = dict[str, Any]

# fmt: off
_LLAMA: Values = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}
_MISTRAL: Values = {
    **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}
_QWEN: Values = {
    **_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GEMMA: Values = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2: Values = {
    **_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}
_PHI: Values = {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "hidden_act": "gelu_new",
}
_PHI3: Values = {
    **_PHI, "vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}
_QWEN3_MOE: Values = {
    **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4,
}
_QWEN2_MOE: Values = {
    **_QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16,
}
_GPT_OSS: Values = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}
_GPT_OSS_ROPE: Values = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
# fmt: on


def llama(keys: Keys) -> Values:
    """Read Llama 1 to 3.3."""
    return {
        **common_shape(keys, _LLAMA),
        **rope_shape(keys, 10000.0),
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def mistral(keys: Keys) -> Values:
    """Read Mistral 7B and its successors of text: all layers slide, or none."""
    keys.must_be("attention_bias", False, None)
    shape = {**common_shape(keys, _MISTRAL), **rope_shape(keys, 10000.0)}
    return {**shape, **_all_slide(keys, shape["layers"], 4096)}


def _all_slide(keys: Keys, layers: int, missing: int) -> Values:
    window = keys.whole("sliding_window", missing, null=0)
    return layer_pattern(keys, layers, window, lambda layer: True)


def qwen2(keys: Keys) -> Values:
    """Read Qwen 2 and 2.5: biases of queries, keys and values."""
    keys.must_be("attention_bias", False, None)
    shape = {**common_shape(keys, _QWEN), **rope_shape(keys, 10000.0), "qkv_bias": True}
    return {**shape, **_upper_slide(keys, shape["layers"])}


def qwen3(keys: Keys) -> Values:
    """Read Qwen 3: norms of queries and keys."""
    shape = {**common_shape(keys, {**_QWEN, "head_dim": 128}), **rope_shape(keys, 10000.0), "qk_norm": True}
    return {**shape, **_upper_slide(keys, shape["layers"])}


def _upper_slide(keys: Keys, layers: int) -> Values:
    """Read the layers that slide in a Qwen: those from a layer on, and only where that is switched on."""
    window = keys.whole("sliding_window", 4096, null=0)
    first = keys.whole("max_window_layers", 28)
    on = keys.flag("use_sliding_window", False)
    return layer_pattern(keys, layers, window if on else None, lambda layer: layer >= first)


def gemma(keys: Keys) -> Values:
    """Read Gemma 1."""
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
    """Read Gemma 2: soft caps, every second layer slides, norms before and after."""
    shape = {
        **common_shape(keys, _GEMMA2),
        **rope_shape(keys, 10000.0),
        **_of_later_gemmas(keys, score_cap=50.0, logit_cap=30.0),
    }
    keys.ignore("sliding_window_size")  # published files say it twice; the code reads sliding_window
    window = keys.whole("sliding_window", 4096, null=0)
    return {**shape, **layer_pattern(keys, shape["layers"], window, lambda layer: layer % 2 == 0)}


def gemma3(keys: Keys) -> Values:
    """Read Gemma 3's text model: five of six layers slide, with rotary positions of their own."""
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
    """Read Gemma 3's rotary positions: full layers may be scaled, sliding ones have a theta of their own."""
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
    """Read Phi 1, 1.5 and 2: LayerNorm, biases everywhere, attention and feed-forward side by side."""
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
    """Read Phi 3 and 4: fused projections."""
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
    """Read Mixtral: every layer a mixture."""
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
    """Read Qwen 1.5's and 2's mixtures: small experts beside a shared one, which a sigmoid weighs."""
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
    """Read the pattern of mixtures: every `decoder_sparse_step`-th layer, except listed ones."""
    step, dense = keys.whole("decoder_sparse_step", 1) or 1, keys.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise keys.misfit("mlp_only_layers", dense, "a list of layers")
    return shortest_period(
        "M" if experts and layer not in dense and (layer + 1) % step == 0 else "D" for layer in range(layers)
    )


def qwen3_moe(keys: Keys) -> Values:
    """Read Qwen 3's mixtures: many small experts, some layers dense where the file says so."""
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
    # Published files of Qwen3-Coder name parts that every model of this type has or lacks.
    keys.must_be("shared_expert_intermediate_size", 0, None)
    keys.must_be("use_qk_norm", True, None)
    window = keys.whole("sliding_window", 4096, null=0)
    on = keys.flag("use_sliding_window", False)
    sliding = layer_pattern(keys, shape["layers"], window if on else None, lambda layer: True)
    return {**shape, **sliding, "moe_pattern": _sparse_layers(keys, shape["layers"], experts)}


def gpt_oss(keys: Keys) -> Values:
    """Read GPT-OSS: every layer a mixture with biases, sinks, every second layer slides."""
    keys.must_be("swiglu_limit", 7.0, 7, None)
    keys.must_be("swiglu_alpha", 1.702, None)
    keys.ignore("initial_context_length", "experts_per_token")  # said again by keys that are read
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


def gpt2(keys: Keys) -> Values:
    """Read GPT-2: learned positions, as many as `n_positions`."""
    d_model, inner = keys.whole("n_embd", 768), keys.whole("n_inner", 0)
    if inner and (not d_model or inner % d_model):
        raise keys.misfit("n_inner", inner, f"null, or a multiple of n_embd, {d_model}")
    drops = {name: keys.number(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for name, value in drops.items():
        if value != drops["resid_pdrop"]:
            raise keys.misfit(name, value, f"what resid_pdrop is, {drops['resid_pdrop']}")
    keys.must_be("layer_norm_epsilon", 1e-5)
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("reorder_and_upcast_attn", False)
    keys.must_be("add_cross_attention", False)
    # Our GPTs compute GELU itself, by one kernel as its approximation by tanh would be.
    keys.must_be("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh")
    # What the predecessor had; and summaries: heads of other tasks.
    keys.ignore("n_ctx", "n_special", "predict_special_tokens", *(f"summary_{name}" for name in _SUMMARY))
    return {
        "layers": keys.whole("n_layer", 12),
        "d_model": d_model,
        "heads": keys.whole("n_head", 12),
        "vocab": keys.whole("vocab_size", 50257),
        "tied": keys.flag("tie_word_embeddings", True),
        "expansion": inner // d_model if inner else 4,
        "max_seq": keys.whole("n_positions", 1024),
        "dropout": drops["resid_pdrop"],
    }


_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
_FEED_FORWARDS = {"relu": "", "gated-gelu": "gated"}


# fmt: off
_T5: Values = {
    "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128, "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}
_MT5: Values = {
    "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 250112, "feed_forward_proj":
    "gated-gelu", "tie_word_embeddings": False,
}
# fmt: on


def t5(keys: Keys) -> Values:
    """Read T5, T5 1.1 and Flan-T5."""
    return _t5(keys, _T5)


def mt5(keys: Keys) -> Values:
    """Read mT5: T5 1.1 with the words of 101 languages."""
    return _t5(keys, _MT5)


def umt5(keys: Keys) -> Values:
    """Read UMT5: mT5 with a position bias in every layer."""
    keys.ignore("scalable_attention")  # the trainer wrote it, and no code reads it
    return {**_t5(keys, _MT5 | {"tie_word_embeddings": True}), "bias_each_layer": True}


def _t5(keys: Keys, defaults: Values) -> Values:
    layers = keys.whole("num_layers", defaults["num_layers"])
    decoder_layers = keys.whole("num_decoder_layers", layers)
    if decoder_layers != layers:
        raise keys.refusal("num_decoder_layers", decoder_layers)
    keys.must_be("is_encoder_decoder", True, None)
    keys.must_be("relative_attention_max_distance", 128)
    keys.must_be("layer_norm_epsilon", 1e-6)
    tied = keys.flag("tie_word_embeddings", defaults["tie_word_embeddings"])
    keys.must_be("scale_decoder_outputs", tied)
    keys.ignore("dense_act_fn", "is_gated_act")  # parts of feed_forward_proj
    return {
        "layers": layers,
        "d_model": keys.whole("d_model", 512),
        "d_ff": keys.whole("d_ff", defaults["d_ff"]),
        "heads": keys.whole("num_heads", defaults["num_heads"]),
        "d_kv": keys.whole("d_kv", 64),
        "vocab": keys.whole("vocab_size", defaults["vocab_size"]),
        "gated": bool(keys.word("feed_forward_proj", defaults["feed_forward_proj"], _FEED_FORWARDS)),
        "tied": tied,
        "buckets": keys.whole("relative_attention_num_buckets", 32),
        "max_seq": keys.whole("n_positions", 512),
        "dropout": keys.number("dropout_rate", 0.1),
    }


Reader = Callable[[Keys], Values]

# fmt: off
_DECODERS = (
    llama, mistral, qwen2, qwen3, gemma, gemma2, phi, phi3, mixtral, qwen2_moe, qwen3_moe, gpt_oss,
)
# fmt: on
MODEL_TYPES: Mapping[str, tuple[str, Reader]] = {
    **{read.__name__: (DECODER, read) for read in _DECODERS},
    "gemma3_text": (DECODER, gemma3),
    **{read.__name__: (T5, read) for read in (t5, mt5, umt5)},
    "gpt2": (GPT, gpt2),
}
"""Families of ours, and the readers of the keys, by model type."""


@dataclass(frozen=True)
class Translation:
    """A family of ours, and the values of its shape."""

    family: str
    values: Mapping[str, Any]


def translate(config: Mapping[str, Any], towers: bool = False) -> Translation:
    """Return the family and shape of the model that `config`, the content of a `config.json`, describes.

    Of a multimodal model it is the text model, or with `towers` the whole. What our families do not build is
    a model of the library's (`library_model.py`): other types, and keys that the library reads and we do not.

    Raises:
        ShapeError: a value is of another type than it must be, or a key may change the model and neither
            reads it; the message names the key.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ShapeError("key model_type is missing: it says which model the other keys describe")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) and not towers else None
    if inner is not None and inner.get("model_type") in MODEL_TYPES:
        try:
            return _of_ours({**inner, **{key: config[key] for key in _OF_WHOLE if key in config}})
        except NotBuiltError:
            pass
    elif model_type in MODEL_TYPES:
        try:
            return _of_ours(config)
        except NotBuiltError as error:
            if not has_field(model_type, error.key):
                raise
    Keys(config).check_checkpoint()
    return Translation(LIBRARY, values_of(config, towers))


_OF_WHOLE = ("tie_word_embeddings", "quantization_config")
"""Keys of a multimodal model that hold for its text model too."""


def _of_ours(config: Mapping[str, Any]) -> Translation:
    family, read = MODEL_TYPES[config["model_type"]]
    keys = Keys(config)
    values = read(keys)
    keys.finish()
    return Translation(family, values)
