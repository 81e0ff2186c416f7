"""Shape of a decoder-only transformer, with all details in which its families differ."""

from dataclasses import dataclass

from fsdpbench.workloads import shape as shapes
from fsdpbench.workloads.shape import error_text

FAMILY = "decoder"
_LARGEST_PATTERN = 10_000


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder-only transformer.

    Fields, by part:

    * `layers`, `d_model`, `d_ff` (feed-forward width), `vocab`, `tied` (the lm head shares the token
      embedding), `head_bias` (of the lm head), `max_seq` (default length), `fp32_loss`.
    * `heads`, `kv_heads`, `head_width` (0: d_model / heads), `query_scale` (scores are divided by its square
      root; 0: head_width), `qkv_bias`, `output_bias`, `qk_norm` (RMSNorm of queries and keys),
      `fused_projections` (one product for queries, keys and values, one for gate and up), `sinks` (a learned
      score per head that takes weight and adds nothing), `score_cap`, `logit_cap` (soft caps; 0: none).
    * `window`: tokens visible to a layer with sliding attention (0: no such layers), `layer_pattern`: `S`
      sliding, `F` full, repeated over the layers.
    * `rope_theta`, `local_theta` (of sliding layers; 0: the same), `rope` (`Rope`), `rotary_share` of a head.
    * `norm`: `rms`, `rms-offset` (weights are offsets from 1, as in Gemma) or `layer`; `norm_eps`; `norms`:
      `fused`, or `composed` of single operators in fp32, as in Hugging Face's code; `post_norms`: also after
      attention and feed-forward; `parallel`: both read the same norm and are added together (Phi).
    * `gated`: the feed-forward is act(gate) x up; `activation`: `silu`, `gelu`, `gelu-tanh` or `relu`;
      `mlp_bias`; `embedding_scale`: multiply embeddings by the square root of d_model.
    * `attention`: `fused`, or `explicit` with the scores in memory, which caps and sinks require.
    * `embedding_dropout`, `residual_dropout`, `attention_dropout`.
    * `experts` of a mixture (0: none), `expert_d_ff`, `experts_per_token`, `moe_pattern` (`M` mixture, `D`
      dense, repeated), `router_bias`, `expert_bias`, `renormalised` (weights of the chosen experts sum to 1),
      `clamped` (GPT-OSS's limited gate), `shared_d_ff` (total width of the shared experts, which process
      every token; 0: none), `shared_gate` (a sigmoid weighs their output, as in Qwen2-MoE), `router_load`
      (`balanced` or `skewed`), `router_skew` (exponent), `router_seed` (selects the busy experts),
      `capacity` (buffer of an expert, relative to its balanced share; other rows are dropped; 0: no limit).

    Raises:
        ShapeError: a number is out of range, sizes are not divisible, or a word is unknown.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    vocab: int
    head_width: int = 0
    tied: bool = False
    head_bias: bool = False
    max_seq: int = 4096
    fp32_loss: bool = True
    query_scale: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False
    sinks: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    window: int = 0
    layer_pattern: str = "F"
    rope_theta: float = 10000.0
    local_theta: float = 0.0
    rope: str = "default"
    rotary_share: float = 1.0
    norm: str = "rms"
    norm_eps: float = 1e-5
    norms: str = "fused"
    post_norms: bool = False
    parallel: bool = False
    gated: bool = True
    activation: str = "silu"
    mlp_bias: bool = False
    embedding_scale: bool = False
    attention: str = "fused"
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: int = 0
    expert_d_ff: int = 0
    experts_per_token: int = 0
    moe_pattern: str = "D"
    router_bias: bool = False
    expert_bias: bool = False
    renormalised: bool = True
    clamped: bool = False
    router_load: str = "balanced"
    router_skew: float = 1.0
    router_seed: int = 0
    shared_d_ff: int = 0
    shared_gate: bool = False
    capacity: float = 0.0

    def __post_init__(self) -> None:
        shapes.check_least(self, "layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "max_seq")
        shapes.check_divides(self, "kv_heads", "heads")
        shapes.check_share(self, "embedding_dropout", "residual_dropout", "attention_dropout")
        if self.head_width < 1:
            shapes.check_divides(self, "heads", "d_model")
            object.__setattr__(self, "head_width", self.d_model // self.heads)
        shapes.check_least(self, "query_scale", "score_cap", "logit_cap", "window", "local_theta", least=0)
        shapes.check_least(self, "norm_eps", "router_skew", "shared_d_ff", "capacity", least=0)
        for name, words in _WORDS.items():
            shapes.check_word(self, name, words)
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        if not 0 < self.rotary_share <= 1 or self.rotary_width % 2 or self.rotary_width < 2:
            raise shapes.ShapeError(
                error_text("shape.rotary_share", self.rotary_share, self.head_width, self.rotary_width)
            )
        if self.rope_theta <= 1 or 0 < self.local_theta <= 1:
            raise shapes.ShapeError(f"shape field rope_theta is {self.rope_theta}: it must be above 1")
        rope = shapes.Rope.parse(self.rope)
        if rope.kind == "longrope" and {len(rope.short), len(rope.long)} != {self.rotary_width // 2}:
            raise shapes.ShapeError(error_text("shape.longrope", self.rotary_width // 2))
        _check_pattern("layer_pattern", self.layer_pattern, "SF")
        if "S" in self.layer_pattern and not self.window:
            raise shapes.ShapeError("shape field layer_pattern has sliding layers (S): give them a window")
        if self.attention == "fused" and (self.sinks or self.score_cap):
            part = "sinks" if self.sinks else "score_cap"
            raise shapes.ShapeError(
                f"shape field {part} needs attention=explicit: torch's fused kernels have none"
            )
        if self.parallel and self.post_norms:
            raise shapes.ShapeError("shape fields parallel and post_norms do not go together")

    def _check_experts(self) -> None:
        _check_pattern("moe_pattern", self.moe_pattern, "MD")
        if "M" not in self.moe_pattern:
            if self.experts:
                raise shapes.ShapeError(error_text("shape.no_mixture", self.experts, self.moe_pattern))
            return
        shapes.check_least(self, "experts", "expert_d_ff", "experts_per_token")
        shapes.check_layers(self.experts, "experts")
        if self.experts_per_token > self.experts:
            raise shapes.ShapeError(error_text("shape.experts", self.experts_per_token, self.experts))
        if self.shared_gate and not self.shared_d_ff:
            raise shapes.ShapeError("shape field shared_gate needs a shared expert: give shared_d_ff")

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of a head that rotary positions rotate."""
        return int(self.head_width * self.rotary_share)

    @property
    def query_width(self) -> int:
        """Return the total width of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Return the total width of all key (or value) heads."""
        return self.kv_heads * self.head_width

    @property
    def drops(self) -> bool:
        """Return whether a block draws random numbers."""
        return self.residual_dropout > 0 or self.attention_dropout > 0

    def slides(self, layer: int) -> bool:
        """Return whether layer number `layer` has sliding attention."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "S"

    def is_mixture(self, layer: int) -> bool:
        """Return whether layer number `layer` has experts."""
        return self.moe_pattern[layer % len(self.moe_pattern)] == "M"


_WORDS = {
    "norm": ("rms", "rms-offset", "layer"),
    "norms": ("fused", "composed"),
    "activation": ("silu", "gelu", "gelu-tanh", "relu"),
    "attention": ("fused", "explicit"),
    "router_load": ("balanced", "skewed"),
}


def _check_pattern(name: str, pattern: str, letters: str) -> None:
    if not 0 < len(pattern) <= _LARGEST_PATTERN or set(pattern) - set(letters):
        raise shapes.ShapeError(error_text("shape.letters", name, pattern[:80], " and ".join(letters)))
