"""Model types of Hugging Face's configuration files: a reader of the keys of each, and the translation.

A reader returns the shape of one of our families, as the model's published code derives it from the keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from fsdpbench.base.files.documents import table_beside
from fsdpbench.workloads.decoder.shape import FAMILY as DECODER
from fsdpbench.workloads.families.gpt_workload import FAMILY as GPT
from fsdpbench.workloads.families.t5_workload import FAMILY as T5
from fsdpbench.workloads.hf_config import keys as config_keys
from fsdpbench.workloads.library import LIBRARY, has_field, values_of
from fsdpbench.workloads.shape import NotBuiltError, ShapeError

Values = dict[str, Any]


@dataclass(frozen=True)
class DecoderType:
    """A model type of decoders: a table of `decoders.toml`, which documents the fields."""

    keys: Values = field(default_factory=dict)
    like: str = ""
    shape: Values = field(default_factory=dict)
    read: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    activation: str = ""
    theta: float = 10000.0
    partial: float | None = None
    scaling: Values = field(default_factory=dict)
    rope: str = ""
    window: int | None = None
    slides: str = ""
    switched: bool = False
    sparse: bool = False
    experts_too: str = ""

    @property
    def defaults(self) -> Values:
        """Return the values of missing keys, by key of the file."""
        return {**(DECODERS[self.like].defaults if self.like else {}), **self.keys}


DECODERS: Mapping[str, DecoderType] = {
    name: msgspec.convert(table, DecoderType)
    for name, table in table_beside(__file__, "decoders.toml").items()
}


def decoder(keys: config_keys.Keys, of: DecoderType) -> Values:
    """Read the keys of a decoder of type `of`. Raises `ShapeError`."""
    for key, accepted in of.must.items():
        keys.must_be(key, *accepted, None)
    keys.ignore(*of.ignore)
    read = dict(of.read)
    if of.experts_too:
        read["experts"] = (of.experts_too, _experts_by_either_name(keys, of.experts_too, *read["experts"]))
    rope = (
        _ROPES[of.rope](keys)
        if of.rope
        else config_keys.rope_shape(keys, of.theta, of.scaling, partial=of.partial)
    )
    shape = {**config_keys.common_shape(keys, of.defaults), **rope, **of.shape}
    shape |= {name: keys.of_its_type(*how) for name, how in read.items()}
    if of.activation:
        older = keys.raw("hidden_act") or of.defaults["hidden_act"]
        shape["activation"] = keys.word(of.activation, str(older), config_keys.ACTIVATIONS)
    if shape.get("score_cap"):
        shape["attention"] = "explicit"
    if "experts" in shape:
        shape.setdefault("expert_d_ff", shape["d_ff"])
        shape["shared_gate"] = shape.get("shared_d_ff", 0) > 0
    if of.sparse:
        shape["moe_pattern"] = _sparse_layers(keys, shape["layers"], shape["experts"])
    return shape if of.window is None else {**shape, **_sliding(keys, of, shape["layers"])}


def _sliding(keys: config_keys.Keys, of: DecoderType, layers: int) -> Values:
    """Read which layers slide, and over how many tokens."""
    window = keys.whole("sliding_window", of.window or 0, null=0)
    on = keys.flag("use_sliding_window", False) if of.switched else True
    first, period = 0, 1
    if of.slides == "upper":
        first = keys.whole("max_window_layers", 28)
    if of.slides == "most":
        period = keys.whole("_sliding_window_pattern", keys.whole("sliding_window_pattern", 6)) or 1

    def slides(layer: int) -> bool:
        if of.slides == "most":
            return (layer + 1) % period != 0
        return layer % 2 == 0 if of.slides == "even" else layer >= first

    return config_keys.layer_pattern(keys, layers, window if on else None, slides)


def _experts_by_either_name(keys: config_keys.Keys, second: str, first: str, missing: int) -> int:
    """Read the number of experts from a key and its second name, which must agree."""
    experts = keys.whole(first, keys.whole(second, missing))
    again = keys.whole(second, experts)
    if again != experts:
        raise keys.misfit(second, again, f"what {first} is, {experts}")
    return experts


def _sparse_layers(keys: config_keys.Keys, layers: int, experts: int) -> str:
    """Read the pattern of mixtures: every `decoder_sparse_step`-th layer, except listed layers."""
    step, dense = keys.whole("decoder_sparse_step", 1) or 1, keys.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise keys.misfit("mlp_only_layers", dense, "a list of layers")
    return config_keys.shortest_period(
        "M" if experts and layer not in dense and (layer + 1) % step == 0 else "D" for layer in range(layers)
    )


def _gemma3_rope(keys: config_keys.Keys) -> Values:
    """Read Gemma 3's rotary positions: full layers may be scaled, sliding layers have their own theta."""
    by_layer = keys.table("rope_parameters") or {}
    local_theta = keys.number("rope_local_base_freq", 10000.0)
    if "full_attention" not in by_layer:
        return {**config_keys.rope_shape(keys, 1e6), "local_theta": local_theta}
    theta = keys.number("rope_theta", 1e6)
    full, sliding = (
        dict(keys.as_table(f"rope_parameters.{kind}", by_layer.get(kind)))
        for kind in ("full_attention", "sliding_attention")
    )
    theta = keys.as_number("rope_theta", full.pop("rope_theta", None), theta)
    local_theta = keys.as_number("rope_theta", sliding.pop("rope_theta", None), local_theta)
    if config_keys.read_rope(keys, sliding).kind != "default":
        raise keys.refusal("rope_parameters of sliding_attention", sliding)
    return {"rope_theta": theta, "rope": str(config_keys.read_rope(keys, full)), "local_theta": local_theta}


