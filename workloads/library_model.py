"""`implementation=transformers`: the library's own modules, of the configuration that a file gave.

Tokens, FLOPs and counts are those of our build of the same file; that the library's module has as many
parameters is checked when it is built. The library is imported here alone, and only when it is asked for.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdpbench.workloads.base import Workload, WrappedWorkload
from fsdpbench.workloads.losses import ComputesTokenLoss, token_loss
from fsdpbench.workloads.shape import WorkloadError

LIBRARY = "transformers"
CONTENT = "library_config"
"""Name of the field of a shape that keeps the file's content, for the library alone."""
_ROUTED = "its router sends tokens by their scores, which simulated GPUs do not know"
_NOT_HERE = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), _ROUTED),
    "t5": "it is not a decoder",
}
_MOST_DIFFERENCE = 0.001


def packed(content: Mapping[str, Any]) -> str:
    """Return a configuration's content as a word without commas, for a shape."""
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unpacked(text: str) -> dict[str, Any]:
    """Return the content that `packed` packed. Raise `WorkloadError` for any other text."""
    try:
        content = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise WorkloadError(f"{CONTENT}: {text[:40]!r} is not a configuration as fsdpbench records it")
    return content


class LibraryWorkload(WrappedWorkload):
    """A workload that builds the library's module of `content`; everything else is that of `base`.

    Raises:
        WorkloadError: the library is not installed, or its module of this model cannot are beside ours.
    """

    def __init__(self, base: Workload, content: Mapping[str, Any] | None) -> None:
        if content is None:
            raise WorkloadError(
                f"implementation={LIBRARY}: {base.name} comes from no file of the library; give one with "
                "--hf-config FILE"
            )
        model_type = str(content.get("model_type"))
        if model_type in _NOT_HERE:
            raise WorkloadError(f"implementation={LIBRARY}: {model_type}: {_NOT_HERE[model_type]}")
        if importlib.util.find_spec(LIBRARY) is None:
            raise WorkloadError(
                f"implementation={LIBRARY}: the package is not installed here (pip install {LIBRARY}); "
                "implementation=own needs nothing"
            )
        super().__init__(base)
        self._content = dict(content)

    @functools.cached_property
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """Return the module classes that the library itself keeps in one piece."""
        with torch.device("meta"):
            model = self._module(num_hidden_layers=1)
        names = set(getattr(model, "_no_split_modules", None) or ())
        found = {type(module) for module in model.modules() if type(module).__name__ in names}
        if not found:
            raise WorkloadError(f"implementation={LIBRARY}: {type(model).__name__} names no blocks")
        return tuple(found)

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        if activation_checkpointing not in ("none", "full"):
            raise WorkloadError(
                f"implementation={LIBRARY}: the library checkpoints all blocks or none, not "
                f"{activation_checkpointing}; use full or none"
            )
        model = self._module()
        count = sum(parameter.numel() for parameter in model.parameters())
        if abs(count - self.parameters) > _MOST_DIFFERENCE * self.parameters:
            raise WorkloadError(
                f"implementation={LIBRARY}: its {type(model).__name__} has {count:,} parameters, our build "
                f"of the same file {self.parameters:,}: they are not one model"
            )
        if activation_checkpointing == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return LibraryModel(model, bool(self.shape.get("fp32_loss", False)))

    def _module(self, **changes: Any) -> Any:
        library = importlib.import_module(LIBRARY)
        content = {key: value for key, value in self._content.items() if key not in ("model_type", "dtype")}
        kind = library.CONFIG_MAPPING[self._content["model_type"]]
        settings = kind(**{**content, "use_cache": False, **changes})
        settings._attn_implementation = "sdpa"
        return library.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()


class LibraryModel(ComputesTokenLoss, nn.Module):
    """A module of the library, called as our models are: `model(tokens, targets) -> loss`."""

    def __init__(self, model: Any, fp32_loss: bool) -> None:
        super().__init__()
        self.model, self.fp32_loss = model, fp32_loss

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the library's own initial weights, and recompute the buffers that its constructor makes."""
        for module in self.model.modules():
            self.model._init_weights(module)
            buffers = dict(module.named_buffers(recurse=False))
            if buffers and hasattr(module, "config"):
                for name, fresh in type(module)(module.config).named_buffers(recurse=False):
                    buffers[name].copy_(fresh)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits
        if targets is None:
            return logits
        return (self.compiled_loss or token_loss)(logits, targets, self.fp32_loss)
