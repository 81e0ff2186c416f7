"""Activation checkpointing of a model's blocks: keep a block's input, compute its inside again in backward.

The block calls the checkpoint itself, inside its `forward`:

    FSDP hooks of the unit > Block.forward > checkpoint > attention, feed-forward

so that no wrapper module changes names or classes, and so that a unit's all-gather is issued once by the
hooks outside and not again by the recomputation inside.

A checkpointed block is recomputed in full. torch's early stop would leave out its last matrix product (a
third of a GPT block's forward FLOPs), but published figures, and the 4/3 in the usual formula of HFU, are of
the full recomputation; and early stop leaves the recomputation by an exception, so that post-forward hooks of
FSDP units nested in the block would not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from workloads.base import WorkloadError


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks are checkpointed: none (`every` = 0), or blocks 0, `every`, 2 x `every`, ..."""

    every: int = 0

    @classmethod
    def parse(cls, text: str) -> ActivationCheckpointing:
        """From the setting's value: `none`, `full` or `every-K`.

        Raises:
            WorkloadError: it is none of these.
        """
        if text == "none":
            return cls(0)
        if text == "full":
            return cls(1)
        match = re.fullmatch(r"every-([1-9]\d*)", text)
        if match is None:
            raise WorkloadError(
                f"activation_checkpointing '{text}' is not known: use none, full, or every-K with K from 1"
            )
        return cls(int(match.group(1)))

    def applies_to(self, index: int) -> bool:
        """Whether block number `index` is checkpointed."""
        return self.every > 0 and index % self.every == 0

    def count(self, blocks: int) -> int:
        """How many of `blocks` blocks are checkpointed."""
        return 0 if self.every == 0 else -(-blocks // self.every)


def run_checkpointed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Run `function` and keep its arguments only; what it saves for backward is computed again then.

    No random state is kept: the models have no dropout.
    """
    with set_checkpoint_early_stop(False):
        output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return output
