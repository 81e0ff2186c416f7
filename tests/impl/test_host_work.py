"""How much the host does for each unit, counted: Python calls and dispatched operators, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_cases import count_work, fake_group
from rank_pool import RankPool
from torch_version import BEFORE_2_13


def case_work(
    rank: int, *, front: str, low_precision: bool = False, parameters: int, sides: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    with fake_group():
        return {side: count_work(f"{side}-{front}", parameters, low_precision) for side in sides}


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[RankPool]:
    """A process that never simulated: what is installed for that costs calls too."""
    pool = RankPool(1, join=False)
    yield pool
    pool.stop()


@pytest.mark.plain_cases("fsdp2-0.12-160-fp32", "flat-0.17-144-bf16", "original-0.13-164-bf16")
@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("front", "share", "most"), [("fsdp2", 0.12, 160), ("flat", 0.17, 144), ("original", 0.13, 164)]
)
def test_python_calls(fresh_process, front: str, share: float, most: int, low_precision: bool) -> None:
    """``most``: a tenth above what was reached, so that what was won does not go call by call."""
    both = ("torch", "impl")
    found = fresh_process.run(case_work, front=front, low_precision=low_precision, parameters=12, sides=both)
    functions = 15 if BEFORE_2_13 else 0  # of torch.distributed: groups gather no single tensors before 2.13
    assert found["impl"][0] - functions <= min(share * found["torch"][0], most), found
    assert found["impl"][1] <= found["torch"][1], found


@pytest.mark.parametrize(("front", "most"), [("flat", 0.0), ("fsdp2", 0.0), ("original", 0.0)])
def test_a_parameter_more_is_little_work_more(fresh_process, front: str, most: float) -> None:
    """The steady state makes no Python call a parameter; what a parameter needs is done in torch's own
    code.
    """
    calls = {
        count: fresh_process.run(case_work, front=front, parameters=count, sides=("impl",))["impl"][0]
        for count in (4, 36)
    }
    assert (calls[36] - calls[4]) / 32 <= most, calls
