"""The GPT module itself: what it computes, its names, its initialisation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsdpbench.workloads import WorkloadError, get_workload
from fsdpbench.workloads.families.gpt import GPTBlock

SMALL = {"layers": 3, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16}


def build(seed=0, activation_checkpointing="none", **fields):
    torch.manual_seed(seed)
    return get_workload("gpt", shape=SMALL | fields).build(activation_checkpointing)


@pytest.fixture
def tokens():
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


def test_loss_is_cross_entropy_of_the_logits(tokens):
    model = build()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs)
    assert logits.shape == (2, 15, 64)
    expected = F.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))
    torch.testing.assert_close(model(inputs, targets), expected, rtol=0, atol=0)


def test_untrained_loss_is_near_that_of_guessing(tokens):
    loss = build()(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_no_token_sees_a_later_one(tokens, positions):
    model = build(positions=positions)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-4)


def test_order_matters_only_through_positions_and_causality(tokens):
    """Without positions the last token of one layer sees a set: the order before it is nothing to it."""
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    free = build(positions="none", layers=1)
    torch.testing.assert_close(free(tokens)[:, -1], free(swapped)[:, -1], rtol=0, atol=1e-6)
    learned = build(layers=1)
    assert not torch.allclose(learned(tokens)[:, -1], learned(swapped)[:, -1], atol=1e-6)


def test_tied_embedding_is_one_parameter_with_both_gradients(tokens):
    model = build(tied=True)
    assert model.lm_head.weight is model.token_embedding.weight
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    # The lookup alone would leave rows of absent tokens at zero; the head gives every row a gradient.
    assert model.token_embedding.weight.grad.abs().sum(dim=1).min() > 0


def test_no_bias_means_none_anywhere():
    names = [name for name, _ in build(bias=False).named_parameters()]
    assert names
    assert not [name for name in names if "bias" in name]


def test_blocks_have_the_announced_names_and_class():
    workload = get_workload("gpt", shape=SMALL)
    with torch.device("meta"):
        model = workload.build()
    found = [name for name, module in model.named_modules() if isinstance(module, workload.block_classes)]
    assert found == ["blocks.0", "blocks.1", "blocks.2"]
    assert workload.block_classes == (GPTBlock,)


def test_sequence_longer_than_the_positions_is_refused(tokens):
    model = get_workload("gpt", shape=SMALL).build(seq=8)
    with pytest.raises(WorkloadError, match="16 tokens, the model 8 positions"):
        model(tokens)


def test_weights_are_drawn_as_gpt2_draws_them():
    model = build(d_model=128, layers=8)
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # Two contributions a layer to the residual stream: 0.02 / sqrt(16).
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.attention.proj.bias.abs().max() == 0


def test_a_module_built_on_meta_is_initialised_by_reset_parameters():
    """Every module that owns parameters can reset them, in module order, to what direct building gives."""
    direct = build(seed=7)
    with torch.device("meta"):
        late = get_workload("gpt", shape=SMALL).build()
    late.to_empty(device="cpu")
    for module in late.modules():
        if list(module.parameters(recurse=False)):
            with torch.no_grad():
                nn.init.constant_(next(module.parameters(recurse=False)), float("nan"))
    torch.manual_seed(7)
    for module in late.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    for (name, expected), (_, got) in zip(direct.named_parameters(), late.named_parameters(), strict=True):
        assert torch.equal(expected, got), name


def test_bf16_logits_are_cast_for_the_loss_unless_told_otherwise(tokens):
    assert build().bfloat16()(tokens[:, :-1], tokens[:, 1:]).dtype == torch.float32
    assert build(fp32_loss=False).bfloat16()(tokens[:, :-1], tokens[:, 1:]).dtype == torch.bfloat16


def test_explicit_attention_computes_what_the_fused_one_does() -> None:
    shape = {"layers": 2, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16}
    models = []
    for attention in ("fused", "explicit"):
        torch.manual_seed(0)
        models.append(get_workload("gpt", shape={**shape, "attention": attention}).build())
    tokens = torch.randint(64, (2, 16))
    fused, explicit = (model(tokens) for model in models)
    torch.testing.assert_close(explicit, fused)


def test_dropout_is_drawn_again_alike_when_activations_are_recomputed() -> None:
    shape = {"layers": 2, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16, "dropout": 0.5}
    gradients = []
    for checkpointing in ("none", "full"):
        torch.manual_seed(0)
        model = get_workload("gpt", shape={**shape, "attention": "explicit"}).build(checkpointing)
        tokens = torch.randint(64, (2, 16))
        torch.manual_seed(1)
        model(tokens, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