_ROPES: Mapping[str, Callable[[config_keys.Keys], Values]] = {
    "longrope": config_keys.longrope_shape,
    "by layer": _gemma3_rope,
}


def gpt2(keys: config_keys.Keys) -> Values:
    """Read GPT-2, which has `n_positions` learned positions."""
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
    # Our GPTs compute exact GELU, with one kernel like its tanh approximation.
    keys.must_be("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh")
    # Keys of GPT-2's predecessor, and keys of summaries, the heads for other tasks.
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


def umt5(keys: config_keys.Keys) -> Values:
    """Read UMT5: mT5 with a position bias in every layer."""
    keys.ignore("scalable_attention")  # written by the trainer and read by no code
    return {**t5(keys, config_keys.DEFAULTS["mt5"] | {"tie_word_embeddings": True}), "bias_each_layer": True}


def t5(keys: config_keys.Keys, defaults: Values) -> Values:
    """Read T5, T5 1.1, Flan-T5, or mT5 (T5 1.1 with a vocabulary of 101 languages), with their defaults."""
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


Reader = Callable[[config_keys.Keys], Values]
MODEL_TYPES: Mapping[str, tuple[str, Reader]] = {
    **{name: (DECODER, partial(decoder, of=of)) for name, of in DECODERS.items()},
    **{name: (T5, partial(t5, defaults=own)) for name, own in config_keys.DEFAULTS.items()},
    "umt5": (T5, umt5),
    "gpt2": (GPT, gpt2),
}
"""Our family and the reader of the keys, by model type."""


@dataclass(frozen=True)
class Translation:
    """One of our families, and the values of its shape."""

    family: str
    values: Mapping[str, Any]


def translate(config: Mapping[str, Any], towers: bool = False) -> Translation:
    """Return family and shape of the model that `config`, the content of a `config.json`, describes.

    For a multimodal model this is the text model, or with `towers` the whole model. If our families do not
    support a model type, or a key that the library reads, the library builds the model (`library_model.py`).

    Raises:
        ShapeError: a value has a wrong type, or neither reader knows a key that may affect the model; the
            message names the key.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ShapeError("key model_type is missing: it says which model the other keys describe")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) and not towers else None
    if inner is not None and str(inner.get("model_type")) in MODEL_TYPES:
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
    config_keys.Keys(config).check_checkpoint()
    return Translation(LIBRARY, values_of(config, towers))


_OF_WHOLE = ("tie_word_embeddings", "quantization_config")
"""Keys of a multimodal model that also apply to its text model."""


def _of_ours(config: Mapping[str, Any]) -> Translation:
    family, read = MODEL_TYPES[config["model_type"]]
    keys = config_keys.Keys(config)
    values = read(keys)
    keys.finish()
    return Translation(family, values)
