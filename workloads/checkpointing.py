"""Selection of checkpointed blocks and of what they keep (`activation_checkpointing`).

A checkpointed block keeps its input and recomputes its activations in backward (`blocks.py`).

By operator (`op`), a block also keeps the outputs of attention and of every second product with weights, and
recomputes the rest, like TorchTitan's selection. `op-every-K` keeps every K-th product, `op-every-1` all of
them.
"""

import re
from dataclasses import dataclass, replace

from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.workloads.shape import WorkloadError, error_text

PRODUCTS = ("mm", "addmm", "convolution", "_scaled_mm", "_scaled_mm_v2")
"""Operators of products with weights."""
ATTENTION = (
    "bmm", "baddbmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Operators of attention: fused, or its products of activations with each other."""


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Selection of checkpointed blocks: none (`every` = 0), or blocks 0, `every`, 2 x `every`, ...

    `keeps_every`: checkpointed blocks keep the outputs of attention and of products 0, `keeps_every`, 2 x
    `keeps_every`, ... with weights; 0: only their input. `first`: only in the first N blocks of a stack.
    `head`: a token model's logits are recomputed too (`losses.py`). `each`: a separate selection for every
    block of the model, in forward order; the other fields then select no blocks.
    """

    every: int = 0
    keeps_every: int = 0
    first: int | None = None
    head: bool = False
    each: "tuple[ActivationCheckpointing, ...]" = ()

    @classmethod
    def parse(cls, text: str) -> "ActivationCheckpointing":
        """Parse `none`, `full`, `every-K`, `op` or `op-every-K`, optionally with `:N` (only the first N
        blocks of a stack) and `+head` (the logits); or a selection for each block, as `full:20+none:12`.

        Raises:
            WorkloadError: the text has another form.
        """
        blocks, head, _ = text.partition("+head")
        if is_mixed(blocks) and "+" in blocks:
            return cls(head=bool(head), each=tuple(map(cls.parse, spread(blocks))))
        match = re.fullmatch(r"(none|full|op|(op-)?every-([1-9][0-9]*))(:([1-9][0-9]*))?(\+head)?", text)
        if match is None:
            raise WorkloadError(error_text("checkpointing.unknown", text))
        kind, by_operator, number, _, first, _ = match.groups()
        if kind in _NAMED:
            every, keeps_every = _NAMED[kind]
        else:
            every, keeps_every = (1, int(number)) if by_operator else (int(number), 0)
        return cls(every, keeps_every, int(first) if first else None, bool(head))

    @property
    def by_operator(self) -> bool:
        """Return whether checkpointed blocks keep outputs of operators."""
        return self.keeps_every > 0

    def keeps_product(self, index: int) -> bool:
        """Return whether a checkpointed block keeps the output of its product number `index`."""
        return self.by_operator and index % self.keeps_every == 0

    def applies_to(self, index: int) -> bool:
        """Return whether block number `index` is checkpointed."""
        own = self.of_block(index)
        return own.every > 0 and index % own.every == 0 and (own.first is None or index < own.first)

    def of_block(self, index: int) -> "ActivationCheckpointing":
        """Return the selection for block number `index` of the stack."""
        return self.each[index] if index < len(self.each) else self

    def after(self, blocks: int) -> "ActivationCheckpointing":
        """Return the selection for the stack that follows a stack with this number of blocks."""
        return replace(self, each=self.each[blocks:])


_NAMED = {"none": (0, 0), "full": (1, 0), "op": (1, 2)}
