"""Reading the keys of a configuration file: typed, each accounted for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fsdpbench.workloads.tensor_plan import ShapeError

_LARGEST = 2**63 - 1
_SHOWN = 60

# What generation, checkpoints, heads of other tasks and the library itself need: nothing of the model's own.
# fmt: off
HARMLESS = frozenset((
    "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "attn_implementation",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "id2label", "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder",
    "is_llama_config", "label2id", "length_penalty", "max_length", "min_length", "mlp_implementation",
    "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_past", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers_version",
    "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "use_return_dict",
))
# fmt: on
_EMPTY_IS_NONE = ("pruned_heads",)
_WITH_LANGUAGE_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class Keys:
    """The keys of one configuration, and which of them have been read.

    Raises:
        ShapeError: from each method, for a value of another type; it names key and value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()
        self.model_type = str(config.get("model_type"))

    def has(self, key: str) -> bool:
        """Whether it is given and not null."""
        return self._config.get(key) is not None

    def raw(self, key: str, missing: Any = None) -> Any:
        """The value as it stands, null included; `missing` where the key is not there."""
        self._read.add(key)
        return self._config.get(key, missing)

    def whole(self, key: str, missing: int, null: int | None = None) -> int:
        """A whole number from 0; null counts as `null`, or as `missing` without one."""
        value = self.raw(key, missing)
        if value is None:
            return missing if null is None else null
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise self.misfit(key, value, "a whole number from 0")
        return value

    def number(self, key: str, missing: float, null: float | None = None) -> float:
        """A finite number from 0; null counts as `null`, or as `missing` without one."""
        return self.as_number(key, self.raw(key, missing), missing if null is None else null)

    def as_number(self, key: str, value: Any, null: float) -> float:
        """`value`, which stands at `key`, as a finite number from 0; None counts as `null`."""
        if value is None:
            return null
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not fits or not math.isfinite(value) or value < 0:
            raise self.misfit(key, value, "a finite number from 0")
        return float(value)

    def flag(self, key: str, missing: bool) -> bool:
        """True or false; null counts as false."""
        value = self.raw(key, missing)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.misfit(key, value, "true or false")
        return value

    def word(self, key: str, missing: str, among: Mapping[str, str]) -> str:
        """One of the words of `among`, translated."""
        value = self.raw(key, missing)
        value = missing if value is None else value
        if not isinstance(value, str) or value not in among:
            raise self.misfit(key, value, f"one of {', '.join(among)}")
        return among[value]

    def must_be(self, key: str, *accepted: Any) -> None:
        """Refuse any value but these; a missing key has the first of them."""
        value = self.raw(key, accepted[0])
        if value not in accepted:
            raise self.refusal(key, value)

    def table(self, key: str) -> dict[str, Any] | None:
        """An object, or None."""
        value = self.raw(key)
        return None if value is None else self.as_table(key, value)

    def as_table(self, key: str, value: Any) -> dict[str, Any]:
        """`value`, which stands at `key`, as an object."""
        if not isinstance(value, dict):
            raise self.misfit(key, value, "an object")
        return value

    def ignore(self, *keys: str) -> None:
        """These say nothing that other keys, or the model's code, do not say."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse the first key that was not read and that may change the model."""
        self._check_head()
        for key, value in self._config.items():
            if key in self._read or key in HARMLESS or value is None or value is False:
                continue
            if key in _EMPTY_IS_NONE and not value:
                continue
            raise self.refusal(key, value)

    def _check_head(self) -> None:
        """`architectures` names the class of the checkpoint: one without a language head is another model."""
        names = self.raw("architectures") or []
        if not isinstance(names, list):
            raise self.misfit("architectures", names, "a list of names")
        for name in names:
            if not str(name).endswith(_WITH_LANGUAGE_HEAD):
                raise ShapeError(
                    f"key architectures is {_shown(names)}: a model without its language head, or with "
                    "another one, is not built. Remove the key to build the language model of the other keys"
                )

    def misfit(self, key: str, value: Any, wanted: str) -> ShapeError:
        """The error of a value that is of another kind."""
        return ShapeError(f"key {key} is {_shown(value)}: it must be {wanted}")

    def refusal(self, key: str, value: Any) -> ShapeError:
        """The error of a part of a model that is not built."""
        if key == "quantization_config":
            return ShapeError(
                f"key {key} is {_shown(value)}: weights in few bits are not trained as the checkpoint has "
                "them. Remove the key to train the model that it was made of; --lora 16 --lora-base 4bit "
                "freezes linear layers in 4 bits"
            )
        return ShapeError(
            f"key {key} is {_shown(value)}: this may change the model, and is not built for model_type "
            f"{self.model_type}. Remove the key if the model is the same without it"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shortest_period(letters: Iterable[str]) -> str:
    """The shortest text that, repeated and cut, gives `letters`."""
    text = "".join(letters)
    for length in range(1, len(text) + 1):
        if all(text[index] == text[index % length] for index in range(length, len(text))):
            return text[:length]
    return text
