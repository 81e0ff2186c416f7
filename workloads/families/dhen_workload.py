"""DHEN: a recommendation model of stacked interactions of feature embeddings (Zhang et al. 2022, 2203.11014).

FLOPs: per sample 6 for each weight of a product on whole samples, 6 for each token and weight of a product on
tokens, and 12 x tokens^2 x width for attention. The numbers' first layer needs no gradient of its input.
Look-ups do not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpbench.workloads.base import BlockFlops, ForwardFlops, SampleWorkload, Shaped
from fsdpbench.workloads.shape import DTYPE_BYTES, ShapeError, check_divides, check_least, check_word

if TYPE_CHECKING:
    from fsdpbench.workloads.inputs import Batch, Feed

STATE_BYTES = 4
"""Bytes of the sparse optimizer's state per row."""


@dataclass(frozen=True)
class DHENShape:
    """The shape of a DHEN.

    Fields: `tokens` in the blocks, each of size `width`; attention `heads`; `features`: categories per
    sample, each with a sparse table of `rows`; `numbers` per sample; `hidden`: width of the head's hidden
    layer; `table_dtype`: dtype of the sparse tables.

    Raises:
        ShapeError: a number is too small, heads do not divide the width, or `table_dtype` is unknown.
    """

    layers: int
    tokens: int
    width: int
    heads: int
    features: int = 26
    rows: int = 1000
    numbers: int = 13
    hidden: int = 512
    table_dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_least(self, "layers", "tokens", "width", "heads", "features", "rows", "numbers", "hidden")
        check_divides(self, "heads", "width")
        if self.tokens < 2:
            raise ShapeError("shape field tokens is 1: one is of the numbers, at least one of the features")
        check_word(self, "table_dtype", DTYPE_BYTES)

    @property
    def flat(self) -> int:
        """Return the total width of all tokens."""
        return self.tokens * self.width


class DHENWorkload(Shaped[DHENShape], SampleWorkload):
    """A DHEN of one shape, with clicks as data. `parameters` counts dense ones, which FSDP shards."""

    family = "dhen"
    shape_type = DHENShape
    code = "fsdpbench.workloads.families.dhen"
    model_class = "DHEN"
    names_of_blocks = ("DHENBlock",)

    @property
    def parameters(self) -> int:
        s, w = self.spec, self.spec.width
        attention = 4 * w * w + 4 * w
        block = attention + s.tokens * (s.tokens + 1) + s.flat * (s.flat + 1) + 2 * w
        numbers = 4 * w * (s.numbers + 1) + w * (4 * w + 1)
        head = s.hidden * (s.flat + 1) + s.hidden + 1
        return s.layers * block + s.features * (s.tokens - 1) + numbers + head

    @property
    def training_state_bytes(self) -> int:
        s = self.spec
        row_bytes = DTYPE_BYTES[s.table_dtype] * s.width + STATE_BYTES
        return super().training_state_bytes + row_bytes * s.features * s.rows

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        from fsdpbench.workloads.inputs import click_batches

        self.resolve_seq(seq)
        s = self.spec
        return click_batches(feed, numbers=s.numbers, features=s.features, rows=s.rows)

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 per weight and position, attention in full. The numbers' first layer needs no input gradient.
        self.resolve_seq(seq)
        s, w = self.spec, self.spec.width
        numbers_in = 2 * s.numbers * 4 * w
        ends = 2 * (s.features * (s.tokens - 1) * w + 4 * w * w + s.hidden * (s.flat + 1))
        products = (s.tokens**2 * w, s.flat**2, s.tokens * 3 * w * w, s.tokens * w * w)
        block = BlockFlops(
            tuple(2 * batch * product for product in products),
            attention=4 * batch * s.tokens**2 * w,
            ends_needed=True,
        )
        rest = batch * (ends + numbers_in)
        return ForwardFlops([[block] * s.layers], rest, first=batch * numbers_in)
