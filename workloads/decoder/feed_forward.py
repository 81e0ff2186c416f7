"""The dense feed-forward of a block, gated or not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.layers import Projection


def activate(name: str, x: Tensor) -> Tensor:
    """The activation called `name` in a shape."""
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu-tanh" else "none")


class DecoderFeedForward(nn.Module):
    """down(act(gate) x up), or down(act(up)), of [..., d_model]; `width` instead of the shape's d_ff is that
    of a mixture's shared expert, whose dropout is the mixture's."""

    def __init__(self, shape: DecoderShape, output_std: float, width: int = 0) -> None:
        super().__init__()
        d_ff = width or shape.d_ff
        self.activation, self.dropout = shape.activation, 0.0 if width else shape.residual_dropout
        self.gated, self.fused = shape.gated, shape.gated and shape.fused_projections
        if self.fused:
            self.gate_up = Projection(shape.d_model, 2 * d_ff, shape.mlp_bias)
        else:
            if self.gated:
                self.gate = Projection(shape.d_model, d_ff, shape.mlp_bias)
            self.up = Projection(shape.d_model, d_ff, shape.mlp_bias)
        self.down = Projection(d_ff, shape.d_model, shape.mlp_bias, output_std)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            hidden = activate(self.activation, gate) * up
        elif self.gated:
            hidden = activate(self.activation, self.gate(x)) * self.up(x)
        else:
            hidden = activate(self.activation, self.up(x))
        return F.dropout(self.down(hidden), self.dropout, self.training)
