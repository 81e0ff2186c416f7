"""Which parameters have collectives of their own, and that these bring what packed ones bring."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from fsdp_cases import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench import impl
from fsdpbench.impl.fsdp2.sharded_units import LARGE_BYTES, order_for_groups, smallest_with_own
from fsdpbench.impl.shared.settings import CommunicationLayout


@pytest.mark.parametrize(
    ("layout", "backend", "smallest"),
    [
        ("auto", "nccl", LARGE_BYTES),
        ("auto", "gloo", math.inf),
        ("auto", "another", math.inf),
        ("packed", "nccl", math.inf),
        ("grouped", "nccl", 0),
        ("grouped", "gloo", 0),
    ],
)
def test_the_layout_says_who_has_its_own(layout: str, backend: str, smallest: float) -> None:
    assert smallest_with_own(CommunicationLayout(layout), backend) == smallest


@given(
    st.lists(st.tuples(st.integers(0, 1 << 24), st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=12),
    st.sampled_from([0, LARGE_BYTES, math.inf]),
)
@settings(deadline=None, max_examples=200)
def test_order_is_one_that_a_layout_can_have(parameters: list[tuple[int, int]], smallest: float) -> None:
    sizes, dims = [size for size, _ in parameters], [dim for _, dim in parameters]
    order, grouped = order_for_groups(sizes, dims, smallest)
    assert sorted(order) == list(range(len(sizes)))
    assert all(sizes[index] >= smallest for index in order[:grouped])
    ordered = [dims[index] for index in order]
    assert ordered == sorted(ordered)
    if grouped:
        assert not any(dims)
        packed = sum(sizes[index] for index in order[grouped:])
        assert 8 * packed <= sum(sizes)


def test_a_wrong_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout must be one of 'auto', 'grouped', 'packed', not 'loose'"):
        impl.fully_shard(nn.Linear(2, 2), layout="loose")


_COPIES = ("_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat")
"""What an FSDP copies with; gloo's own copies inside a collective are plain ones."""


class Moves(TorchDispatchMode):
    """Counts operators that copy without a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _COPIES:
            whole = name == "_foreach_copy_"
            sources = args[1] if whole else args[0]
            targets = args[0] if whole else (kwargs or {}).get("out", sources)
            first = [side[0] if isinstance(side, (list, tuple)) else side for side in (sources, targets)]
            self.counted["moved" if first[0].dtype == first[1].dtype else "cast"] += 1
        return func(*args, **(kwargs or {}))


def step(rank: int, **arguments: Any) -> tuple[Counter[str], list[tuple[str, int]], list[torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)])
    for layer in model:
        impl.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), **arguments)
    impl.fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **arguments)
    torch.manual_seed(rank)
    batch = torch.randn(4, 16)
    model(batch).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    with recorded("impl") as collectives, Moves() as moves:
        model(batch).sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return moves.counted, collectives, gradients


def case_copies_nothing(rank: int) -> None:
    (none, calls, gradients), (some, others, expected) = (
        step(rank, layout=layout) for layout in ("grouped", "packed")
    )
    assert none["moved"] == 0
    assert some["moved"] > 0
    assert calls == others
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, other)


def case_casts_once_a_direction(rank: int) -> None:
    policy = impl.MixedPrecisionPolicy(torch.bfloat16)
    counted, _, _ = step(rank, layout="grouped", mp_policy=policy)
    assert counted["moved"] == 0
    assert counted["cast"] == 2 * 2  # in before each gather: two units, in forward and in backward


@pytest.mark.parametrize("case", [case_copies_nothing, case_casts_once_a_direction])
def test_copies(two_ranks, case: Any) -> None:
    two_ranks.run(case)
