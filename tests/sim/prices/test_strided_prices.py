"""Operators that issue more than they move: sums over a few elements, broadcasts over many dimensions."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.torch_device.prices import Call, price, tensor_bytes
from fsdpbench.sim.torch_device.prices.memory import _broadcast, _joined, _of_reduction

ATEN = torch.ops.aten
SUM = ATEN.sum.dim_IntList
COSTS = KernelCosts(load_profile("a100-80gb"))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def summed(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[int, int]:
    """Nanoseconds of a sum, and those of its bytes."""
    out = x.sum(dim, keepdim=keepdim)
    moved = COSTS.memory_bound_ns(tensor_bytes(x) + tensor_bytes(out), "reduction")
    return price(SUM, (x, [dim], keepdim), {}, out, COSTS).duration_ns, moved


def test_a_sum_over_two_elements_is_limited_by_its_threads() -> None:
    found, moved = summed(meta(2, 32, 4096, 64, 2, 2), -1)
    assert found > 2 * moved


@pytest.mark.parametrize(("shape", "dim"), [((8192, 4096), 1), ((8192, 4096), 0), ((8192, 32, 4096), 1)])
def test_long_sums_and_sums_of_columns_are_limited_by_their_bytes(shape: tuple[int, ...], dim: int) -> None:
    found, moved = summed(meta(*shape), dim)
    assert found == moved


@pytest.mark.parametrize("keepdim", [True, False])
def test_threads_of_a_sum_are_those_of_torch(keepdim: bool) -> None:
    # Reduce.cuh: two lanes a result; a transposed input leaves four dimensions to compute addresses of.
    x = meta(2, 4096, 32, 128, 2).transpose(1, 2)
    call = Call(SUM, (x, [-1], keepdim), {}, [meta(*x.sum(-1, keepdim=keepdim).shape)])
    assert _of_reduction(call) == (x.numel(), 113 + 2 * 8 * 4 + 5)


def test_everything_to_one_element_and_empty_tensors_have_a_price() -> None:
    for x in (meta(4096), meta(0, 4), meta()):
        for out, arguments in ((x.sum(), (x, None)), (x.sum(-1), (x, [-1]))):
            assert price(SUM, arguments, {}, out, COSTS).duration_ns > 0


def test_dimensions_that_follow_each_other_are_one() -> None:
    heads = meta(2, 4096, 32, 128).transpose(1, 2)
    assert _joined(*_found(heads, heads)) == 1
    assert _joined(*_found(heads, meta(4096, 128))) == 4
    assert _joined(*_found(meta(8192, 4096), meta(4096))) == 2


def _found(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Size, list[tuple[int, ...]]]:
    found = _broadcast(Call(ATEN.mul.Tensor, (x, y), {}, [x * y]))
    assert found is not None
    return found  # type: ignore[return-value]


def test_a_faster_chip_issues_faster() -> None:
    a100, h100 = (KernelCosts(load_profile(name)).issued_ns(1e8, 100) for name in ("a100-80gb", "h100-80gb"))
    # 108 and 132 multiprocessors at 1.41 and 1.98 GHz.
    assert a100 / h100 == pytest.approx(132 * 1.98 / (108 * 1.41), rel=0.02)


H200 = KernelCosts(load_profile("h200"))


def on_h200(func: torch._ops.OpOverload, *given: object, out: object) -> float:
    """Microseconds of a call on an H200."""
    return price(func, given, {}, out, H200).duration_ns / 1e3


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_prices_are_those_that_one_h200_measured() -> None:
    # ci/measured/gpu/h200/kernels.txt, and kernels in traces of training, in us.
    heads, flat, table = half(2, 4096, 32, 128).transpose(1, 2), meta(2, 32, 4096, 128), meta(4096, 128)
    part, rows, labels = (
        heads[..., :64],
        meta(1241888, 16),
        torch.empty(8192, dtype=torch.int64, device="meta"),
    )
    x, weight = half(64, 256, 14, 14), half(256, 256, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image, odd = half(64, 232, 112, 112), half(512, 197, 197)
    found = {
        "mul of strided and float32": (on_h200(ATEN.mul.Tensor, heads, table, out=flat), 206),
        "neg": (on_h200(ATEN.neg.default, part, out=part.neg()), 46),
        "cat": (on_h200(ATEN.cat.default, [part, part], -1, out=half(2, 32, 4096, 128)), 150),
        "to float32": (on_h200(ATEN._to_copy.default, half(8192, 4096), out=meta(8192, 4096)), 106),
        "to bf16": (on_h200(ATEN._to_copy.default, flat, out=half(2, 32, 4096, 128)), 47),
        "short rows": (
            on_h200(ATEN.native_layer_norm.default, rows, [16], None, None, 1e-5, out=[rows]),
            1811,
        ),
        "rows added": (
            on_h200(
                ATEN.embedding_dense_backward.default,
                meta(8192, 4096),
                labels,
                32000,
                -1,
                False,
                out=meta(32000, 4096),
            ),
            662,
        ),
        "convolution": (on_h200(ATEN.convolution.default, x, weight, None, *geometry, out=x), 49),
        "batch norm": (
            on_h200(
                ATEN.native_batch_norm.default, image, None, None, None, None, True, 0.1, 1e-5, out=[image]
            ),
            1033,
        ),
        "odd product": (on_h200(ATEN.bmm.default, odd, half(512, 197, 128), out=half(512, 197, 128)), 72),
    }
    wrong = {name: pair for name, pair in found.items() if not 0.75 < pair[0] / pair[1] < 1.33}
    assert not wrong


def test_a_product_with_a_vector_is_none_of_odd_lengths() -> None:
    rows, one, two = half(8192, 4096), half(4096, 1), half(4096, 2)
    alone = on_h200(ATEN.mm.default, rows, one, out=half(8192, 1))
    assert alone <= on_h200(ATEN.mm.default, rows, two, out=half(8192, 2))


def test_only_weight_gradients_that_cudnn_may_take_slowly_count_as_unknown() -> None:
    def unknown(channels: int, groups: int) -> bool:
        x, weight = half(64, channels, 14, 14), half(channels, channels // groups, 3, 3)
        geometry = ([channels], [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        call = x, x, weight, *geometry, [True, True, False]
        return price(ATEN.convolution_backward.default, call, {}, [x, weight, None], H200).unknown

    assert unknown(1392, 6)
    assert not unknown(512, 32)
    assert not unknown(232, 1)


def test_channels_last_are_not_copied() -> None:
    x, weight, geometry = (
        half(8, 320, 64, 64),
        half(320, 320, 3, 3),
        ([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    )
    last = x.to(memory_format=torch.channels_last)
    first, second = (
        on_h200(ATEN.convolution.default, each, weight, None, *geometry, out=each) for each in (x, last)
    )
    assert first - second == pytest.approx(146 - 98, rel=0.3)


def test_a_transposed_convolution_s_backward_takes_twice_its_forward() -> None:
    x, y, weight = half(64, 512, 32, 32), half(64, 512, 64, 64), half(512, 512, 4, 4)
    geometry = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    forward = on_h200(ATEN.convolution.default, x, weight, None, *geometry, out=y)
    call = y, x, weight, [512], *geometry, [True, True, False]
    backward = on_h200(ATEN.convolution_backward.default, *call, out=[x, weight, None])
    assert backward == pytest.approx(2 * forward, rel=0.3)


def test_a_batch_norm_without_training_moves_its_bytes() -> None:
    x = half(64, 256, 56, 56)
    training, not_training = (
        on_h200(ATEN.native_batch_norm.default, x, None, None, None, None, each, 0.1, 1e-5, out=[x])
        for each in (True, False)
    )
    assert training > 2 * not_training
