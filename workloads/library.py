"""Models of the library `transformers`, described by the content of a `config.json`.

    LibraryWorkload(name, LibraryShape(packed(content)))   the file's text model; `towers`: with its towers
    implementation=transformers                            the same for files that our families also support

The library is imported, and the model built (`library_model.py`), when they are first needed.
"""

import base64
import importlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpbench.workloads.base import ForwardFlops, Shaped, TokenWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.shape import ShapeError, WorkloadError, check_layers, error_text

if TYPE_CHECKING:
    from torch import nn

    from fsdpbench.workloads.inputs import Batch, Feed

LIBRARY = "transformers"
CONTENT = "library_config"
"""Name of a shape's field that keeps the file's content, only for the library."""
DEFAULT_SEQ = 4096
"""Default number of tokens per sample: models are rarely trained at their longest context."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "context_length")


def packed(content: Mapping[str, Any]) -> str:
    """Return a configuration's content as text without commas, for a shape."""
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unpacked(text: str) -> dict[str, object]:
    """Return the content that `packed` encoded; raise `WorkloadError` for other text."""
    try:
        content = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise WorkloadError(f"{CONTENT}: {text[:40]!r} is not a configuration as fsdpbench records it")
    return content


def library() -> Any:
    """Import and return the package in offline mode; raise `WorkloadError` if it is missing."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise WorkloadError(error_text("library.not_installed", LIBRARY))
    os.environ["HF_HUB_OFFLINE"] = "1"
    package: Any = importlib.import_module(LIBRARY)
    package.logging.set_verbosity_error()
    return package


def _models() -> Any:
    """Return the module that builds the library's models, which imports torch."""
    return importlib.import_module("fsdpbench.workloads.library_model")


def values_of(content: Mapping[str, Any], towers: bool) -> dict[str, object]:
    """Return the shape's values for the model in a file's content, after building it once on meta as a check.
    Raises the errors of `LibraryWorkload`."""
    shape = LibraryShape(packed(content), towers)
    try:
        _models().built_on_meta(shape)
    except WorkloadError as error:
        raise ShapeError(f"model_type {str(content.get('model_type'))[:60]!r}: {error}") from None
    return {CONTENT: shape.library_config, "towers": towers}


def model_type_of(content: Mapping[str, Any]) -> str:
    """Return the library's model type for the model that a file describes.

    Files that come with their own code may name a type that only this code knows, and a class that the
    library has. Then the class decides.

    Raises:
        ShapeError: the library has neither the type nor the class.
    """
    named, known = str(content.get("model_type")), library().CONFIG_MAPPING
    names = importlib.import_module(f"{LIBRARY}.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = content.get("architectures") or [None]
    own = names.get(named)
    if own != classes[0]:
        by_class = [each for each, name in names.items() if name == classes[0]]
        if by_class and (named not in known or own is not None):
            return str(by_class[0])
    if named not in known:
        raise ShapeError(
            f"neither our families nor {LIBRARY} {library().__version__} build it"
            + ("; code that a file points to (auto_map) is never run" if content.get("auto_map") else "")
        )
    return named


def has_field(model_type: str, key: str) -> bool:
    """Return whether the library is installed and has `key` only for some model types, including this one."""
    if importlib.util.find_spec(LIBRARY) is None or model_type not in library().CONFIG_MAPPING:
        return False
    of_all = library().PretrainedConfig.__dataclass_fields__
    return key in library().CONFIG_MAPPING[model_type].__dataclass_fields__ and key not in of_all


@dataclass(frozen=True)
class LibraryShape:
    """Packed content of a file. `towers`: the whole multimodal model, not only its text model."""

    library_config: str
    towers: bool = False


class LibraryWorkload(Shaped[LibraryShape], TokenWorkload):
    """A model that the library builds from the content of a file.

    Raises:
        WorkloadError: from all methods that build: the library is missing or refuses the configuration.
    """

    family = LIBRARY
    shape_type = LibraryShape

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self._on_meta.parameters())

    @property
    def default_seq(self) -> int:
        given = (getattr(self._settings, name, None) for name in _LENGTHS)
        longest = min(next((each for each in given if isinstance(each, int)), DEFAULT_SEQ), DEFAULT_SEQ)
        return longest - longest % 8 or longest  # RoBERTa's 514 positions hold 512 tokens

    @property
    def block_classes(self) -> "tuple[type[nn.Module], ...]":
        blocks = [block for stack in _models().stacks(self._on_meta) for block in stack]
        holders = Counter(id(each) for block in blocks for each in set(block.parameters()))
        # Modules that several blocks share (Zamba) belong to the root.
        sharing = {type(block) for block in blocks if any(holders[id(p)] > 1 for p in block.parameters())}
        return tuple({type(block) for block in blocks} - sharing)

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> "nn.Module":
        self.resolve_seq(seq)
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        return _models().build_checkpointed(self.spec, checkpointing)

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        from fsdpbench.workloads.inputs import token_batches

        return token_batches(feed, vocab=self._settings.vocab_size, seq=self.resolve_seq(seq))

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        return _models().counted(self._on_meta, _models().stacks(self._on_meta), batch, self.resolve_seq(seq))

    @property
    def _settings(self) -> Any:
        settings = self._on_meta.model.config
        return getattr(settings, "text_config", None) or settings

    @property
    def _on_meta(self) -> Any:
        return _models().built_on_meta(self.spec)


def check_sizes(content: Mapping[str, Any]) -> None:
    """Raise `ShapeError` for numbers of layers and sizes, at any depth, that cannot be built."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            check_sizes(value)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "layer" in name and not name.endswith(("_idx", "_id")):
            check_layers(value, name)
        if not -(2**31) < value < 2**48:
            raise ShapeError(f"key {name} is {value}: no model is that large")
