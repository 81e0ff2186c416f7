"""Llama 2 and 3: a decoder-only transformer with RMSNorm, SwiGLU, grouped queries and rotary positions.

Touvron et al. 2023 (arXiv 2307.09288), Grattafiori et al. 2024 (arXiv 2407.21783). FLOPs as for GPT: per
token 6 for each weight of a matrix product and 12 x layers x d_model x seq for attention, in full although it
is causal.
"""

from dataclasses import dataclass
from functools import cached_property

from fsdpbench.workloads.base import NextTokenWorkload
from fsdpbench.workloads.decoder import DecoderShape, DecoderWorkload
from fsdpbench.workloads.shape import ShapeError, check_divides, check_least, check_word, error_text
from fsdpbench.workloads.tensor_plan import Product, TensorPlan

FAMILY = "llama"
NORMS = ("fused", "composed")
ROTARY = ("halves", "complex", "matrices")


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama.

    Fields: `kv_heads`: heads of keys and values, each for heads / kv_heads query heads; `d_ff`: feed-forward
    width; `rope_theta`: base of the rotary angles; `tied`: the lm head shares the token embedding; `max_seq`:
    default sequence length; `fp32_loss`: cast logits to fp32 before the loss.

    Variants in published code: `norms`: `fused` (torch's one kernel), or `composed` of operators in fp32;
    `rotary`: `halves` in the model's dtype, `complex` numbers in fp32 (Meta's code, TorchTitan's) or 2 x 2
    `matrices` in fp32 (foundation-model-stack's); `repeat_kv`: copy keys and values for every query head
    before attention.

    Raises:
        ShapeError: a number is below 1, heads are not divisible as required, a head's width is odd, or a word
            is unknown.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    rope_theta: int = 10000
    tied: bool = False
    max_seq: int = 4096
    fp32_loss: bool = True
    norms: str = "fused"
    rotary: str = "halves"
    repeat_kv: bool = False

    def __post_init__(self) -> None:
        check_word(self, "norms", NORMS)
        check_word(self, "rotary", ROTARY)
        check_least(self, "layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "rope_theta", "max_seq")
        check_divides(self, "heads", "d_model")
        check_divides(self, "kv_heads", "heads")
        if self.head_width % 2:
            raise ShapeError(error_text("llama_workload.odd", self.d_model, self.heads, self.head_width))

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    @property
    def decoder(self) -> DecoderShape:
        """Return the shape of a decoder with the same layers."""
        sizes = (self.layers, self.d_model, self.d_ff, self.heads, self.kv_heads, self.vocab)
        return DecoderShape(*sizes, tied=self.tied, max_seq=self.max_seq)


class LlamaWorkload(NextTokenWorkload[LlamaShape]):
    """A Llama of one shape, with tokens as data."""

    family = FAMILY
    shape_type = LlamaShape
    code = "fsdpbench.workloads.families.llama"
    model_class = "Llama"
    names_of_blocks = ("LlamaBlock",)

    @cached_property
    def _decoder(self) -> DecoderWorkload:
        return DecoderWorkload(self.name, self.spec.decoder)

    @property
    def parameters(self) -> int:
        return self._decoder.parameters

    def products(self, layer: int) -> list[Product]:
        return self._decoder.products(layer)

    def tensor_plan(self) -> TensorPlan:
        return self._decoder.tensor_plan()
