"""The Llama module itself: rotary positions, grouped queries, causality."""

import pytest
import torch
from torch.nn import functional as F

from fsdpbench.workloads import ShapeError, get_workload
from fsdpbench.workloads.rotations import ROTATIONS, rotary_tables, rotate


def build(seed=0, **fields):
    torch.manual_seed(seed)
    return get_workload("llama-tiny", shape={"layers": 2} | fields).build()


@pytest.fixture
def tokens():
    return torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(1))


def test_loss_is_cross_entropy_of_the_logits(tokens):
    model = build()
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 15, 512)
    expected = F.cross_entropy(logits.reshape(-1, 512), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected, rtol=0, atol=0)


def test_no_token_sees_a_later_one(tokens):
    model = build()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 512
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-4)


def test_rotation_turns_pairs_by_position():
    """Element k and k + width / 2 as a complex number, times exp(i position theta^(-2k / width))."""
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    cosines, sines = rotary_tables(9, 8, 100, torch.empty(0, dtype=torch.float64))
    turned = rotate(x, cosines, sines)
    speeds = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.arange(9, dtype=torch.float64)[:, None] * speeds
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["complex", "matrices"])
def test_other_forms_turn_neighbours_as_halves_turn_theirs(form: str):
    x = torch.randn(1, 2, 9, 8)
    halves = rotate(x, *rotary_tables(9, 8, 100, x))
    rotation = ROTATIONS[form]
    neighbours = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    turned = rotation.turn(neighbours, *rotation.tables(9, 8, 100, x))
    torch.testing.assert_close(turned.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2), halves)


def test_norms_and_repeated_keys_change_no_result(tokens):
    fused, composed = build(), build(norms="composed", repeat_kv=True)
    composed.load_state_dict(fused.state_dict())
    torch.testing.assert_close(composed(tokens), fused(tokens), rtol=1e-4, atol=1e-5)


def test_unknown_words_are_refused():
    with pytest.raises(ShapeError, match="rotary is 'sines': it must be one of halves, complex, matrices"):
        build(rotary="sines")


def test_scores_depend_on_the_distance_of_tokens_only():
    query, key = torch.randn(2, 8).unbind(0)
    cosines, sines = rotary_tables(30, 8, 10000, query)
    scores = torch.stack(
        [
            rotate(query, cosines[at], sines[at]) @ rotate(key, cosines[at - 3], sines[at - 3])
            for at in range(3, 30)
        ]
    )
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=1e-4, atol=1e-5)


def test_grouped_queries_are_full_ones_with_repeated_keys(tokens):
    grouped, full = build(heads=4, kv_heads=2), build(heads=4, kv_heads=4)
    state = grouped.state_dict()
    for name in state:
        if ".key." in name or ".value." in name:
            state[name] = state[name].view(2, 32, 128).repeat_interleave(2, dim=0).reshape(128, 128)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-5)


def test_tied_head_is_the_embedding():
    tied, free = build(tied=True), build()
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert free.lm_head.weight is not free.token_embedding.weight


def test_every_parameter_learns(tokens):
    model = build()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
