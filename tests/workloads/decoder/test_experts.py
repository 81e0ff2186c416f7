"""The given load of experts, and that what they compute is what each token's experts would."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.decoder import DecoderShape
from fsdpbench.workloads.decoder.experts import Mixture, given_assignment
from fsdpbench.workloads.decoder.workload import BufferRows, buffer_rows_of, capacity_of, expert_loads


def shape(experts=4, chosen=2, **fields):
    return DecoderShape(
        1,
        16,
        32,
        2,
        2,
        64,
        experts=experts,
        expert_d_ff=24,
        experts_per_token=chosen,
        moe_pattern="M",
        **fields,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.data(),
    st.integers(1, 40),
    st.sampled_from(["balanced", "skewed"]),
    st.floats(0, 4),
)
def test_loads_add_up_and_no_token_meets_an_expert_twice(experts, data, tokens, load, skew):
    chosen = data.draw(st.integers(1, experts))
    given_shape = shape(experts, chosen, router_load=load, router_skew=skew)
    loads = expert_loads(given_shape, tokens, layer=3)
    assert len(loads) == experts
    assert sum(loads) == tokens * chosen
    token, expert = given_assignment(loads, tokens, chosen, torch.device("cpu"))
    pairs = set(zip(token.tolist(), expert.tolist(), strict=True))
    assert len(pairs) == tokens * chosen  # each token has `chosen` different experts
    assert torch.bincount(token, minlength=tokens).tolist() == [chosen] * tokens
    assert torch.bincount(expert, minlength=experts).tolist() == loads
    assert expert.tolist() == sorted(expert.tolist())
    if load == "balanced":
        assert max(loads) - min(loads) <= 1


def test_a_skew_is_seeded_and_its_busy_experts_differ_by_layer():
    def loads(seed, layer):
        return expert_loads(shape(16, 2, router_load="skewed", router_seed=seed), 256, layer)

    assert loads(0, 0) == loads(0, 0)
    assert len({tuple(loads(seed, layer)) for seed in (0, 1) for layer in (0, 1)}) == 4
    assert sorted(loads(0, 0)) == sorted(loads(1, 5))
    # Shares fall as 1 / rank: the busiest of 16 has 1 / H(16) of the rows.
    assert max(loads(0, 0)) == round(512 / sum(1 / rank for rank in range(1, 17)))


@pytest.mark.parametrize("load", ["balanced", "skewed"])
@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_output_is_the_weighted_sum_of_each_tokens_experts(load, renormalised, biased):
    """Token by token in plain arithmetic."""
    torch.manual_seed(0)
    fields = {"router_bias": biased, "expert_bias": biased, "clamped": biased}
    wanted = shape(router_load=load, renormalised=renormalised, **fields)
    mixture = Mixture(wanted, 0.1, 0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(2, 6, 16)
    tokens = x.flatten(0, 1)
    experts = mixture.experts
    up = experts.gate_up.view(4, 16, 48)
    down = experts.down.view(4, 24, 16)
    loads = expert_loads(wanted, len(tokens), 0)
    odds = mixture.router(tokens).softmax(-1)
    expected = torch.zeros_like(tokens)
    assigned = list(zip(*(t.tolist() for t in given_assignment(loads, 12, 2, x.device)), strict=True))
    for token, expert in assigned:
        hidden = tokens[token] @ up[expert]
        hidden = hidden + experts.gate_up_bias.view(4, 48)[expert] if biased else hidden
        gate, value = hidden.chunk(2)
        if biased:
            gate, value = gate.clamp(max=7), value.clamp(-7, 7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (value + 1)
        else:
            hidden = torch.nn.functional.silu(gate) * value
        result = hidden @ down[expert]
        result = result + experts.down_bias.view(4, 16)[expert] if biased else result
        own = sum(odds[token, e] for t, e in assigned if t == token)
        expected[token] += result * odds[token, expert] / (own if renormalised else 1.0)
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.6, 50.0])
@pytest.mark.parametrize("load", ["balanced", "skewed"])
def test_what_is_above_an_experts_capacity_is_dropped(load, capacity):
    """Against the same mixture without buffers, whose later rows of each expert have no weight."""
    torch.manual_seed(0)
    wanted = shape(router_load=load, capacity=capacity, renormalised=False)
    mixture, free = Mixture(wanted, 0.5, 0), Mixture(shape(router_load=load, renormalised=False), 0.5, 0)
    free.load_state_dict(mixture.state_dict())
    x = torch.randn(3, 5, 16)
    most = capacity_of(wanted, 15)
    loads = expert_loads(wanted, 15, 0)
    assert most == min(15, -(-capacity * 30 // 4))
    expected = torch.zeros(15, 16)
    token, expert = given_assignment(loads, 15, 2, x.device)
    seen = [0] * 4
    odds = free.router(x.flatten(0, 1)).softmax(-1)
    for t, e in zip(token.tolist(), expert.tolist(), strict=True):
        seen[e] += 1
        if seen[e] <= most:
            alone = [int(e == other) for other in range(4)]
            row = free.experts(x.flatten(0, 1)[t : t + 1], alone)
            expected[t] += row[0] * odds[t, e]
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected, rtol=1e-4, atol=1e-5)
    dropped = sum(max(0, count - most) for count in seen)
    assert buffer_rows_of(loads, most) == BufferRows(30, dropped, 4 * most - 30 + dropped)
    if capacity == 50.0:
        torch.testing.assert_close(mixture(x), free(x), rtol=1e-4, atol=1e-5)


def test_a_shared_expert_is_added_for_every_token_by_its_gate():
    torch.manual_seed(0)
    mixture = Mixture(shape(shared_d_ff=20, shared_gate=True), 0.5, 0)
    plain = Mixture(shape(), 0.5, 0)
    plain.load_state_dict({name: t for name, t in mixture.state_dict().items() if "shared" not in name})
    x = torch.randn(2, 6, 16)
    assert mixture.shared is not None
    shared = mixture.shared.down(torch.nn.functional.silu(mixture.shared.gate(x)) * mixture.shared.up(x))
    expected = plain(x) + torch.sigmoid(x @ mixture.shared_gate.weight.t()) * shared
    torch.testing.assert_close(mixture(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("load", ["balanced", "skewed"])
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_and_flops_of_capacity_and_shared_experts(load, fused):
    values = {
        "layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "kv_heads": 2, "vocab": 64, "experts": 4,
        "expert_d_ff": 24, "experts_per_token": 2, "moe_pattern": "DM", "router_load": load, "capacity": 0.8,
        "shared_d_ff": 20, "shared_gate": True, "fused_projections": fused, "mlp_bias": True,
        "attention": "explicit",
    }  # fmt: skip
    workload = get_workload("decoder", values)
    model = workload.build()
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, 64, (3, 8))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)
    forward = workload.forward_flops(3, 8)
    blocks = (sum(b.products) + b.attention + b.batched for stack in forward.stacks for b in stack)
    computed = sum(blocks) + forward.rest
    assert counter.get_total_flops() == computed
    rows = workload.buffer_rows(24)
    assert rows == buffer_rows_of(expert_loads(workload.spec, 24, 1), 10)
    assert (rows.sent, rows.dropped > 0, rows.empty > 0) == (48, True, load == "skewed")
    flops = workload.flops_per_step(3, 8)
    assert flops.hardware == 3 * computed
    assert flops.model == 3 * computed - 3 * rows.empty * 3 * 2 * 16 * 24  # gate, up and down of a row
