r"""Mixture of experts instead of a feed-forward, with a prescribed load of its experts.

The router's weights are computed and trained, but a setting decides which tokens go to which expert
(balanced, or skewed by a seed). So no shape depends on data, simulated GPUs can run it, and two systems do
the same work. (Trainers have the same switch for benchmarks.) Of T tokens with k experts each, the T x k rows
that experts read are ordered by expert, and row p belongs to token p % T: an expert's rows come from
different tokens as long as no expert has more than T rows.

    x -> router -> weights of the given experts ----------------------+
     \-> rows by expert -> gate and up -> down, one product per expert -> x weight -> summed by token

With a balanced load, the experts' products are one batched product; with a skewed load, one product per
expert. No row is dropped, unless experts have buffers of a capacity (`Buffers`), which allow one batched
product for any load. A shared expert in addition is a feed-forward for all tokens.

With expert parallelism (`Mixture.exchange`) each rank holds some of the experts: rows are sent to the ranks
of their experts, and the results are sent back.
"""

import itertools
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.decoder.workload import capacity_of, expert_loads
from fsdpbench.workloads.layers import WEIGHT_STD, Projection, held

_ALPHA, _LIMIT = 1.702, 7.0
"""GPT-OSS's gate: x sigmoid(1.702 x), with values limited to 7."""


class Exchange(Protocol):
    """Exchange of rows with the ranks that hold their experts. All ranks have the same loads."""

    def order(self, loads: list[int]) -> list[int]:
        """Return the loads in the ranks' order of experts."""

    def held(self, loads: list[int]) -> list[int]:
        """Return the number of rows from all ranks for each expert on this rank."""

    def send(self, rows: Tensor, loads: list[int]) -> Tensor:
        """Send rows of all experts, [rows, d_model]; return those for this rank's experts, by expert."""

    def back(self, rows: Tensor, loads: list[int]) -> Tensor:
        """Send results of this rank's experts back; return the results for the rows given to `send`."""


class Experts(nn.Module):
    """All experts of a layer, or this rank's: rows sorted by expert, [rows, d_model], to the same shape.

    Weights are stored as [experts x inputs, outputs], so that any number of ranks can shard them evenly, even
    more ranks than experts.
    """

    def __init__(self, shape: DecoderShape, output_std: float) -> None:
        super().__init__()
        self.d_model, self.d_ff, self.output_std = shape.d_model, shape.expert_d_ff, output_std
        self.activation, self.clamped = shape.activation, shape.clamped
        wide = 2 * shape.expert_d_ff
        self.gate_up = nn.Parameter(torch.empty(shape.experts * shape.d_model, wide))
        self.down = nn.Parameter(torch.empty(shape.experts * shape.expert_d_ff, shape.d_model))
        self.gate_up_bias = nn.Parameter(torch.empty(shape.experts * wide)) if shape.expert_bias else None
        self.down_bias = (
            nn.Parameter(torch.empty(shape.experts * shape.d_model)) if shape.expert_bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from normal distributions, and set biases to 0."""
        nn.init.normal_(self.gate_up, std=WEIGHT_STD)
        nn.init.normal_(self.down, std=self.output_std)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, rows: Tensor, loads: list[int]) -> Tensor:
        count = len(loads)
        weights = [
            held(self.gate_up).view(count, self.d_model, -1),
            held(self.down).view(count, self.d_ff, -1),
        ]
        biases = [
            None if bias is None else held(bias).view(count, 1, -1)
            for bias in (self.gate_up_bias, self.down_bias)
        ]
        if len(set(loads)) == 1:
            hidden = _product(rows.view(count, loads[0], -1), weights[0], biases[0])
            return _product(self._gate(hidden), weights[1], biases[1]).flatten(0, 1)
        parts = rows.split(loads)
        each = [
            zip(weight, [None] * count if bias is None else bias, strict=True)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        results = [
            _row_product(self._gate(_row_product(part, *up)), *down)
            for part, up, down in zip(parts, *each, strict=True)
            if len(part)
        ]
        return torch.cat(results)

    def _gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        if not self.clamped:
            return activate(self.activation, gate) * up
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply one matrix per expert: [experts, rows, in] x [experts, in, out]."""
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


def _row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias.view(-1), x, weight)


