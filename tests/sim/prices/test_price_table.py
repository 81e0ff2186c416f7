"""The table of prices: each operator in one row, patterns after names, prices of a user's own before both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.torch_device.prices import Call, OperatorCost, families, operator_price, price
from fsdpbench.sim.torch_device.prices.families import FAMILIES, UNKNOWN, rule_of

ATEN = torch.ops.aten


@pytest.fixture
def costs() -> KernelCosts:
    return KernelCosts(load_profile("a100-80gb"))


@pytest.fixture(autouse=True)
def unpriced() -> Iterator[None]:
    yield
    families._OF_USERS.clear()


def test_no_operator_is_in_two_rows() -> None:
    counted = Counter(name for operators in FAMILIES.values() for name in operators)
    assert [name for name, count in counted.items() if count > 1] == []


def test_every_operator_of_the_table_exists() -> None:
    # Some are another version's, or another library's of torch: they are few.
    absent = [n for operators in FAMILIES.values() for n in operators if not hasattr(ATEN, n)]
    assert len(absent) < 12, absent


def test_what_is_in_no_row_is_priced_by_its_bytes_and_told(costs: KernelCosts) -> None:
    x = torch.empty(1024, 1024, device="meta")
    found = price(ATEN.linalg_lu_factor.default, (x,), {}, (x.clone(), x.clone()), costs)
    assert rule_of(ATEN.linalg_lu_factor.default) is UNKNOWN
    assert found.unknown
    assert found.duration_ns >= costs.memory_bound_ns(3 * 4 * 1024**2)


def test_a_users_price_comes_before_the_tables(costs: KernelCosts) -> None:
    @operator_price("aten::mm")
    def of_mine(call: Call, given: KernelCosts) -> OperatorCost:
        assert given is costs
        return OperatorCost("mine", call.outs[0].numel())

    x = torch.empty(8, 8, device="meta")
    assert price(ATEN.mm.default, (x, x), {}, x.clone(), costs) == OperatorCost("mine", 64)
    assert price(ATEN.bmm.default, (x[None], x[None]), {}, x.clone()[None], costs).kernel.startswith("gemm")


@pytest.mark.parametrize("name", ["fused_norm", "mylib::", "::fused_norm", ""])
def test_a_name_without_namespace_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write namespace::operator"):
        operator_price(name)


def test_a_second_price_is_refused() -> None:
    operator_price("mylib::fused_norm")(lambda call, costs: OperatorCost("a", 1))
    with pytest.raises(ValueError, match="has a price already"):
        operator_price("mylib::fused_norm")
