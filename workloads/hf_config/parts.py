"""Parts of a configuration that several model types have in common: rotary positions, layers, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fsdpbench.workloads.decoder.rotary import Rope
from fsdpbench.workloads.hf_config.keys import Keys, shortest_period
from fsdpbench.workloads.shape import check_layers
from fsdpbench.workloads.tensor_plan import ShapeError

DEFAULT_SEQ = 4096
"""Tokens a sample where no length is given: a model's longest context is not what it is trained at."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
}
_ORIGINAL = "original_max_position_embeddings"
_LETTERS = {"full_attention": "F", "sliding_attention": "S"}


def common_shape(keys: Keys, defaults: dict[str, Any]) -> dict[str, Any]:
    """Sizes, biases, norm and dropout of a decoder; `defaults` are the model's own, by key of the file."""
    heads = keys.whole("num_attention_heads", defaults["num_attention_heads"])
    d_model = keys.whole("hidden_size", defaults["hidden_size"])
    if not heads or not d_model:
        raise ShapeError("keys num_attention_heads and hidden_size must be at least 1")
    layers = keys.whole("num_hidden_layers", defaults["num_hidden_layers"])
    check_layers(layers, "num_hidden_layers")  # before patterns are made, a letter a layer
    attention_bias = keys.flag("attention_bias", False)
    longest = keys.whole("max_position_embeddings", defaults["max_position_embeddings"])
    keys.must_be("is_encoder_decoder", False)
    keys.must_be("add_cross_attention", False)
    return {
        "layers": layers,
        "d_model": d_model,
        "d_ff": keys.whole("intermediate_size", defaults["intermediate_size"]),
        "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", defaults.get("num_key_value_heads", heads), null=heads),
        "head_width": keys.whole("head_dim", defaults.get("head_dim", 0), null=0) or d_model // heads,
        "vocab": keys.whole("vocab_size", defaults["vocab_size"]),
        "tied": keys.flag("tie_word_embeddings", defaults.get("tie_word_embeddings", False)),
        "max_seq": min(longest, DEFAULT_SEQ),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "norm_eps": keys.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        "activation": keys.word("hidden_act", defaults.get("hidden_act", "silu"), ACTIVATIONS),
        "attention_dropout": keys.number("attention_dropout", 0.0),
    }


def layer_pattern(
    keys: Keys, layers: int, window: int | None, slides: Callable[[int], bool]
) -> dict[str, Any]:
    """`window` and `layer_pattern`: of `layer_types` where it is given, else by `slides(layer)`."""
    kinds = keys.raw("layer_types")
    if kinds is None:
        letters = "".join("S" if window and slides(layer) else "F" for layer in range(layers))
    elif not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= set(_LETTERS):
        raise keys.misfit("layer_types", kinds, f"{layers} times one of {', '.join(_LETTERS)}")
    else:
        letters = "".join(_LETTERS[kind] for kind in kinds)
    if "S" not in letters:
        return {"window": 0, "layer_pattern": "F"}
    if not window:
        raise keys.misfit(
            "sliding_window", keys.raw("sliding_window"), "a number of tokens for sliding layers"
        )
    return {"window": window, "layer_pattern": shortest_period(letters)}


def rope_shape(
    keys: Keys, theta: float, standard: dict[str, Any] | None = None, *, partial: float | None = None
) -> dict[str, Any]:
    """`rope_theta` and `rope`, of `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`.

    `standard`: the scaling of a model that names none; `partial`: the share of a head that is turned, where
    the model has such a key.
    """
    newer, older = keys.table("rope_parameters"), keys.table("rope_scaling")
    given = dict(newer or older or standard or {})
    if partial is not None:
        # The key inside the table comes first, as in transformers.
        outer = keys.number("partial_rotary_factor", partial)
        share = keys.as_number("partial_rotary_factor", given.pop("partial_rotary_factor", None), outer)
    theta = keys.number("rope_theta", theta)
    theta = keys.as_number("rope_theta", given.pop("rope_theta", None), theta)
    shape = {"rope_theta": theta, "rope": str(read_rope(keys, given))}
    return shape if partial is None else {**shape, "rotary_share": share}


