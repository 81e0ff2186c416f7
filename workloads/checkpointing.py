"""Activation checkpointing of a model's blocks: keep a block's input, compute its inside again in backward.

The block calls the checkpoint itself, inside its `forward`:

    FSDP hooks of the unit > CheckpointedBlock.forward > checkpoint > transform: attention, feed-forward

so that no wrapper module changes names or classes, and so that a unit's all-gather is issued once by the
hooks outside and not again by the recomputation inside.

A checkpointed block is recomputed in full. torch's early stop would leave out its last matrix product (a
third of a GPT block's forward FLOPs), but published figures, and the 4/3 in the usual formula of HFU, are of
the full recomputation; and early stop leaves the recomputation by an exception, so that post-forward hooks of
FSDP units nested in the block would not run.

By operator (`op`) a block keeps, besides its input, the outputs of matrix products and attention, and
computes again only what is cheap: norms, activations, sums.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from workloads.base import WorkloadError

_COSTLY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Matrix products, convolutions, and fused attention in its forms."""
_COSTLY_OPERATORS = [
    getattr(torch.ops.aten, name).default for name in _COSTLY if hasattr(torch.ops.aten, name)
]
"""Those that this torch has."""


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks are checkpointed: none (`every` = 0), or blocks 0, `every`, 2 x `every`, ...

    `by_operator`: a checkpointed block keeps the outputs of its costly operators.
    """

    every: int = 0
    by_operator: bool = False

    @classmethod
    def parse(cls, text: str) -> ActivationCheckpointing:
        """From the setting's value: `none`, `full`, `every-K` or `op`.

        Raises:
            WorkloadError: it is none of these.
        """
        if text == "none":
            return cls(0)
        if text == "full":
            return cls(1)
        if text == "op":
            return cls(1, by_operator=True)
        match = re.fullmatch(r"every-([1-9]\d*)", text)
        if match is None:
            raise WorkloadError(
                f"activation_checkpointing '{text}' is not known: use none, full, every-K (K from 1) or op"
            )
        return cls(int(match.group(1)))

    def applies_to(self, index: int) -> bool:
        """Whether block number `index` is checkpointed."""
        return self.every > 0 and index % self.every == 0

    def recomputed(self, blocks: int) -> int:
        """Of `blocks` blocks, how many have their matrix products and attention computed again."""
        return 0 if self.every == 0 or self.by_operator else -(-blocks // self.every)


class CheckpointedBlock(nn.Module):
    """A block that a model stacks, the natural FSDP unit. Its computation is `transform`, which `forward`
    runs as it is or checkpointed.

    Args:
        checkpointing: the model's setting.
        index: the block's number in its stack.
    """

    def __init__(self, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__()
        self.checkpointed = checkpointing.applies_to(index)
        self.by_operator = checkpointing.by_operator
        self.random = False

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return run_checkpointed(
                self.transform, x, *context, by_operator=self.by_operator, random=self.random
            )
        return self.transform(x, *context)

    @abstractmethod
    def transform(self, x: Tensor, *context: Any) -> Tensor:
        """The block's computation itself; `context` is what all blocks of a stack are given alike."""


def run_checkpointed(
    function: Callable[..., Tensor],
    *args: Tensor | None,
    by_operator: bool = False,
    random: bool = False,
) -> Tensor:
    """Run `function` and keep its arguments only (and costly outputs, by operator); what else it saves for
    backward is computed again then.

    `random`: it draws random numbers (dropout), and must draw the same again; their state is kept too.
    """
    selection: dict[str, Any] = {}
    if by_operator:
        selection["context_fn"] = partial(create_selective_checkpoint_contexts, _COSTLY_OPERATORS)
    if not torch.compiler.is_compiling():
        selection["early_stop"] = False  # the compiler decides itself what it computes again
    output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random, **selection)
    return output
