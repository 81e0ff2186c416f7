"""Reader of a configuration file's keys, typed and each accounted for, and parts that models share."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import JsonObject
from fsdpbench.workloads.shape import NotBuiltError, Rope, ShapeError, check_layers, error_text

_LARGEST = 2**63 - 1
_SHOWN = 60

HARMLESS = frozenset(table_beside(__file__, "harmless.toml")["keys"].split())
_WORDS = table_beside(__file__, "words.toml")
ACTIVATIONS: Mapping[str, str] = _WORDS["activations"]
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = _WORDS["rope"]
DEFAULTS: Mapping[str, JsonObject] = _WORDS["defaults"]
"""Defaults of T5's own code for keys that a file lacks, by model type."""
_EMPTY_IS_NONE = ("pruned_heads",)
_WITH_LANGUAGE_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
_EXPANDED = ("mxfp4", "fp8", "compressed-tensors")
"""Formats of published checkpoints that are expanded to bf16 for training, as the same model."""


class Keys:
    """The keys of one configuration, with a record of which have been read.

    Raises:
        ShapeError: from each method, for a value of a wrong type; it names key and value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()
        self.model_type = str(config.get("model_type"))

    def has(self, key: str) -> bool:
        """Return whether a key is given and not null."""
        return self._config.get(key) is not None

    def raw(self, key: str, missing: Any = None) -> Any:
        """Return the raw value, which may be null, or `missing` if the key is absent."""
        self._read.add(key)
        return self._config.get(key, missing)

    def whole(self, key: str, missing: int, null: int | None = None) -> int:
        """Return a whole number of at least 0; null means `null`, or `missing` if that is None."""
        value = self.raw(key, missing)
        if value is None:
            return missing if null is None else null
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise self.misfit(key, value, "a whole number from 0")
        return value

    def number(self, key: str, missing: float, null: float | None = None) -> float:
        """Return a finite number of at least 0; null means `null`, or `missing` if that is None."""
        return self.as_number(key, self.raw(key, missing), missing if null is None else null)

    def as_number(self, key: str, value: Any, null: float) -> float:
        """Return `value`, found at `key`, as a finite number of at least 0; None means `null`."""
        if value is None:
            return null
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not fits or not math.isfinite(value) or value < 0:
            raise self.misfit(key, value, "a finite number from 0")
        return float(value)

    def flag(self, key: str, missing: bool) -> bool:
        """Return true or false; null means false."""
        value = self.raw(key, missing)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.misfit(key, value, "true or false")
        return value

    def of_its_type(self, key: str, missing: Any, null: Any = None) -> int | float | bool:
        """Return the value with the type of `missing`: a flag, a whole number, or a number."""
        if isinstance(missing, bool):
            return self.flag(key, missing)
        return self.whole(key, missing, null) if isinstance(missing, int) else self.number(key, missing, null)

    def word(self, key: str, missing: str, among: Mapping[str, str]) -> str:
        """Return the translation of the value, which must be a key of `among`."""
        value = self.raw(key, missing)
        value = missing if value is None else value
        if not isinstance(value, str) or value not in among:
            raise self.misfit(key, value, f"one of {', '.join(among)}")
        return among[value]

    def must_be(self, key: str, *accepted: Any) -> None:
        """Raise an error for any other value; a missing key has the first of these values."""
        value = self.raw(key, accepted[0])
        if value not in accepted:
            raise self.refusal(key, value)

    def table(self, key: str) -> JsonObject | None:
        """Return an object, or None."""
        value = self.raw(key)
        return None if value is None else self.as_table(key, value)

    def as_table(self, key: str, value: Any) -> JsonObject:
        """Return `value`, found at `key`, as an object."""
        if not isinstance(value, dict):
            raise self.misfit(key, value, "an object")
        return value

    def ignore(self, *keys: str) -> None:
        """Accept keys that repeat other keys or do not affect the model's code."""
        self._read.update(keys)

    def finish(self) -> None:
        """Raise an error for the first unread key that may affect the model."""
        self.check_checkpoint()
        for key, value in self._config.items():
            if key in self._read or key in HARMLESS or value is None or value is False:
                continue
            if key in _EMPTY_IS_NONE and not value:
                continue
            raise self.refusal(key, value)

    def check_checkpoint(self) -> None:
        """Raise `ShapeError` for a quantised checkpoint or a class without a language head: other models."""
        table = self.table("quantization_config")
        if table is not None and table.get("quant_method") not in _EXPANDED:
            raise ShapeError(error_text("keys.quantized", _shown(table)))
        names = self.raw("architectures") or []
        if not isinstance(names, list):
            raise self.misfit("architectures", names, "a list of names")
        for name in names:
            if not str(name).endswith(_WITH_LANGUAGE_HEAD):
                raise ShapeError(error_text("keys.no_head", _shown(names)))

    def misfit(self, key: str, value: Any, wanted: str) -> ShapeError:
        """Return the error for a value of a wrong type."""
        return ShapeError(f"key {key} is {_shown(value)}: it must be {wanted}")

    def refusal(self, key: str, value: Any) -> NotBuiltError:
        """Return the error for a part of a model that is not supported."""
        return NotBuiltError(
            key,
            error_text("keys.not_built", key, _shown(value), self.model_type),
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shortest_period(letters: Iterable[str]) -> str:
    """Return the shortest text whose repetition begins with `letters`."""
    text = "".join(letters)
    for length in range(1, len(text) + 1):
        if all(text[index] == text[index % length] for index in range(length, len(text))):
            return text[:length]
    return text


DEFAULT_SEQ = 4096
"""Default number of tokens per sample: models are rarely trained at their longest context."""
_ORIGINAL = "original_max_position_embeddings"
_LETTERS = {"full_attention": "F", "sliding_attention": "S"}


def common_shape(keys: Keys, defaults: JsonObject) -> dict[str, ShapeValue]:
    """Read a decoder's sizes, biases, norm and dropout; `defaults`: the model's, by key of the file."""
    heads = keys.whole("num_attention_heads", defaults["num_attention_heads"])
    d_model = keys.whole("hidden_size", defaults["hidden_size"])
    if not heads or not d_model:
        raise ShapeError("keys num_attention_heads and hidden_size must be at least 1")
    layers = keys.whole("num_hidden_layers", defaults["num_hidden_layers"])
    check_layers(layers, "num_hidden_layers")  # before making patterns with one letter per layer
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
) -> dict[str, ShapeValue]:
    """Read `window` and `layer_pattern` from `layer_types` if given, otherwise from `slides(layer)`."""
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
    keys: Keys, theta: float, standard: JsonObject | None = None, *, partial: float | None = None
) -> dict[str, ShapeValue]:
    """Read `rope_theta` and `rope`, from `rope_parameters` (transformers 5) or older keys.

    `standard`: the scaling if the file names none; `partial`: the default rotated share of a head, if the
    model has such a key.
    """
    newer, older = keys.table("rope_parameters"), keys.table("rope_scaling")
    given = dict(newer or older or standard or {})
    if partial is not None:
        # The key inside the table has precedence, as in transformers.
        outer = keys.number("partial_rotary_factor", partial)
        share = keys.as_number("partial_rotary_factor", given.pop("partial_rotary_factor", None), outer)
    theta = keys.number("rope_theta", theta)
    theta = keys.as_number("rope_theta", given.pop("rope_theta", None), theta)
    shape: dict[str, ShapeValue] = {"rope_theta": theta, "rope": str(read_rope(keys, given))}
    return shape if partial is None else {**shape, "rotary_share": share}


def longrope_shape(keys: Keys) -> dict[str, ShapeValue]:
    """Read the same for Phi 3 and 4, whose long contexts scale each pair by its own factor."""
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


def read_rope(keys: Keys, given: JsonObject) -> Rope:
    """Parse a table of `rope_parameters` without its theta; modifies `given`.

    Raises:
        ShapeError: its type or one of its keys is not supported.
    """
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    names = _ROPE_FIELDS.get(str(kind))
    if names is None:
        raise NotBuiltError("rope_parameters", error_text("keys.rotary", kind))
    if kind != "default" and given.get("factor") is None:
        raise ShapeError(f"the rotary positions are of type {kind}, and lack the key factor")
    numbers: dict[str, float] = {}
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
        log = math.log(max(numbers["factor"], 1.0))
        over, under = (0.1 * keys.as_number("mscale", each, 0.0) * log + 1.0 for each in mscale)
        numbers["mscale"] = over / under
    return Rope.parse(str(Rope(str(kind), short=(), long=(), **numbers)))