def longrope_shape(keys: Keys) -> dict[str, Any]:
    """As `rope_shape` of Phi 3 and 4, whose long contexts stretch each pair by a factor of its own."""
    given = keys.table("rope_parameters") or keys.table("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type")
    if kind not in ("longrope", "su"):
        return rope_shape(keys, 10000.0, partial=1.0)
    plain = ("rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in given.items() if key not in (*plain, "rope_type", "type")}
    original = keys.whole("original_max_position_embeddings", 4096)
    original = int(keys.as_number("original_max_position_embeddings", rest.pop(_ORIGINAL, None), original))
    factor = keys.number("max_position_embeddings", 4096.0) / max(original, 1)
    factor = keys.as_number("factor", rest.pop("factor", None), factor)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    mscale = keys.as_number("attention_factor", rest.pop("attention_factor", None), usual)
    lists = [_numbers(keys, key, rest.pop(key, None)) for key in ("short_factor", "long_factor")]
    for key, value in rest.items():
        raise keys.refusal(f"{key} of the rotary positions (longrope)", value)
    rope = Rope("longrope", original=float(original), mscale=mscale, short=lists[0], long=lists[1])
    share = keys.number("partial_rotary_factor", 1.0)
    return {
        "rope_theta": keys.as_number("rope_theta", given.get(plain[0]), keys.number("rope_theta", 10000.0)),
        "rotary_share": keys.as_number(plain[1], given.get(plain[1]), share),
        "rope": str(rope),
    }


def _numbers(keys: Keys, key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise keys.misfit(key, value, "a list of numbers")
    return tuple(keys.as_number(key, each, 0.0) for each in value)


def read_rope(keys: Keys, given: dict[str, Any]) -> Rope:
    """A table of `rope_parameters` without its theta. Raises: ShapeError, its type or a key is not built."""
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    names = {
        "default": {},
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "low_freq_factor": "low",
            "high_freq_factor": "high",
            "original_max_position_embeddings": "original",
        },
        "yarn": {
            "factor": "factor",
            "beta_fast": "fast",
            "beta_slow": "slow",
            "original_max_position_embeddings": "original",
            "attention_factor": "mscale",
            "truncate": "truncate",
        },
    }.get(str(kind))
    if names is None:
        raise ShapeError(
            f"the rotary positions are of type {kind!r}, which is not built here (default, linear, "
            "llama3 and yarn are; longrope for phi3): remove the key rope_scaling or rope_parameters to "
            "train at the original context"
        )
    if kind != "default" and given.get("factor") is None:
        raise ShapeError(f"the rotary positions are of type {kind}, and lack the key factor")
    numbers: dict[str, Any] = {}
    if kind in ("llama3", "yarn") and given.get("original_max_position_embeddings") is None:
        numbers["original"] = float(keys.whole("max_position_embeddings", 0))
    mscale = (
        (given.pop("mscale", None), given.pop("mscale_all_dim", None)) if kind == "yarn" else (None, None)
    )
    for key, value in given.items():
        if value is None:
            continue
        if key not in names:
            raise keys.refusal(f"{key} of the rotary positions ({kind})", value)
        plain = int(value) if key == "truncate" and isinstance(value, bool) else value
        numbers[names[key]] = keys.as_number(key, plain, 0.0)
    if all(mscale) and "mscale" not in numbers:
        over, under = (_yarn_scale(keys, numbers["factor"], each) for each in mscale)
        numbers["mscale"] = over / under
    return Rope.parse(str(Rope(str(kind), **numbers)))


def _yarn_scale(keys: Keys, factor: float, scale: Any) -> float:
    return 0.1 * keys.as_number("mscale", scale, 0.0) * math.log(max(factor, 1.0)) + 1.0
