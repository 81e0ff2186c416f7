"""The T5 module itself: positions, masks, tying, and its two ways of attention."""

import math

import pytest
import torch
from torch.nn import functional as F

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.families.t5 import distance_buckets


def build(seed=0, **fields):
    torch.manual_seed(seed)
    return get_workload("t5-tiny", shape=fields).build()


@pytest.fixture
def tokens():
    """Source, target inputs and targets, as the workload makes them."""
    return next(get_workload("t5-tiny").batches(2, 12, 1, 0, "cpu"))


def test_loss_is_cross_entropy_of_the_logits(tokens):
    source, target_inputs, targets = tokens
    model = build()
    logits = model(source, target_inputs)
    assert logits.shape == (2, 12, 512)
    expected = F.cross_entropy(logits.reshape(-1, 512), targets.reshape(-1))
    torch.testing.assert_close(model(source, target_inputs, targets), expected, rtol=0, atol=0)


def test_target_follows_the_source_and_starts_with_the_start_token(tokens):
    source, target_inputs, targets = tokens
    assert source.shape == target_inputs.shape == targets.shape == (2, 12)
    assert target_inputs[:, 0].tolist() == [0, 0]
    assert torch.equal(target_inputs[:, 1:], targets[:, :-1])


def test_text_is_cut_into_source_and_target(tmp_path):
    text = tmp_path / "text.bin"
    text.write_bytes(bytes(range(200)))
    batches = get_workload("t5-tiny").batches(3, 5, 0, 0, "cpu", text)
    for _ in range(4):
        source, _, targets = next(batches)
        assert (source[:, 0] % 10 == 0).all()  # windows of 10 bytes, none overlapping
        assert torch.equal(targets, source + 5)


def test_decoder_sees_no_later_target_and_the_whole_source(tokens):
    source, target_inputs, _ = tokens
    model = build()
    before = model(source, target_inputs)
    changed = target_inputs.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 512
    after = model(source, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 512
    assert (model(other, target_inputs)[:, 0] - before[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("gated", [True, False])
def test_fused_attention_computes_what_explicit_does(tokens, gated):
    losses, gradients = [], []
    for attention in ("fused", "explicit"):
        model = build(attention=attention, gated=gated)
        loss = model(*tokens)
        loss.backward()
        losses.append(loss)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*losses)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_dropout_is_for_training_and_drawn_alike_when_recomputed(tokens):
    gradients = []
    for activation_checkpointing in ("none", "full"):
        torch.manual_seed(0)
        model = get_workload("t5-tiny", shape={"dropout": 0.2}).build(activation_checkpointing)
        torch.manual_seed(1)
        loss = model(*tokens)
        loss.backward()
        gradients.append(model.encoder.blocks[0].feed_forward.up.weight.grad)
        assert not torch.equal(loss, model(*tokens))
    assert torch.equal(*gradients)
    model.eval()
    assert torch.equal(model(*tokens), model(*tokens))


def test_every_parameter_learns(tokens):
    model = build(gated=True, tied=False)
    model(*tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_tied_head_is_the_embedding_with_scaled_logits(tokens):
    tied, free = build(), build(tied=False)
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert free.lm_head.weight is not free.token_embedding.weight
    source, target_inputs, _ = tokens
    seen = []
    tied.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tied(source, target_inputs)
    # The final norm has rows of unit mean square; the head sees them divided by sqrt(d_model).
    assert seen[0].square().mean().item() == pytest.approx(1 / 128, rel=0.01)


def bucket(distance, buckets, causal):
    """Raffel et al. 2020 in words: a direction's first half of buckets hold one distance each, the second
    half grow by equal factors until 128; `distance` is key minus query."""
    offset = 0
    if causal:
        away = max(-distance, 0)
    else:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        away = abs(distance)
    exact = buckets // 2
    if away < exact:
        return offset + away
    step = math.log(away / exact) / math.log(128 / exact) * (buckets - exact)
    return offset + min(exact + int(step + 1e-6), buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets", [8, 32])
def test_distances_fall_into_the_papers_buckets(causal, buckets):
    found = distance_buckets(150, 150, buckets, causal=causal, device=torch.device("cpu"))
    assert found.min() == 0
    assert found.max() == buckets - 1
    wrong = [
        (query, key)
        for query in range(0, 150, 7)
        for key in range(150)
        # Where a distance lies on the border of two buckets, rounding decides.
        if abs(found[query, key] - bucket(key - query, buckets, causal)) > (abs(key - query) in (16, 32, 64))
    ]
    assert wrong == []


def test_bias_depends_on_distance_only():
    model = build()
    bias = model.encoder.position_bias(40, torch.device("cpu"))
    assert bias.shape == (1, 4, 40, 40)
    torch.testing.assert_close(bias[..., 1:, 1:], bias[..., :-1, :-1])
    causal = model.decoder.position_bias(40, torch.device("cpu"))
    later = torch.ones(40, 40, dtype=torch.bool).triu(1)
    assert (causal[..., later] < -1e30).all()
    assert (causal[..., ~later].abs() < 10).all()
