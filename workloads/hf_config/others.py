"""Model types that families of ours build already: GPT-2 and T5."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.workloads.decoder.shape import FAMILY as DECODER
from fsdpbench.workloads.families.gpt import FAMILY as GPT
from fsdpbench.workloads.families.t5 import FAMILY as T5
from fsdpbench.workloads.hf_config import decoders, others
from fsdpbench.workloads.hf_config.keys import Keys
from fsdpbench.workloads.tensor_plan import ShapeError

Values = dict[str, Any]


def gpt2(keys: Keys) -> Values:
    """GPT-2: learned positions, as many as `n_positions`."""
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


_T5: Values = {
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}
_MT5: Values = {
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "vocab_size": 250112,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def t5(keys: Keys) -> Values:
    """T5, T5 1.1 and Flan-T5."""
    return _t5(keys, _T5)


def mt5(keys: Keys) -> Values:
    """mT5: T5 1.1 with the words of 101 languages."""
    return _t5(keys, _MT5)


def umt5(keys: Keys) -> Values:
    """UMT5: mT5 with a position bias in every layer."""
    keys.ignore("scalable_attention")  # the trainer wrote it, and no code reads it
    return {**_t5(keys, _MT5 | {"tie_word_embeddings": True}), "bias_each_layer": True}


def _t5(keys: Keys, defaults: Values) -> Values:
    layers = keys.whole("num_layers", defaults["num_layers"])
    decoder_layers = keys.whole("num_decoder_layers", layers)
    if decoder_layers != layers:
        raise keys.misfit("num_decoder_layers", decoder_layers, f"what num_layers is, {layers}")
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


_Reader = Callable[[Keys], dict[str, Any]]

MODEL_TYPES: Mapping[str, tuple[str, _Reader]] = {
    "llama": (DECODER, decoders.llama),
    "mistral": (DECODER, decoders.mistral),
    "qwen2": (DECODER, decoders.qwen2),
    "qwen3": (DECODER, decoders.qwen3),
    "gemma": (DECODER, decoders.gemma),
    "gemma2": (DECODER, decoders.gemma2),
    "gemma3_text": (DECODER, decoders.gemma3),
    "phi": (DECODER, decoders.phi),
    "phi3": (DECODER, decoders.phi3),
    "mixtral": (DECODER, decoders.mixtral),
    "qwen2_moe": (DECODER, decoders.qwen2_moe),
    "qwen3_moe": (DECODER, decoders.qwen3_moe),
    "gpt_oss": (DECODER, decoders.gpt_oss),
    "t5": (T5, others.t5),
    "mt5": (T5, others.mt5),
    "umt5": (T5, others.umt5),
    "gpt2": (GPT, others.gpt2),
}
"""Model type -> family of ours, and what reads its keys."""


@dataclass(frozen=True)
class Translation:
    """A family of ours and the values of its shape."""

    family: str
    values: Mapping[str, Any]


def translate(config: Mapping[str, Any]) -> Translation:
    """The family and shape of the model that `config`, the content of a `config.json`, describes.

    Raises:
        ShapeError: its `model_type` is not built, a value is of another type than it must be, or a key that
            may change the model is not built; the message names the key.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ShapeError("key model_type is missing: it says which model the other keys describe")
    if model_type not in MODEL_TYPES:
        raise ShapeError(_not_built(model_type, "text_config" in config))
    family, read = MODEL_TYPES[model_type]
    keys = Keys(config)
    values = read(keys)
    keys.finish()
    return Translation(family, values)


def _not_built(model_type: str, has_text_part: bool) -> str:
    known = f"model_type {model_type[:60]!r} is not built; these are: {', '.join(MODEL_TYPES)}"
    if has_text_part:
        return f"{known}. Its text model alone may be: save the object text_config as a file of its own"
    near = difflib.get_close_matches(model_type, MODEL_TYPES, n=1)
    return f"{known}. Did you mean {near[0]}?" if near else known
