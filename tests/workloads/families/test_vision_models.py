"""RegNet and DeepViT themselves, against torch's own layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.families.deepvit import DeepViTShape, PatchTokens, ReAttention
from fsdpbench.workloads.families.regnet import BatchNorm


def build(name, **fields):
    torch.manual_seed(0)
    return get_workload(name, shape=fields).build()


@pytest.fixture(params=["regnet-tiny", "deepvit-tiny"])
def model(request):
    return build(request.param)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_loss_is_cross_entropy_of_the_logits(model, images):
    labels = torch.tensor([0, 9, 4])
    logits = model(images)
    assert logits.shape == (3, 10)
    torch.testing.assert_close(model(images, labels), F.cross_entropy(logits, labels), rtol=0, atol=0)


def test_every_parameter_learns(model, images):
    model(images, torch.tensor([0, 9, 4])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_is_torchs_in_training(dtype):
    ours, torchs = BatchNorm(6), nn.BatchNorm2d(6)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
            mine.copy_(other.normal_())
    x = torch.randn(4, 6, 5, 5)
    expected = torchs(x)
    tolerance = 1e-6 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(ours.to(dtype)(x.to(dtype)).float(), expected, rtol=0, atol=tolerance)


def test_stages_halve_the_sides_and_widen(images):
    network = build("regnet-tiny", widths="32-48-64", depths="2-1-2")
    shapes = []
    for block in network.blocks:
        block.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[1:])))
    network(images)
    assert shapes == [(32, 8, 8), (32, 8, 8), (48, 4, 4), (64, 2, 2), (64, 2, 2)]


def test_units_of_regnet_9b_are_as_uneven_as_published():
    with torch.device("meta"):
        network = get_workload("regnet-9b").build()
    sizes = [sum(p.numel() for p in block.parameters()) for block in network.blocks]
    assert len(sizes) == 27
    assert max(sizes) / min(sizes) > 50


def test_patches_are_those_of_a_strided_convolution(images):
    shape = DeepViTShape(**get_workload("deepvit-tiny").shape)
    torch.manual_seed(0)
    tokens = PatchTokens(shape)
    weight = tokens.embedding.weight.view(64, 3, 8, 8)
    expected = F.conv2d(images, weight, tokens.embedding.bias, stride=8).flatten(2).transpose(1, 2)
    found = tokens(images) - tokens.positions
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, :1], tokens.class_token.expand(3, 1, 64), rtol=0, atol=1e-6)


def test_reattention_mixes_heads_as_the_paper_says():
    shape = DeepViTShape(**get_workload("deepvit-tiny").shape)
    torch.manual_seed(0)
    attention = ReAttention(shape, 0.02)
    x = torch.randn(2, 7, 64)
    query, key, value = attention.qkv(x).view(2, 7, 3, 4, 16).permute(2, 0, 3, 1, 4)
    weights = torch.einsum("bhik,bhjk->bhij", query, key).div(4).softmax(-1)
    mixed = torch.einsum("gh,bhij->bgij", attention.mix.weight, weights)
    mean, variance = mixed.mean(1, keepdim=True), mixed.var(1, keepdim=True, correction=0)
    normed = (mixed - mean) / (variance + attention.mix_norm.eps).sqrt()
    expected = torch.einsum("bhij,bhjk->bihk", normed, value).reshape(2, 7, 64)
    torch.testing.assert_close(attention(x), attention.proj(expected), rtol=1e-3, atol=1e-5)
