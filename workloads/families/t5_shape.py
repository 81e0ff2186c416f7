"""The shape of a T5, and the sizes that were published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.workloads.shape import check_positive, check_share, check_word
from fsdpbench.workloads.tensor_plan import ShapeError

ATTENTIONS = ("fused", "explicit")


@dataclass(frozen=True)
class T5Shape:
    """The shape of a T5.

    Fields: `layers` of the encoder, and as many of the decoder; `d_kv`: width of a head, heads x d_kv need
    not be d_model; `gated`: the feed-forward is GELU(gate) x up instead of ReLU(up); `tied`: the lm head
    shares the token embedding; `buckets` of distances; `bias_each_layer`: every block has a position bias
    of its own, as UMT5's (Chung et al. 2023); `max_seq`: default length of source and target each;
    `attention`: `fused` gives the bias to `scaled_dot_product_attention`, `explicit` computes scores, softmax
    (in fp32) and mixture one after another with the scores in memory, as Hugging Face's T5 does; `dropout`:
    of embeddings, attention weights, hidden layers and residuals; `fp32_loss`: logits are cast to fp32 before
    the loss.

    Raises:
        ShapeError: a number is out of range, buckets are not a multiple of 4, or `attention` is unknown.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    d_kv: int = 64
    vocab: int = 32128
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    bias_each_layer: bool = False
    max_seq: int = 512
    attention: str = "fused"
    dropout: float = 0.0
    fp32_loss: bool = True

    def __post_init__(self) -> None:
        check_share(self, "dropout")
        check_positive(self, "layers", "d_model", "d_ff", "heads", "d_kv", "vocab", "buckets", "max_seq")
        if self.buckets % 4:
            raise ShapeError(
                f"shape field buckets is {self.buckets}: it must be a multiple of 4 "
                "(two directions, near and far)"
            )
        check_word(self, "attention", ATTENTIONS)

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.d_kv

    @property
    def attention_weights(self) -> int:
        """Weights of one attention: queries, keys, values and output."""
        return 4 * self.d_model * self.inner

    @property
    def feed_forward_weights(self) -> int:
        return (3 if self.gated else 2) * self.d_model * self.d_ff


# t5-small to t5-11b and t5-v1.1 as published (Raffel et al. 2020; Hugging Face's configurations); 611m and
# 2.28b have the sizes that the FSDP paper (arXiv 2304.11277) names, in shapes of our choice.
SIZES: Mapping[str, T5Shape] = {
    "t5-tiny": T5Shape(2, 128, 256, 4, d_kv=32, vocab=512, max_seq=64),
    "t5-small": T5Shape(6, 512, 2048, 8),
    "t5-base": T5Shape(12, 768, 3072, 12),
    "t5-611m": T5Shape(24, 1024, 2816, 16),
    "t5-large": T5Shape(24, 1024, 4096, 16),
    "t5-2.28b": T5Shape(24, 2048, 5120, 32),
    "t5-3b": T5Shape(24, 1024, 16384, 32, d_kv=128),
    "t5-v1.1-xxl": T5Shape(24, 4096, 10240, 64, gated=True, tied=False),
    "t5-11b": T5Shape(24, 1024, 65536, 128, d_kv=128),
}
