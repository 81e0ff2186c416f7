"""T5: an encoder-decoder transformer with relative position bias (Raffel et al. 2020).

FLOPs as for the other families: per token 6 for each weight of a matrix product that it passes through; for
attention 12 x heads x d_kv per pair of tokens and layer, in full although the decoder's is causal. The
decoder's cross-attention computes keys and values from the source's tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpbench.workloads.base import BlockFlops, ForwardFlops, Shaped, TokenWorkload
from fsdpbench.workloads.shape import ShapeError, check_least, check_share, check_word, error_text
from fsdpbench.workloads.tensor_plan import BlockPlan, TensorPlan

if TYPE_CHECKING:
    from fsdpbench.workloads.inputs import Batch, Feed

ATTENTIONS = ("fused", "explicit")


@dataclass(frozen=True)
class T5Shape:
    """The shape of a T5.

    Fields: `layers` of the encoder, and of the decoder; `d_kv`: width of a head (heads x d_kv may differ from
    d_model); `gated`: the feed-forward is GELU(gate) x up instead of ReLU(up); `tied`: the lm head shares the
    token embedding; `buckets` of distances; `bias_each_layer`: every block has its own position bias, as in
    UMT5 (Chung et al. 2023); `max_seq`: default length of source and of target; `attention`: `fused` passes
    the bias to `scaled_dot_product_attention`, `explicit` computes scores, softmax (in fp32) and the product
    with values separately, with the scores in memory, as in Hugging Face's T5; `dropout`: of embeddings,
    attention weights, hidden layers and residuals; `fp32_loss`: logits are fp32 in the loss.

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
        check_least(self, "layers", "d_model", "d_ff", "heads", "d_kv", "vocab", "buckets", "max_seq")
        if self.buckets % 4:
            raise ShapeError(error_text("t5_workload.buckets", self.buckets))
        check_word(self, "attention", ATTENTIONS)

    @property
    def inner(self) -> int:
        """Return the total width of all heads."""
        return self.heads * self.d_kv

    @property
    def attention_weights(self) -> int:
        """Return the number of weights of one attention: queries, keys, values and output."""
        return 4 * self.d_model * self.inner

    @property
    def feed_forward_weights(self) -> int:
        return (3 if self.gated else 2) * self.d_model * self.d_ff


FAMILY = "t5"


class T5Workload(Shaped[T5Shape], TokenWorkload):
    """A T5 of one shape: the encoder reads `seq` tokens, the decoder predicts the next `seq` tokens.

    This is prefix language modelling (Raffel et al. 2020, section 3.2.1), for which any text is suitable.
    """

    family = FAMILY
    shape_type = T5Shape
    code = "fsdpbench.workloads.families.t5"
    model_class = "T5"
    names_of_blocks = ("T5EncoderBlock", "T5DecoderBlock")

    @property
    def parameters(self) -> int:
        s = self.spec
        encoder = s.attention_weights + s.feed_forward_weights + 2 * s.d_model
        decoder = 2 * s.attention_weights + s.feed_forward_weights + 3 * s.d_model
        stacks = 2 * (s.buckets * s.heads * (s.layers if s.bias_each_layer else 1) + s.d_model)
        return s.layers * (encoder + decoder) + stacks + s.vocab * s.d_model * (1 if s.tied else 2)

    @property
    def default_seq(self) -> int:
        return self.spec.max_seq

    def tensor_plan(self) -> TensorPlan:
        s = self.spec
        stacks = [self._block_plan(decodes=False)] * s.layers + [self._block_plan(decodes=True)] * s.layers
        biases = (
            ()
            if s.bias_each_layer
            else ("encoder.position_bias.by_bucket", "decoder.position_bias.by_bucket")
        )
        return TensorPlan(
            tuple(stacks),
            {"token_embedding": 1},
            ("encoder.final_norm", "decoder.final_norm"),
            "lm_head",
            s.tied,
            {"heads": s.heads, "d_ff": s.d_ff, "vocab": s.vocab},
            columns=biases,
            gathered=("encoder",),
        )

    def _block_plan(self, *, decodes: bool) -> BlockPlan:
        s = self.spec
        attentions = ("attention", "cross_attention") if decodes else ("attention",)
        inner = {f"{name}.{part}": (s.inner,) for name in attentions for part in ("query", "key", "value")}
        hidden = {f"feed_forward.{part}": (s.d_ff,) for part in (("gate", "up") if s.gated else ("up",))}
        bias = {"position_bias.by_bucket": (s.heads,)} if s.bias_each_layer else {}
        return BlockPlan(
            readers=(*attentions, "feed_forward"),
            columns=inner | hidden | bias,
            rows=(*(f"{name}.output" for name in attentions), "feed_forward.down"),
            norms=(*(f"{name}_norm" for name in attentions), "feed_forward_norm"),
        )

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        from fsdpbench.workloads.inputs import pair_batches

        return pair_batches(feed, vocab=self.spec.vocab, seq=self.resolve_seq(seq))

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 per token and weight of each stack, attention in full; a decoder block has two attentions.
        s, seq = self.spec, self.resolve_seq(seq)
        tokens = batch * seq
        attention = (2 * tokens * s.d_model * s.inner,) * 4
        feed_forward = (2 * tokens * s.d_model * s.d_ff,) * (3 if s.gated else 2)
        scores = 4 * tokens * s.inner * seq
        random = s.dropout > 0
        encoder = BlockFlops(attention + feed_forward, scores, ends_needed=random)
        decoder = BlockFlops(attention * 2 + feed_forward, 2 * scores, ends_needed=random)
        stacks = [[encoder] * s.layers, [decoder] * s.layers]
        head = 2 * tokens * s.vocab * s.d_model
        return ForwardFlops(stacks, rest=head, head=head)

    def tokens(self, batch: int, seq: int | None = None) -> int:
        """Return the number of source and target tokens in one microbatch."""
        return 2 * batch * self.resolve_seq(seq)
