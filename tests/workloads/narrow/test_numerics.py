"""Products in 8 and 4 bits against brute force: cast, read back, multiply in float64."""

from __future__ import annotations

import narrow_reference as reference
import pytest
import torch
from torch import Tensor

from fsdpbench.workloads.layers import Projection
from fsdpbench.workloads.narrow import blocks
from fsdpbench.workloads.narrow.blocks import NarrowProjection

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Three = tuple[Tensor, Tensor, Tensor]


def computed(kind: str, bias: bool = False) -> tuple[Three, Three]:
    """Input, weight and output's gradient, with outliers; output and both gradients."""
    torch.manual_seed(1)
    base = Projection(64, 32, bias, std=0.5)
    x = torch.randn(2, 32, 64)
    x[0, 3, 5] = 40.0
    x.requires_grad_()
    y = NarrowProjection(base, kind)(x)
    gradient = torch.randn_like(y) * torch.logspace(-3, 1, 32)
    y.backward(gradient)
    assert x.grad is not None
    assert base.weight.grad is not None
    read = x.detach().flatten(0, 1), base.weight.detach(), gradient.flatten(0, 1)
    return read, (y.detach().flatten(0, 1), x.grad.flatten(0, 1), base.weight.grad)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Equal but for the sums' rounding in float32."""
    assert (found - wanted).norm() < 2e-6 * wanted.norm()


def test_fp8_is_what_its_casts_multiply_to() -> None:
    (x, w, g), (y, of_x, of_w) = computed("fp8")
    x8, w8, g8 = (reference.by_tensor(t, d) for t, d in ((x, E4M3), (w, E4M3), (g, E5M2)))
    assert_near(y, x8 @ w8.t())
    assert_near(of_x, g8 @ w8)
    assert_near(of_w, g8.t() @ x8)


def test_mxfp8_casts_along_what_is_summed() -> None:
    (x, w, g), (y, of_x, of_w) = computed("mxfp8")
    cast = reference.mxfp8
    assert_near(y, cast(x) @ cast(w).t())
    assert_near(of_x, cast(g) @ cast(w.t()).t())
    assert_near(of_w, cast(g.t()) @ cast(x.t()).t())


def test_nvfp4_rotates_what_is_summed_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise of a half, the stochastic rounding is that to the nearest."""
    monkeypatch.setattr(torch, "rand", lambda shape: torch.full(tuple(shape), 0.5))
    (x, w, g), (y, of_x, of_w) = computed("nvfp4")
    cast, signs = reference.nvfp4, blocks._SIGNS
    w4 = cast(w, square=True)
    assert_near(y, cast(x) @ w4.t())
    assert_near(of_x, cast(g) @ w4)
    g4, x4 = (cast(reference.turned(t.t(), signs)) for t in (g, x))
    assert_near(of_w, g4 @ x4.t())


def test_a_rotation_leaves_products_as_they_are() -> None:
    a, b = torch.randn(8, 64), torch.randn(12, 64)
    assert not torch.allclose(blocks.rotated(a), a)
    torch.testing.assert_close(blocks.rotated(a) @ blocks.rotated(b).t(), a @ b.t())


def test_drawn_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    amax = x.abs().max()
    sums = torch.zeros_like(x)
    for _ in range(400):
        drawn = blocks.nvfp4(x, amax, noise=torch.rand(x.shape))
        sums += blocks.dequantised(*drawn) * blocks.nvfp4_factor(amax)
    nearest = blocks.dequantised(*blocks.nvfp4(x, amax)) * blocks.nvfp4_factor(amax)
    # The scale itself is rounded: what exceeds its block's largest number is cut off.
    inside = nearest.abs() < 0.9 * nearest.unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, 1)
    assert ((sums / 400 - x).abs()[inside]).mean() < 0.15 * (nearest - x).abs()[inside].mean()


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4"])
def test_zeros_stay_zeros_and_a_bias_is_added(kind: str) -> None:
    layer = NarrowProjection(Projection(32, 32, True), kind)
    torch.nn.init.constant_(layer.bias, 0.25)
    y = layer(torch.zeros(32, 32))
    y.sum().backward()
    assert torch.equal(y, torch.full((32, 32), 0.25))
    assert torch.equal(layer.bias.grad, torch.full((32,), 32.0))
    assert torch.equal(layer.weight.grad, torch.zeros(32, 32))


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4"])
def test_autocast_casts_what_is_read_and_gradients_are_those_of_parameters(kind: str) -> None:
    layer = NarrowProjection(Projection(32, 64, False), kind)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(64, 32))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
