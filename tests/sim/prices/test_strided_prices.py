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
