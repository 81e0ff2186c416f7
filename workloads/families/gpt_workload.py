"""GPT: a decoder-only transformer like GPT-2 and GPT-3, with pre-norm, GELU and fused QKV.

FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): per token 6 for each weight of a matrix product and
12 x layers x d_model x seq for attention, in full although it is causal. The lm head is a matrix product and
counts; the embedding lookup does not.
"""

from dataclasses import dataclass, replace

from fsdpbench.workloads.base import BlockFlops, NextTokenWorkload
from fsdpbench.workloads.shape import check_divides, check_least, check_share, check_word
from fsdpbench.workloads.tensor_plan import BlockPlan, Product, TensorPlan

FAMILY = "gpt"
POSITIONS = ("learned", "none")
ATTENTIONS = ("fused", "explicit")


@dataclass(frozen=True)
class GPTShape:
    """The shape of a GPT.

    Fields: `vocab` entries; `tied`: the lm head shares the token embedding; `bias`: in linear layers and
    norms (never in the lm head); `positions`: `learned` embeddings or `none`; `expansion`: feed-forward width
    / d_model; `max_seq`: default sequence length, and number of learned positions; `fp32_loss`: cast logits
    to fp32 before the loss, as most mixed-precision training does (batch x seq x vocab x 4 B of memory);
    `attention`: `fused` (one kernel), or `explicit` with the [seq, seq] weights in memory, as in minGPT and
    models before flash attention; `dropout`: of embeddings, attention, residuals.

    Raises:
        ShapeError: a number is out of range, heads do not divide d_model, or a word is unknown.
    """

    layers: int
    d_model: int
    heads: int
    vocab: int = 50304
    tied: bool = False
    bias: bool = True
    positions: str = "learned"
    expansion: int = 4
    max_seq: int = 2048
    fp32_loss: bool = True
    attention: str = "fused"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_share(self, "dropout")
        check_word(self, "attention", ATTENTIONS)
        check_least(self, "layers", "d_model", "heads", "vocab", "expansion", "max_seq")
        check_divides(self, "heads", "d_model")
        check_word(self, "positions", POSITIONS)


class GPTWorkload(NextTokenWorkload[GPTShape]):
    """A GPT of one shape, with tokens as data."""

    family = FAMILY
    shape_type = GPTShape
    code = "fsdpbench.workloads.families.gpt"
    model_class = "GPT"
    names_of_blocks = ("GPTBlock",)

    @property
    def parameters(self) -> int:
        return self.count_parameters(self.default_seq)

    def count_parameters(self, seq: int) -> int:
        """Return the number of parameters for `seq` tokens, which determines the learned positions."""
        s = self.spec
        norm = s.d_model * (2 if s.bias else 1)
        biases = (3 + 1 + s.expansion + 1) * s.d_model if s.bias else 0
        block = self.product_weights(0) + biases + 2 * norm
        embeddings = s.vocab * s.d_model * (1 if s.tied else 2)
        positions = seq * s.d_model if s.positions == "learned" else 0
        return s.layers * block + norm + embeddings + positions

    def products(self, layer: int) -> list[Product]:
        width, wide = self.spec.d_model, self.spec.expansion * self.spec.d_model
        sizes = {
            "qkv": (width, 3 * width),
            "proj": (width, width),
            "up": (width, wide),
            "down": (wide, width),
        }
        return [Product(name, *each) for name, each in sizes.items()]

    def tensor_plan(self) -> TensorPlan:
        s = self.spec
        block = BlockPlan(
            readers=("attention", "feed_forward"),
            columns={"attention.qkv": (s.d_model,) * 3, "feed_forward.up": (s.expansion * s.d_model,)},
            rows=("attention.proj", "feed_forward.down"),
            norms=("attention_norm", "feed_forward_norm"),
        )
        embeddings = {"token_embedding": 1, **({"position_embedding": 0} if s.positions == "learned" else {})}
        return TensorPlan(
            (block,), embeddings, ("final_norm",), "lm_head", s.tied, {"heads": s.heads, "vocab": s.vocab}
        )

    def arguments(self, seq: int | None) -> tuple[object, ...]:
        return (self.spec, self.resolve_seq(seq))  # learned positions have one length

    def block_flops(self, layer: int, tokens: int, seq: int) -> BlockFlops:
        return replace(super().block_flops(layer, tokens, seq), ends_needed=self.spec.dropout > 0)
