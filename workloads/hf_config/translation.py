"""A whole configuration: by its `model_type` to a family and its shape."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.workloads.decoder.shape import FAMILY as DECODER
from fsdpbench.workloads.errors import ShapeError
from fsdpbench.workloads.families.gpt import FAMILY as GPT
from fsdpbench.workloads.families.t5 import FAMILY as T5
from fsdpbench.workloads.hf_config import decoders, others
from fsdpbench.workloads.hf_config.keys import Keys

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