class Mixture(nn.Module):
    """Router and experts of layer number `layer`; keeps the shape [batch, seq, d_model]."""

    def __init__(self, shape: DecoderShape, output_std: float, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.router = Projection(shape.d_model, shape.experts, shape.router_bias)
        self.experts = Experts(shape, output_std)
        self.shared = DecoderFeedForward(shape, output_std, shape.shared_d_ff) if shape.shared_d_ff else None
        self.shared_gate = Projection(shape.d_model, 1, False) if shape.shared_gate else None
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count, chosen = len(tokens), self.shape.experts_per_token
        loads = expert_loads(self.shape, count, self.layer)
        buffers = None
        if self.shape.capacity:
            buffers = Buffers(loads, capacity_of(self.shape, count), x.device)
        elif self.exchange is not None:
            loads = self.exchange.order(loads)
        token, expert = given_assignment(loads, count, chosen, x.device)
        odds = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights = odds.flatten().index_select(0, token * self.shape.experts + expert)
        if self.shape.renormalised:
            by_slot = weights.view(chosen, count)
            weights = (by_slot / by_slot.sum(0, keepdim=True)).flatten()
        if buffers is None:
            rows = self._apply_experts(tokens.index_select(0, token), loads)
        else:
            token, weights = buffers.kept(token), buffers.kept(weights)
            filled = buffers.fill(tokens.index_select(0, token))
            rows = buffers.read(self._apply_experts(filled, buffers.loads))
        rows = rows * weights.to(x.dtype)[:, None]
        added = torch.zeros_like(tokens).index_add_(0, token, rows)
        if self.shared is not None:
            shared: Tensor = self.shared(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            added = added + shared
        return F.dropout(added.view_as(x), self.shape.residual_dropout, self.training)

    def _apply_experts(self, rows: Tensor, loads: list[int]) -> Tensor:
        if self.exchange is None:
            own: Tensor = self.experts(rows, loads)
            return own
        result: Tensor = self.experts(self.exchange.send(rows, loads), self.exchange.held(loads))
        return self.exchange.back(result, loads)


def given_assignment(
    loads: list[int], tokens: int, chosen: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the token and expert of each row, int64 of [tokens x chosen], ordered by expert."""
    token = torch.arange(tokens * chosen, device=device) % tokens
    if len(set(loads)) == 1:
        row = torch.arange(tokens * chosen, device=device)
        return token, torch.div(row, loads[0], rounding_mode="floor")
    expert = torch.cat([torch.full((load,), number, device=device) for number, load in enumerate(loads)])
    return token, expert


def activate(name: str, x: Tensor) -> Tensor:
    """Apply the activation called `name` in a shape."""
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu-tanh" else "none")


class DecoderFeedForward(nn.Module):
    """Feed-forward down(act(gate) x up), or down(act(up)), of [..., d_model].

    `width` replaces the shape's d_ff for a mixture's shared expert, which has the mixture's dropout.
    """

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


class Buffers:
    """Buffers of one size for all experts: rows that fit are computed, others are dropped.

        rows by expert  a a a a a b c c      capacity 3: a a a | b . . | c c .      two rows of a are dropped

    (GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021.) A dropped row adds nothing to its token, which
    only passes through the residual connection. Empty rows are zeros and are computed like others.

    Args:
        loads: number of rows of each expert, in the order of the rows.
        capacity: number of rows in one expert's buffer.
    """

    def __init__(self, loads: list[int], capacity: int, device: torch.device) -> None:
        self.loads = [capacity] * len(loads)
        self._size = capacity * len(loads)
        self._rows: Tensor | None = None
        self._places: Tensor | None = None
        kept = [min(load, capacity) for load in loads]
        if kept != loads:
            starts = [sum(loads[:index]) for index in range(len(loads))]
            self._rows = _runs(starts, kept, device)
        if kept != self.loads:
            self._places = _runs([capacity * index for index in range(len(loads))], kept, device)

    def kept(self, by_row: Tensor) -> Tensor:
        """Select the rows of `by_row`, [rows, ...], that fit."""
        return by_row if self._rows is None else by_row.index_select(0, self._rows)

    def fill(self, rows: Tensor) -> Tensor:
        """Copy the rows that fit, [kept, width], into their experts' buffers, [experts x capacity, width]."""
        if self._places is None:
            return rows
        return rows.new_zeros(self._size, rows.shape[1]).index_copy(0, self._places, rows)

    def read(self, buffers: Tensor) -> Tensor:
        """Read the rows that fit, [kept, width], from `buffers`, [experts x capacity, width]."""
        return buffers if self._places is None else buffers.index_select(0, self._places)


def _runs(starts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """Return int64: for each i, `lengths[i]` consecutive numbers starting at `starts[i]`."""
    if len({*lengths}) == 1 and len({b - a for a, b in itertools.pairwise(starts)}) == 1:
        first = torch.arange(len(starts), device=device) * (starts[1] - starts[0]) + starts[0]
        return (first[:, None] + torch.arange(lengths[0], device=device)).flatten()
    runs = zip(starts, lengths, strict=True)
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])
